"""Weights that are plain tensors: no module, no optimizer, the script updates them in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from watching import Watched

Guard = Callable[..., Watched]
BAD, STEPS = 5, 9


def layer(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.5).requires_grad_()


def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    rate = (torch.tanh(x @ weights["w"]) @ weights["v"]).exp().squeeze(-1)
    return (rate - y * rate.log() + rate * y.log()).mean()


def train(by_backward: bool) -> None:
    weights = {"w": layer(3, 8), "v": layer(8, 1)}
    for step in range(STEPS):
        x, y = torch.rand(12, 3), torch.rand(12) + 0.1
        if step == BAD:
            y[4] = -1.0
        loss = loss_of(weights, x, y)
        if by_backward:
            loss.backward()
            slopes = [w.grad for w in weights.values()]
        else:
            slopes = list(torch.autograd.grad(loss, list(weights.values())))
        with torch.no_grad():
            for weight, slope in zip(weights.values(), slopes, strict=True):
                weight -= 0.01 * slope
                weight.grad = None


@pytest.mark.parametrize("by_backward", [False, True])
def test_loss_and_what_follows_from_it(by_backward: bool, guard: Callable[..., Watched]) -> None:
    run = guard(lambda: train(by_backward))
    (incident,) = run.report.incidents
    assert (incident.step, incident.phase, incident.cause) == (BAD, "loss", "domain-error")
    assert incident.location is not None
    assert "y.log()" in incident.location.code
    assert incident.evidence["rung"] == "replay"
    assert any(fix.verified for fix in incident.fixes)
    assert incident.evidence["later_failures_caused_by_it"] >= 1
    assert not run.faults


def slope_at_zero(weight: Tensor, is_bad: bool) -> Tensor:
    a, b = torch.randn(8, 5), torch.randn(8, 5)
    if is_bad:
        b[2] = a[2]
    return ((a - b) @ weight).pow(2).sum(1).sqrt().mean()


def by_data(weight: Tensor, momentum: Tensor) -> Tensor:
    assert weight.grad is not None
    momentum.mul_(0.9).add_(weight.grad)
    weight.data.add_(momentum, alpha=-0.01)
    return weight


def in_place(weight: Tensor, momentum: Tensor) -> Tensor:
    with torch.no_grad():
        assert weight.grad is not None
        weight -= 0.01 * weight.grad
    return weight


def anew(weight: Tensor, momentum: Tensor) -> Tensor:
    assert weight.grad is not None
    return (weight - 0.01 * weight.grad).detach().requires_grad_()


UPDATES = [by_data, in_place, anew]


@pytest.mark.parametrize("update", UPDATES)
def test_gradient_is_judged_in_its_own_step(update: Callable[[Tensor, Tensor], Tensor], guard: Guard) -> None:
    def body() -> None:
        weight, momentum = torch.randn(5, 4, requires_grad=True), torch.zeros(5, 4)
        for step in range(STEPS):
            weight.grad = None
            slope_at_zero(weight, step == BAD).backward()
            weight = update(weight, momentum)

    (incident,) = guard(body).report.incidents
    assert (incident.step, incident.phase, incident.cause) == (BAD, "backward", "singular-gradient")
    assert incident.location is not None
    assert ".sqrt()" in incident.location.code
    assert any(fix.verified for fix in incident.fixes)
    assert incident.evidence["later_failures_caused_by_it"] >= 1


def test_gradients_add_up_over_micro_steps(guard: Guard) -> None:
    """What a bad micro-step leaves in the weights is no news in the next one, nor after the weights have taken it over."""

    def body() -> None:
        weights = {"w": layer(3, 8), "v": layer(8, 1)}
        for micro_step in range(24):
            x, y = torch.rand(12, 3), torch.rand(12) + 0.1
            if micro_step == 13:
                y[4] = -1.0
            loss_of(weights, x, y).backward()
            for w in weights.values() if micro_step % 4 == 3 else ():
                assert w.grad is not None
                w.data -= 0.01 * w.grad
                w.grad.zero_()

    (incident,) = guard(body).report.incidents
    assert (incident.step, incident.phase, incident.cause) == (13, "loss", "domain-error")


def test_gradients_of_casts_that_are_left_behind(guard: Guard) -> None:
    """Each step differentiates new float16 weights, scaled by hand; those of a step that is skipped are nobody's."""

    def body() -> None:
        torch.manual_seed(0)
        master, scale = [torch.randn(6, 16) * 0.3, torch.randn(16, 1) * 0.3], 256.0
        for step in range(12):
            low = [w.half().requires_grad_() for w in master]
            h = torch.randn(8, 6).half() * (3000.0 if step == BAD else 1.0) @ low[0]
            loss = (torch.tanh(h) @ low[1]).float().square().mean() + (h * h).mean().float() * 1e-3
            (loss * scale).backward()
            slopes = [w.grad.float() / scale for w in low if w.grad is not None]
            if not all(bool(g.isfinite().all()) for g in slopes):
                scale /= 2
                continue
            for w, g in zip(master, slopes, strict=True):
                w -= 0.05 * g

    (incident,) = guard(body).report.incidents
    assert (incident.step, incident.cause, incident.op) == (BAD, "fp16-overflow", "aten.mul.Tensor")


