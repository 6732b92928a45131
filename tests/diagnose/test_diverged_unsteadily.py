"""A loss that climbs, comes nearly all the way down and climbs again, while the weights grow: one divergence."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched

from ampguard.capture.sampling.vitals import StepVitals
from ampguard.capture.sampling.weights import WeightSample
from ampguard.diagnose.dynamics.climb import rise_of, unsteady_rise_of
from ampguard.diagnose.dynamics.divergence import divergence
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.remedies import Remedies, Verdict
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.incident import Incident
from ampguard.replay.stretch_updates import Change

Guard = Callable[..., Watched]


def of_losses(losses: list[float]) -> Trajectory:
    trajectory = Trajectory()
    for step, loss in enumerate(losses):
        trajectory.add(StepVitals(step, loss=loss))
    return trajectory


def trained(rate: float, seed: int) -> None:
    """The rate is far too large, but for some steps in the middle."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(120):
        optimizer.param_groups[0]["lr"] = rate * (0.1 if 3 < step < 30 else 1.0)
        x = torch.randn(32, 8)
        made = model(x)
        loss = (
            F.cross_entropy(made, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()) + 1e-20 * (0.3 * made).exp().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to diverge")


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_told_as_divergence(seed: int, guard: Guard) -> None:
    first = guard(lambda: trained(10.0, seed)).first
    assert (first.cause, first.evidence["ended_as"]) == ("divergence", "overflow")
    assert first.evidence["weights_grew_by"] > 2
    assert {fix.action for fix in first.fixes} == {"lower-learning-rate", "clip-gradients"}


LANGUAGE = [
    4.5, 9.3, 91, 538, 45, 39, 139, 50, 56, 140, 113, 14, 13, 44, 50, 19, 15, 11, 8.3, 12, 8.6, 8.9, 9.6, 8.6, 7.8, 8, 7.1, 32,
    223, 123, 64, 32, 22, 66, 34, 259, 262, 103, 54, 156, 154, 28, 71, 80, 58, 80, 80, 57, 53, 73, 78, 68, 81, 154, 67, 27, 814,
    725,
]  # fmt: skip
"""Of a language model at 800 times its usual rate."""


def test_two_climbs_with_a_dip_between() -> None:
    course = of_losses(LANGUAGE)
    assert rise_of(course) is None
    rise = unsteady_rise_of(course)
    assert rise is not None
    assert (rise.began, rise.best, rise.last) == (0, 4.5, 725)


@pytest.mark.parametrize(("grew", "cause"), [(5.0, "divergence"), (1.2, "gradient-overflow")])
def test_steps_that_were_kept_late_show_no_giant_update(grew: float, cause: str) -> None:
    """The weights have grown long before: what the last steps moved them by is little, and a smaller rate cures them."""
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    weight.grad = torch.ones_like(weight)
    course = of_losses([float(loss) for loss in LANGUAGE])
    norm = float(weight.detach().norm())
    course.look(WeightSample(0, weakref.ref(optimizer), 0.5, 1.4, norm, 0.1, []))
    optimizer.step()
    weight.data *= grew * norm / float(weight.detach().norm())
    failure = Incident(
        step=57, rank=0, mode="train", phase="backward", severity="error", cause="gradient-overflow", module="attn",
        op="aten.bmm.default", dtype="float32", location=None, explanation="bmm gives -1.156e+40.",
    )  # fmt: skip
    situation = Situation(course, 57, failure=failure, optimizers=[optimizer])
    cured = Verdict(True, "steps 53 to 57 replayed: all finite, the loss goes to 32.31", Change(rate_factor=0.1))
    situation.remedies[False] = Remedies(
        cured, Verdict(None, "not tried"), began_at=55, moved=0.16, norm_before=grew * norm, is_weights_doing=True,
        losses=[(53, 154.0), (57, 725.0)], bound=154.0, updates=4, reason="the loss rose to 154", noticed_at=53,
    )  # fmt: skip
    told = divergence(situation)
    assert (told.cause if told is not None else failure.cause) == cause
    assert told is not None
    assert bool(told.fixes[0].verified) == (cause == "divergence")


@pytest.mark.parametrize(
    "losses",
    [
        [5.0, 60.0, 80.0, 20.0, *(5.0 * 0.97**i for i in range(100))],
        [5.0, 60.0, 80.0, 20.0, *(5.0 * 0.97**i for i in range(100)), 300.0, 400.0],
        [5.0 * 0.9**i for i in range(40)] + [3.0] * 20,
        [0.1, 1e6, *(0.1 for _ in range(40))],
        [2.0, 2.1, 1e6],
        [],
    ],
    ids=["a bad start", "a bad start and a bad end", "below where it began", "one bad batch", "short", "nothing"],
)
def test_what_is_no_climb(losses: list[float]) -> None:
    assert unsteady_rise_of(of_losses(losses)) is None


@pytest.mark.parametrize("steps", [30, 100, 400])
def test_noise_is_no_climb(steps: int) -> None:
    draw = random.Random(steps)
    found = [
        unsteady_rise_of(of_losses([draw.lognormvariate(0.0, 1.0) for _ in range(steps)])) is not None
        for _ in range(100)
    ]
    assert sum(found) <= 3, "the weights have to tell of those that are left"
