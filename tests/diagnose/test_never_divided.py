"""A loss scale of the script's own that nothing divides by, from the first step on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
SCALE = 1024.0
Changes = Callable[["Loop"], None]


class Loop:
    """`masters`: "list" or "flat" float32 copies of a float16 model, or "autocast" without any; "float32" for neither."""

    def __init__(self, masters: str, kind: Any = torch.optim.SGD, rate: float = 1e-5, scale: float = SCALE) -> None:
        torch.manual_seed(0)
        self.masters, self.scale = masters, scale
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        if masters in ("list", "flat"):
            self.model.half()
        self.weights = list(self.model.parameters())
        self.held = self.weights
        if masters in ("list", "flat"):
            values = [p.detach().float().clone() for p in self.weights]
            values = [torch.cat([v.flatten() for v in values])] if masters == "flat" else values
            self.held = [nn.Parameter(v) for v in values]
        self.opt = kind(self.held, lr=rate)

    def loss(self) -> Tensor:
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.masters == "autocast"):
            out = self.model(x.to(self.weights[0].dtype))
        return (out.float() - x.sum(1, keepdim=True)).pow(2).mean()

    def to_masters(self) -> None:
        if self.held is self.weights:
            return
        grads = [p.grad.float() for p in self.weights if p.grad is not None]
        grads = [torch.cat([g.flatten() for g in grads])] if self.masters == "flat" else grads
        for p, grad in zip(self.held, grads, strict=True):
            p.grad = grad

    def from_masters(self) -> None:
        if self.held is self.weights:
            return
        parts = self.held[0].split([p.numel() for p in self.weights]) if self.masters == "flat" else self.held
        with torch.no_grad():
            for p, part in zip(self.weights, parts, strict=True):
                p.copy_(part.view_as(p))

    def train(self, before_step: Changes = lambda loop: None, steps: int = 8) -> None:
        for _ in range(steps):
            self.model.zero_grad()
            (self.loss() * self.scale).backward()
            self.to_masters()
            before_step(self)
            self.opt.step()
            self.from_masters()


@pytest.mark.parametrize("masters", ["list", "flat", "autocast"])
def test_a_scale_that_is_never_divided_out(masters: str, guard: Guard) -> None:
    run = guard(lambda: Loop(masters).train())
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    incident = run.first
    assert (incident.severity, incident.step, incident.evidence["factor"]) == ("error", 0, SCALE)
    assert incident.location.code == "self.opt.step()"
    assert "Nothing divides them" in incident.explanation


def test_an_optimizer_in_which_it_cancels(guard: Guard) -> None:
    run = guard(lambda: Loop("flat", torch.optim.AdamW, 1e-3, 2.0**14).train())
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert (run.first.severity, run.first.evidence["factor"]) == ("warning", 2.0**14)
    assert "its eps" in run.first.explanation


def test_a_scale_whose_exponent_grows(guard: Guard) -> None:
    def grow(loop: Loop) -> None:
        loop.scale *= 2**0.001

    run = guard(lambda: Loop("list").train(grow))
    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert run.first.step == 0


def divided(loop: Loop) -> None:
    for p in loop.held:
        assert p.grad is not None
        p.grad.div_(loop.scale)


def clipped(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.held, 1e-3)


@pytest.mark.parametrize("before_step", [divided, clipped])
@pytest.mark.parametrize("masters", ["list", "flat", "autocast"])
def test_gradients_that_are_divided_or_clipped(masters: str, before_step: Changes, guard: Guard) -> None:
    run = guard(lambda: Loop(masters).train(before_step))
    assert (run.faults, run.causes) == (0, []), run.stderr


class Divides(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad / SCALE
        super().step(closure)


def with_a_hook_before_the_step() -> None:
    loop = Loop("list")
    loop.opt.register_step_pre_hook(lambda *_: divided(loop))
    loop.train()


def with_hooks_on_parameters() -> None:
    loop = Loop("autocast")
    for p in loop.weights:
        p.register_hook(lambda grad: grad / SCALE)
    loop.train()


class DividesBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / SCALE


def in_the_graph() -> None:
    """Each weight is used through a function whose derivative takes the scale out."""
    torch.manual_seed(0)
    weight = torch.randn(4, 8, requires_grad=True)
    opt = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(8):
        opt.zero_grad()
        out = torch.randn(16, 8).half() @ DividesBehind.apply(weight).half().t()
        (out.float().square().mean() * SCALE).backward()
        opt.step()


def by_a_weight_of_samples() -> None:
    """The factor is how many samples there are."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3).half()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(8):
        opt.zero_grad()
        x = torch.randn(256, 8)
        loss = nn.functional.cross_entropy(model(x.half()).float(), x[:, :3].argmax(1))
        (loss * len(x)).backward()
        opt.step()


@pytest.mark.parametrize(
    "body",
    [
        lambda: Loop("float32").train(),
        lambda: Loop("autocast", scale=1000.0).train(),
        lambda: Loop("autocast", scale=16.0).train(),
        lambda: Loop("list", rate=1e-2 / SCALE).train(),
        lambda: Loop("list", Divides).train(),
        with_a_hook_before_the_step,
        with_hooks_on_parameters,
        in_the_graph,
        by_a_weight_of_samples,
    ],
    ids=["float32", "1000", "16", "rate", "own step", "step hook", "hooks", "graph", "samples"],
)
def test_factors_that_are_none_or_are_taken_out_elsewhere(body: Callable[[], None], guard: Guard) -> None:
    run = guard(body)
    assert (run.faults, run.causes) == (0, []), run.stderr