LONG = 500
"""Steps of a long run: more of them than the record of one step has room for."""


def softmax_by_hand(weights: dict[str, Tensor], is_bad: bool) -> Tensor:
    p = torch.tanh(torch.rand(12, 3) @ weights["w"]).softmax(-1)
    return -torch.log(p * (0.0 if is_bad else 1.0))[:, 0].mean()


def with_optimizer(weights: dict[str, Tensor]) -> None:
    optimizer = torch.optim.SGD(weights.values(), lr=0.01)
    for step in range(LONG):
        optimizer.zero_grad()
        softmax_by_hand(weights, step == LONG - 2).backward()
        optimizer.step()


def by_hand(weights: dict[str, Tensor]) -> None:
    for step in range(LONG):
        slopes = torch.autograd.grad(softmax_by_hand(weights, step == LONG - 2), list(weights.values()))
        with torch.no_grad():
            torch._foreach_sub_(list(weights.values()), [0.01 * slope for slope in slopes])


def by_new_tensors(weights: dict[str, Tensor]) -> None:
    """And a running mean of the gradients, which hangs together over all steps."""
    means = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(LONG):
        slopes = torch.autograd.grad(softmax_by_hand(weights, step == LONG - 2), list(weights.values()))
        means = {name: 0.9 * means[name] + slope for name, slope in zip(weights, slopes, strict=True)}
        weights = {name: (w - 0.01 * means[name]).detach().requires_grad_() for name, w in weights.items()}


@pytest.mark.parametrize("train_long", [with_optimizer, by_hand, by_new_tensors])
def test_a_long_run_is_still_recorded_at_its_end(train_long: Callable[[dict[str, Tensor]], None], guard: Guard) -> None:
    run = guard(lambda: train_long({"w": layer(3, 4)}))
    assert [(i.step, i.cause) for i in run.report.incidents] == [(LONG - 2, "domain-error")]
    assert any(fix.verified for fix in run.first.fixes)
    assert len(run.session._recorder.log.record.events) < 200


def test_a_long_run_does_not_hold_on_to_its_batches(guard: Guard) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def body() -> int:
        weight = layer(3, 4)
        for _ in range(100):
            x = torch.rand(12, 3)
            seen.append(weakref.ref(x))
            (slope,) = torch.autograd.grad((x @ weight).square().mean(), [weight])
            with torch.no_grad():
                weight -= 0.01 * slope
        return sum(ref() is not None for ref in seen)

    assert guard(body).result <= 4


def test_first_step_of_many_operators(guard: Guard) -> None:
    """With an optimizer the first step is recorded too, however many operators it is made of."""

    def body() -> None:
        weight = layer(3, 3)
        optimizer = torch.optim.SGD([weight], lr=0.01)
        h = torch.rand(12, 3)
        for _ in range(60):
            h = torch.tanh(h @ weight)
        optimizer.zero_grad()
        (h / (h * 0).sum()).mean().backward()
        optimizer.step()

    (incident,) = guard(body).report.incidents
    assert (incident.step, incident.cause, incident.op) == (0, "division-by-zero", "aten.div.Tensor")


def train_in_float16() -> None:
    """The variance falls step by step; its root's derivative leaves float16 where float32 holds it."""
    torch.manual_seed(0)
    w, v = (torch.randn(16, 32) * 0.2).half().requires_grad_(), (torch.randn(32, 4) * 0.2).half().requires_grad_()
    for step in range(20):
        h = torch.relu(torch.randn(8, 16).half() * 0.9 ** (4 * (step + 1)) @ w)
        centred = h - h.mean(-1, keepdim=True)
        normed = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-8)
        loss = torch.nn.functional.cross_entropy((normed @ v).float(), torch.randint(0, 4, (8,)))
        for weight, slope in zip((w, v), torch.autograd.grad(loss, [w, v]), strict=True):
            with torch.no_grad():
                weight -= 0.01 * slope


def test_float16_tensors_are_replayed_in_float32(guard: Callable[..., Watched]) -> None:
    run = guard(train_in_float16)
    incident = run.report.incidents[0]
    assert (incident.cause, incident.phase) == ("gradient-overflow", "backward")
    assert incident.location is not None
    assert "normed =" in incident.location.code
    fixes = {fix.action: fix for fix in incident.fixes}
    assert fixes["use-bf16"].verified
    assert fixes["disable-amp"].verified
    assert "autocast" not in fixes["disable-amp"].how
    assert not run.faults
