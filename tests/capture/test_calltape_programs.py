"""Glue of any make: loops that compute their loss by programs drawn at random, which change in the last step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_calltape import Loop, shape_of
from torch import Tensor
from torch.nn import functional

import ampguard
from ampguard.capture.glue import schedule

STEPS = 7


def _masked_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 1.0] = 0.5
    return x


def _added_through_a_view(x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 0].add_(0.25)
    return x


def _constant(x: Tensor) -> Tensor:
    with torch.no_grad():
        level = x.mean(0, keepdim=True)
    return x - level


def _read_and_written(x: Tensor) -> Tensor:
    y = x + 0.0
    z = y.tanh()
    known = y.detach()
    y.mul_(0.5)
    y -= 0.1 * z
    return y + z + 0.1 * known


def _written_under_two_names(x: Tensor) -> Tensor:
    y = x * 1.0
    row, total = y[0], y.sum()
    row.mul_(0.5)
    y.add_(0.1)
    return y + 0.01 * total + 0.01 * row.sum()


def _drawn(x: Tensor) -> Tensor:
    noise = torch.empty(x.shape).uniform_(0.0, 0.1)
    parts = torch.empty(2, *x.shape)
    parts[0].normal_()
    parts[1].fill_(0.5)
    noise.mul_(2.0)
    return x + noise + 0.01 * parts.sum(0) + torch.empty_like(x).normal_().mul_(0.01)


def _added_up(x: Tensor) -> Tensor:
    total = torch.zeros(())
    total += x.mean()
    total += 0.1 * x.square().mean()
    return x + total


def _written_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        level = x.mean(0, keepdim=True)
        before = level + 0.0
        noise = torch.empty_like(level).normal_()
        level.mul_(0.5).add_(noise, alpha=0.01)
        level -= 0.1 * before
    return x - level


def _viewed_behind_writes(x: Tensor) -> Tensor:
    with torch.no_grad():
        shares = x.detach().exp()
        for _ in range(2):
            shares /= shares.sum(0, keepdim=True) + 1.0
        turned = shares.t()
    return x + 0.1 * turned.float().t()


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: (x.clamp(max=3.0)).exp(),
    "softmax": lambda x: x.softmax(-1) + 0.1,
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "gelu": functional.gelu,
    "dropout": lambda x: functional.dropout(x, 0.25),
    "noise": lambda x: x + 0.01 * torch.randn_like(x),
    "split": lambda x: torch.cat([part * (i + 1.0) for i, part in enumerate(x.chunk(2, -1))], -1),
    "stack": lambda x: torch.stack([x, -x]).mean(0),
    "sorted": lambda x: x.sort(-1).values + x.max(-1, keepdim=True)[0],
    "matrix": lambda x: x @ (x.mT @ x) / 6.0,
    "einsum": lambda x: torch.einsum("bi,ci->bc", x, x) @ x,
    "indexed": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "in place": lambda x: (x + 0.0).mul_(0.5).sub_(0.1),
    "masked in place": _masked_in_place,
    "through a view": _added_through_a_view,
    "read and written": _read_and_written,
    "under two names": _written_under_two_names,
    "drawn": _drawn,
    "added up": _added_up,
    "written without gradient": _written_without_gradient,
    "viewed behind writes": _viewed_behind_writes,
    "without gradient": _constant,
    "half": lambda x: x.half().float(),
    "transposed": lambda x: x.T.contiguous().T * 1.0,
    "half cast block": lambda x: (x.unsqueeze(0).expand(2, -1, -1) + 0.0).sum(0) / 2,
    "read": lambda x: x * (0.5 if x.detach().sum().item() > 0 else 0.6),
}
programs = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5)


def objective_of(program: list[str]) -> Callable[[Tensor, Tensor], Tensor]:
    def objective(out: Tensor, y: Tensor) -> Tensor:
        x = out.float()
        for name in program:
            x = OPERATIONS[name](x)
        return x.square().mean() + functional.cross_entropy(x, y)

    return objective


def trained(session: Any, usual: list[str], last: list[str]) -> tuple[list[Tensor], Loop]:
    loop = Loop(session, scaler=False)
    for _ in range(STEPS - 1):
        loop.step(objective_of(usual), *loop.batch())
    loop.keeps_record = True
    loop.step(objective_of(last), *loop.batch())
    return [p.detach().clone() for p in loop.model.parameters()], loop


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(usual=programs, last=programs)
def test_any_glue_is_told_as_the_tape_would_and_left_as_it_is(
    usual: list[str], last: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _ = trained(None, usual, last)
    told: list[list[Any]] = []
    for limit in (60.0, 0.0):
        monkeypatch.setattr(schedule, "LONG_STEP", limit)
        monkeypatch.setattr(schedule, "MUCH_GLUE", math.inf)
        with ampguard.watch(out=tmp_path_factory.mktemp("run") / "run") as session:
            weights, loop = trained(session, usual, last)
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(alone, weights, strict=True))
        if session.report.incidents:
            return  # some programs diverge, which is looked into and changes what is kept
        assert loop.record.complete
        assert (max(loop.calls) > 0) == (limit > 0)
        told.append(shape_of(loop.record.events))
    assert told[0] == told[1]
