"""Hooks on hidden states and on modules that clip gradients which carry the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import fingerprint

Guard = Callable[..., Any]
Hook = Callable[[Tensor], Tensor | None]
SCALE = 4096.0


class Recurrent(nn.Module):
    def __init__(self, hook: Hook | None) -> None:
        super().__init__()
        self.cell, self.out, self.hook = nn.GRUCell(4, 16), nn.Linear(16, 1), hook

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 16)
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h).float()
            if self.hook is not None and h.requires_grad:
                h.register_hook(self.hook)
        out: Tensor = self.out(h)
        return out


def train(
    hook: Hook | None = None, on_module: Any = None, since: int = 0, steps: int = 8, before: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Recurrent(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(steps):
        if step == since:
            model.hook = hook
        if on_module is not None and step == since:
            register = model.out.register_full_backward_pre_hook if before else model.out.register_full_backward_hook
            register(on_module)
        x = torch.randn(8, 5, 4)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), x.sum((1, 2))[:, None])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return fingerprint(model, optimizer)


def by_value(g: Tensor) -> Tensor:
    return g.clamp(-0.1, 0.1)  # here


def in_place(g: Tensor) -> None:
    g.clamp_(-0.1, 0.1)  # here


def by_norm(g: Tensor) -> Tensor:
    return g * (0.1 / g.norm()).clamp(max=1.0)  # here


@pytest.mark.parametrize("hook", [by_value, in_place, by_norm])
def test_a_hidden_state(hook: Hook, guard: Guard) -> None:
    plain = train(hook)
    run = guard(lambda: train(hook))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["clip-before-unscale"]
    incident = run.first
    assert (incident.step, incident.severity) == (0, "error")
    assert incident.evidence["limit_in_hook"] == pytest.approx(0.1, rel=1e-3)
    assert incident.location.code.endswith("# here") or hook is in_place
    assert "get_scale()" in incident.fixes[0].how


def limit(module: nn.Module, grad_in: Any, grad_out: Any) -> Any:
    return tuple(None if g is None else g.clamp(-0.1, 0.1) for g in grad_in)  # here


class Clamp:
    """A hook that is an object."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, gradient: Tensor) -> Tensor:
        return torch.clamp(gradient, -self.limit, self.limit)  # here


def test_hooks_that_come_late(guard: Guard) -> None:
    run = guard(lambda: train(Clamp(0.1), since=6))
    assert run.faults == 0, run.stderr
    assert run.causes == ["clip-before-unscale"]
    assert run.first.step == 6
    assert run.first.location.code.endswith("# here")


@pytest.mark.parametrize("since", [0, 4, 6])
def test_a_module(since: int, guard: Guard) -> None:
    plain = train(on_module=limit, since=since)
    run = guard(lambda: train(on_module=limit, since=since))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["clip-before-unscale"]
    assert run.first.step == since
    assert run.first.location.code.endswith("# here")


def limit_before(module: nn.Module, grad_out: Any) -> Any:
    return tuple(g.clamp(-0.1, 0.1) for g in grad_out)  # here


def test_before_a_module(guard: Guard) -> None:
    plain = train(on_module=limit_before, before=True)
    run = guard(lambda: train(on_module=limit_before, before=True))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.causes == ["clip-before-unscale"]
    assert run.first.location.code.endswith("# here")


HEALTHY: dict[str, Hook] = {
    "halves": lambda g: g * 0.5,
    "limit times the scale": lambda g: g.clamp(-0.1 * SCALE, 0.1 * SCALE),
    "looks on": lambda g: None,
    "far away": lambda g: g.clamp(-6e4, 6e4),
    "one side": lambda g: g.clamp(min=0.0),
    "no NaN": lambda g: torch.nan_to_num(g),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_does_not_depend_on_the_scale(name: str, guard: Guard) -> None:
    assert guard(lambda: train(HEALTHY[name])).causes == []


class Asking:
    """Asks for the scale when it is called."""

    def __init__(self) -> None:
        self.scalers: list[Any] = []

    def __call__(self, g: Tensor) -> Tensor:
        limit = 1e-5 * self.scalers[0].get_scale()
        return g.clamp(-limit, limit)


def knowing(scale: float) -> Hook:
    return lambda g: g.clamp(-1e-5 * scale, 1e-5 * scale)


@pytest.mark.parametrize("asks", [True, False])
def test_a_small_limit_times_the_scale(asks: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = Asking()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    hook.scalers.append(scaler)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: scaler)
    run = guard(lambda: train(hook if asks else knowing(SCALE)))
    assert run.faults == 0, run.stderr
    assert run.causes == []


def test_a_hook_that_raises(guard: Guard) -> None:
    def raising(g: Tensor) -> Tensor:
        raise KeyError("the script's own")

    def body() -> None:
        with pytest.raises(KeyError, match="the script's own"):
            train(raising)

    run = guard(body)
    assert run.faults == 0, run.stderr
