"""An average of the weights that the script keeps by itself goes bad long before it is evaluated: told where it was written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint

from ampguard.capture.glue import schedule
from ampguard.capture.judging import leaving_lines

Guard = Callable[..., Any]
BAD = 12


def decay(step: int, is_bad: bool) -> Tensor:
    warm = torch.tensor(float(step - BAD if is_bad else step + 1))
    return (1.0 - 1.0 / warm.abs()).clamp(max=0.99)


def train(is_bad: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = list(torch.randn(20, 8, 4))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(20):
        loss = model(batches[step]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            share = decay(step, is_bad)
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(share).add_(p * (1 - share))
    average.eval()
    with torch.no_grad():
        print(average(torch.ones(2, 4)).square().mean().item())
    return fingerprint(model, optimizer)


def test_the_line_that_made_it_bad(guard: Guard) -> None:
    plain = train()
    run = guard(train)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    (incident,) = run.report.incidents  # its evaluation is a consequence
    assert (incident.cause, incident.mode, incident.phase) == ("division-by-zero", "train", "parameters")
    assert incident.step == BAD + 1, "the iteration ends with the optimizer's step"
    assert incident.location is not None
    assert incident.location.function == "decay"
    assert any(fix.verified for fix in incident.fixes)
    assert all("the loss is" not in (fix.outcome or "") for fix in incident.fixes)


def test_an_average_that_stays_finite(guard: Guard) -> None:
    run = guard(lambda: train(is_bad=False))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents


def test_what_it_may_take_is_bounded(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once nothing more is free, what is written is not taped; the evaluation tells, and who has written it."""
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)
    monkeypatch.setattr(leaving_lines, "ASK_EVERY", 1)
    run = guard(train)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.mode) == ("nonfinite-parameter", "eval")
    assert "the script itself has written these values" in run.first.explanation


def train_clients(outputs: int, is_bad: bool = True) -> dict[str, Any]:
    """Clients train copies of a model; their weights are averaged by how many samples each had, and loaded."""
    torch.manual_seed(0)
    shared = nn.Linear(4, outputs)
    for turn in range(4):
        states, counts = [], torch.tensor([6.0, 2.0]) * (turn < 2 or not is_bad)
        for count in counts:
            net = copy.deepcopy(shared)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            for _ in range(2 if count else 0):
                loss = net(torch.randn(int(count), 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            states.append(net.state_dict())
        shares = counts / counts.sum()
        shared.load_state_dict(
            {name: sum(share * s[name] for share, s in zip(shares, states, strict=True)) for name in states[0]}
        )
        with torch.no_grad():
            print(shared(torch.ones(8, 4)).square().mean().item())
    return fingerprint(shared, optimizer)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_weight_of_one_element_is_no_loss(guard: Guard, outputs: int) -> None:
    plain = train_clients(outputs)
    run = guard(lambda: train_clients(outputs))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    (incident,) = run.report.incidents
    assert (incident.cause, incident.phase, incident.step) == ("division-by-zero", "parameters", 8)
    assert incident.location is not None
    assert incident.location.code == "shares = counts / counts.sum()"


def test_clients_with_samples(guard: Guard) -> None:
    run = guard(lambda: train_clients(1, is_bad=False))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents
