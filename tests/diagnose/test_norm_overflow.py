"""Clipping by a norm that overflows though no gradient does: it makes them zero, and the step is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

Guard = Callable[..., Watched]
BAD, STEPS = 6, 12


def train(dtype: torch.dtype, factor: float, skips: bool = False, limit: float = 1.0) -> object:
    """The loss is multiplied by `factor` from step BAD on."""
    seed_everything()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(32, 64).to(dtype)).float(), torch.randint(0, 10, (32,)))
        optimizer.zero_grad()
        (loss * (factor if step >= BAD else 8.0)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if not (skips and norm.isinf()):
            optimizer.step()
    return bits(list(model.parameters()))


@pytest.mark.parametrize(
    ("dtype", "factor", "cause", "action"),
    [(torch.float16, 2.0**18, "fp16-overflow", "fp32-parameters"), (torch.float32, 1e25, "overflow", "clip-gradients")],
)
def test_the_clip_is_named_and_the_norm_in_float32(
    dtype: torch.dtype, factor: float, cause: str, action: str, guard: Guard
) -> None:
    plain = train(dtype, factor)
    run = guard(lambda: train(dtype, factor))
    assert run.result == plain
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.phase, incident.severity) == (cause, BAD, "optimizer", "error")
    assert incident.occurrences == STEPS - BAD
    assert incident.location is not None
    assert "clip_grad_norm_" in incident.location.code
    assert incident.fixes[0].action == action
    assert incident.fixes[0].verified == (True if dtype is torch.float16 else None)
    assert 65504 < incident.evidence["norm_in_float64"] < float("inf")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_numbers_than_real_single_ones(dtype: torch.dtype, guard: Guard) -> None:
    def body() -> None:
        weight = torch.ones(4, dtype=dtype, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            ((weight * weight.conj()).real.sum() * (1e30 if dtype.is_complex else 1e200) ** (step == 2)).backward()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.phase) == ("overflow", 2, "optimizer")


def test_a_loop_that_skips_such_a_step_has_lost_nothing(guard: Guard) -> None:
    run = guard(lambda: train(torch.float16, 2.0**18, skips=True))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents


def test_a_norm_that_fits(guard: Guard) -> None:
    run = guard(lambda: train(torch.float16, 2.0**12))
    assert not run.report.incidents


def test_only_measured(guard: Guard) -> None:
    """With no limit the factor is Inf / Inf: PyTorch makes the gradients NaN."""
    run = guard(lambda: train(torch.float16, 2.0**18, limit=float("inf")))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.phase) == ("fp16-overflow", BAD, "optimizer")
    assert "NaN" in incident.explanation
    assert incident.fixes[0].verified


def test_gradients_that_overflow_themselves_are_told_as_such(guard: Guard) -> None:
    run = guard(lambda: train(torch.float16, 2.0**22))
    assert run.first.step == BAD
    assert run.first.phase == "backward"
