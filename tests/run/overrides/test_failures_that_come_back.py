"""Failures that no precision cures, step after step under `skip` and `heal`; models of several parts in one region."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.regions import Regions


class Pool(nn.Module):
    """The mean of what the mask keeps."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pool, self.out = nn.Linear(3, 8), Pool(), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.pool(self.embed(x), mask))


@pytest.mark.parametrize("on_nonfinite", ["skip", "heal"])
def test_each_failure_is_told_once_and_counted(overridden: Callable[..., Any], on_nonfinite: str) -> None:
    bad = (3, 6, 7, 11)
    with overridden(on_nonfinite=on_nonfinite) as session:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(12):
            mask = torch.ones(4, 3)
            mask[2] = step not in bad
            loss = nn.functional.cross_entropy(net(torch.randn(4, 3, 3), mask), torch.randint(0, 2, (4,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step, incident.occurrences) == ("division-by-zero", 3, len(bad))


class Member(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / torch.relu(self.temperature)


def test_a_functional_step_is_taped_after_one_that_was_held_off(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that hang in no module: its model is on the meta device."""
    with overridden(on_nonfinite="skip") as session:
        members = [Member() for _ in range(3)]
        with torch.no_grad():
            members[1].temperature.fill_(0.0)
        weights, _ = stack_module_state(members)
        base = copy.deepcopy(members[0]).to("meta")
        optimizer = torch.optim.SGD(list(weights.values()), 1e-2)
        for _ in range(5):
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
            run = vmap(lambda w, x: functional_call(base, w, (x,)), in_dims=(0, None))
            loss = torch.stack([nn.functional.cross_entropy(out, y) for out in run(weights, x)]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = session.report.incidents
    assert (incident.cause, incident.occurrences) == ("division-by-zero", 5)
    assert session.report.run["steps_held_off"] == 5
    assert "are not held off" not in capsys.readouterr().err


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ x


def test_a_part_that_hangs_in_a_holder_is_healed(overridden: Callable[..., Any]) -> None:
    """The script calls the parts of its model one by one, in one region of autocast."""
    with overridden(on_nonfinite="heal") as session:
        net = nn.ModuleDict({"att": Products(), "head": nn.Linear(16, 1)})
        optimizer = torch.optim.SGD(net.parameters(), 1e-6)
        for step in range(6):
            x = torch.randn(2, 6, 16) * (1000.0 if step > 2 else 1.0)
            with torch.autocast("cpu", torch.float16):
                loss = net["head"](net["att"](x)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first = session.report.run["healed"][0]
    assert (first["action"], first["target"]) == ("force-fp32", "att")
    (incident,) = session.report.incidents
    assert incident.occurrences == 1


def test_a_region_in_another_type_finds_none_of_the_casts_of_the_one_around_it() -> None:
    """Autocast's cache of casts does not ask for their type."""
    regions, layer, x = Regions(Plan(None), Ledger()), nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.float16):
        assert layer(x).dtype == torch.float16
        with regions.around(regions.make("cpu", torch.bfloat16)):
            assert layer(x).dtype == torch.bfloat16
        assert layer(x).dtype == torch.float16
