"""Weights that are far too large: the optimizer's doing is a divergence, that of a hand is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import seed_everything

from ampguard.capture.sampling.weights import watchable
from ampguard.diagnose.dynamics.doing import could_have_moved, update_of
from ampguard.diagnose.dynamics.trajectory import Trajectory

Guard = Callable[..., Any]
Make = Callable[[Any], torch.optim.Optimizer]
Hand = Callable[[nn.Module], None]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def train(make: Make, steps: int = 6, hand: Hand | None = None, at: int = -1, half: bool = False) -> None:
    """Until it fails; in step `at` a hand changes the weights before the forward pass."""
    seed_everything()
    model = net()
    optimizer = make(model.parameters())
    for step in range(steps):
        if hand is not None and step == at:
            hand(model)
        x, y = torch.randn(16, 8), torch.randint(3, (16,))
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            out = model(x)
        loss = F.cross_entropy(out.float(), y) if half else (out.exp().mean(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to fail")


def times(factor: float) -> Hand:
    def scale(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.mul_(factor)

    return scale


def loads(factor: float) -> Hand:
    return lambda model: model.load_state_dict({k: v * factor for k, v in model.state_dict().items()}) and None


def sgd(rate: float, **options: float) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, **options)


def adam(rate: float) -> Make:
    return lambda parameters: torch.optim.Adam(parameters, lr=rate)


BY_THE_OPTIMIZER = {
    "sgd, first update": lambda: train(sgd(1e6)),
    "momentum, first update": lambda: train(sgd(1e6, momentum=0.9)),
    "adam, first update": lambda: train(adam(30.0)),
    "adam in float16": lambda: train(adam(30.0), half=True),
    "rmsprop, first update": lambda: train(lambda parameters: torch.optim.RMSprop(parameters, lr=1e3)),
    "sgd in float16": lambda: train(sgd(1e5), half=True),
}


@pytest.mark.parametrize("rate", [10.0, 40.0, 1000.0])
def test_a_warm_up_that_ends_in_one_giant_update(guard: Guard, rate: float) -> None:
    """The first update has no size at all; what one look has seen of the second is no measure of health."""

    def loop() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), 0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for step in range(8):
            optimizer.param_groups[0]["lr"] = rate * step
            x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if not loss.isfinite():
                return
        raise AssertionError("this loop was meant to fail")

    run = guard(loop)
    assert [i.cause for i in run.report.incidents if i.severity == "error"] == ["divergence"], run.stderr
    assert run.first.evidence["began_at_step"] == 1


@pytest.mark.parametrize("name", BY_THE_OPTIMIZER)
def test_first_updates_that_throw_the_weights_away_are_divergence(guard: Guard, name: str) -> None:
    run = guard(BY_THE_OPTIMIZER[name])

    assert run.faults == 0, run.stderr
    assert run.causes[0] == "divergence", run.stderr
    incident = run.first
    assert incident.step in (1, 2)
    assert incident.evidence["ended_as"] in ("overflow", "fp16-overflow", "indeterminate")
    assert {fix.action for fix in incident.fixes} >= {"lower-learning-rate", "clip-gradients"}


BY_HAND = {
    "scaled before the second step": lambda: train(adam(1e-3), hand=times(1e4), at=1),
    "scaled in the middle": lambda: train(sgd(1e-3), steps=14, hand=times(1e4), at=9),
    "scaled, momentum": lambda: train(sgd(1e-2, momentum=0.9), steps=14, hand=times(1e4), at=9),
    "a bad checkpoint": lambda: train(adam(1e-3), steps=14, hand=loads(1e6), at=9),
    "scaled in float16": lambda: train(adam(1e-3), hand=times(3e3), at=3, half=True),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_a_hand_did_to_the_weights_is_no_divergence(guard: Guard, name: str) -> None:
    run = guard(BY_HAND[name])

    assert run.faults == 0, run.stderr
    assert run.causes[0] in ("overflow", "fp16-overflow"), run.stderr


def test_update_is_estimated_where_gradients_are_cleared() -> None:
    seed_everything()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in watchable(optimizer)]

    estimate = update_of(optimizer, 1.0)

    whole = 0.01 * sum(p.numel() for p in before) ** 0.5
    assert 0.3 * whole < estimate < 3 * whole
    assert all(torch.equal(a, b) for a, b in zip(before, watchable(optimizer), strict=True)), (
        "the weights are as they were"
    )
    assert could_have_moved(optimizer, whole, 1, Trajectory())
    assert not could_have_moved(optimizer, 1e3 * whole, 1, Trajectory())


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_gradient_whose_square_leaves_float32_makes_an_update_of_the_usual_size(
    kind: type[torch.optim.Optimizer],
) -> None:
    seed_everything()
    model = net()
    optimizer = kind(model.parameters(), lr=0.5)  # type: ignore[call-arg]
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()

    whole = 0.5 * sum(p.numel() for p in model.parameters()) ** 0.5
    assert could_have_moved(optimizer, whole, 4, Trajectory(), rise=1e30)
    assert not could_have_moved(optimizer, 1e6 * whole, 4, Trajectory(), rise=1e30)
