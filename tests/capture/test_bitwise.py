"""Observing changes nothing: a guarded run ends bit for bit as an unguarded one, with failures explained on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import BAD_STEPS, LOOPS, STEPS
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, fingerprint, seed_everything

Guard = Callable[..., Watched]

CAUSES = {
    "with_scaler": {"fp16-overflow"},
    "without_scaler": {"domain-error"},
    "poisoned": {"nonfinite-input"},
    "in_bfloat16": {"empty-reduction"},
    "accumulating": {"fp16-overflow"},
    "gan": {"fp16-overflow"},
    "with_evaluation": {"fp16-overflow"},
}


@pytest.mark.parametrize("name", LOOPS)
def test_guarded_run_ends_as_an_unguarded_one(name: str, guard: Guard) -> None:
    plain = LOOPS[name]()

    run = guard(LOOPS[name])

    assert run.faults == 0, run.stderr
    assert run.report.steps == (STEPS if name not in ("without_scaler", "in_bfloat16") else STEPS - len(BAD_STEPS))
    assert run.report.status == "incidents", "the loop must have failed for this test to mean anything"
    assert set(run.causes) <= CAUSES[name], run.stderr
    differing = [key for key in plain if run.result[key] != plain[key]]
    assert differing == []
    assert run.result.keys() == plain.keys()


def test_investigation_leaves_versions_gradients_and_graphs_alone(guard: Guard) -> None:
    """Between forward and backward nothing may be written to: the script's own backward would notice."""
    seed_everything()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.randn(6, 4)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    x[0, 0] = float("nan")

    def body() -> Any:
        loss = F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1, 0, 1]))
        before = fingerprint(model, x)
        versions = [t._version for t in (*model.parameters(), *model.buffers(), x)]
        torch.ones(())  # what is taped here belongs to nobody
        guard_state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
        loss.backward(retain_graph=True)
        loss.backward()
        after = [t._version for t in (*model.parameters(), *model.buffers(), x)]
        assert guard_state == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), False)
        grads = {k: v for k, v in before.items() if k.endswith("grad")}
        return versions == after, len(grads)

    run = guard(body)

    assert run.faults == 0
    assert run.result == (True, 6)
    assert run.first.cause == "nonfinite-input"


def test_loss_that_is_differentiated_twice_is_one_failure(guard: Guard) -> None:
    model = nn.Linear(2, 1)

    def body() -> None:
        loss = model(torch.full((1, 2), float("nan"))).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    run = guard(body)
    assert run.causes == ["nonfinite-input"]


def test_autocast_cache_is_neither_filled_nor_emptied(guard: Guard) -> None:
    """The weight casts of the open autocast region are the same tensors before and after an investigation."""
    seed_everything()
    layer = nn.Linear(4, 4)
    casts: list[int] = []

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = Two()

    def region() -> Any:
        """The gradient of a weight used twice in one region: once if its cast is shared, and the same bits."""
        casts.clear()
        with torch.autocast("cpu", dtype=torch.float16):
            one = model(torch.ones(2, 4) * 1e6)  # the cast of the input is infinite
            bad = one.sum()
            bad.backward(retain_graph=True)  # investigated here, inside the region
            two = model(torch.ones(2, 4))
            names = [type(node[0]).__name__ for node in two.grad_fn.next_functions]  # type: ignore[union-attr]
            same = two.grad_fn.next_functions[0][0] is one.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            casts.append(int(same))
        layer.zero_grad()
        two.sum().backward()
        assert layer.weight.grad is not None
        return names, list(casts), bits(layer.weight.grad), torch.is_autocast_cache_enabled()

    plain = region()
    layer.zero_grad()
    run = guard(region)

    assert plain[1] == [1], "without a guard the region shares the cast of the weight"
    assert run.faults == 0
    assert run.report.status == "incidents"
    assert run.result == plain
