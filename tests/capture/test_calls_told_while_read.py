"""A loss that an operator reads (`assert torch.isfinite(loss)`): what its calls are made of is found out in the midst of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from watching import Watched

Guard = Callable[..., Watched]
BAD = 9


def stops_on_a_bad_loss() -> int:
    """Factors of a score outside every module: float16 meets a float32 weight in an einsum, under autocast."""
    torch.manual_seed(0)
    body, basis = nn.Linear(6, 8), nn.Parameter(torch.randn(8, 6))
    optimizer = torch.optim.SGD([*body.parameters(), basis], lr=1e-4)
    for step in range(BAD + 3):
        x = torch.randn(4, 6) * (2000 if step == BAD else 1)
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = body(x)
            score = torch.einsum("bk,kd->bd", hidden * hidden, basis)
            loss = (score.float() - x).abs().mean()
        if not torch.isfinite(loss):
            return step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return -1


def test_it_is_explained_in_its_step(guard: Guard) -> None:
    run = guard(stops_on_a_bad_loss)
    assert run.faults == 0, run.stderr
    assert run.result == BAD
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.op) == ("fp16-overflow", BAD, "aten.mul.Tensor")
    assert incident.location is not None
    assert "einsum" in incident.location.code
    assert any(fix.verified for fix in incident.fixes)
