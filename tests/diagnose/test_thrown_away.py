"""Updates as large as the weights, behind a loss that does not climb: float16 ends such a run, and a wider type only goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched

from ampguard.capture.sampling.vitals import StepVitals
from ampguard.capture.sampling.weights import WeightSample
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.thrown import thrown_away, with_smaller_updates
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.incident import Fix, Incident

Guard = Callable[..., Watched]


class Stream(nn.Module):
    """Pre-norm residual blocks: the stream grows with the weights, and the loss sees it behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)]
        )
        self.norm = nn.LayerNorm(16, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        made: Tensor = self.norm(x)
        return made


def trained(rate: float, gain: float = 1.0) -> None:
    torch.manual_seed(0)
    model = Stream()
    with torch.no_grad():
        model.blocks[1][3].weight.mul_(gain)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for _ in range(30):
        x = torch.randn(16, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), torch.randint(0, 16, (16,)))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("rate", [2.0, 4.0])
def test_a_rate_far_too_high_behind_a_norm_is_a_divergence(rate: float, guard: Guard) -> None:
    first = guard(lambda: trained(rate)).first
    assert (first.cause, first.fixes[0].action) == ("divergence", "lower-learning-rate")
    assert all("updates stay as large" in (fix.outcome or "") for fix in first.fixes if fix.verified)


def test_weights_that_grow_severalfold_under_a_high_rate_are_none(guard: Guard) -> None:
    """Float32 goes on with them: the cause is the precision, and a smaller rate one of its fixes."""
    first = guard(lambda: trained(1.2, gain=30.0)).first
    assert (first.cause, first.fixes[0].verified) == ("fp16-overflow", True)
    assert "force-fp32" in [fix.action for fix in first.fixes]


def test_weights_that_begin_too_large_are_none(guard: Guard) -> None:
    first = guard(lambda: trained(1e-3, gain=3e5)).first
    assert (first.cause, first.fixes[0].verified) == ("fp16-overflow", True)
    assert all(fix.action != "lower-learning-rate" for fix in first.fixes)


def situated(losses: list[float], ratio: float, wide: float | None = None) -> tuple[Incident, Situation, nn.Module]:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trajectory = Trajectory()
    for step, loss in enumerate(losses):
        trajectory.add(StepVitals(step, loss=loss))
    norm = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
    trajectory.look(WeightSample(1, weakref.ref(optimizer), 0.1, 1.0, norm, ratio, []))
    incident = Incident(
        step=len(losses), rank=0, mode="train", phase="forward", severity="error", cause="fp16-overflow", module="m",
        op="aten.add.Tensor", dtype="float16", location=None, explanation="it overflowed",
        evidence={} if wide is None else {"loss_in_float32": wide},
        fixes=(Fix("use-bf16", None, "use bfloat16", True, "finite"),),
    )  # fmt: skip
    situation = Situation(trajectory, len(losses), failure=incident, optimizers=[optimizer])
    return incident, situation, model


@pytest.mark.parametrize(("ratio", "wide", "is_told"), [(0.9, 1e17, True), (0.9, 3.0, False), (0.01, 1e17, False)])
def test_a_loss_out_of_all_proportion_in_float32(ratio: float, wide: float, is_told: bool) -> None:
    incident, situation, _held = situated([2.4, 1.4], ratio, wide)
    answer = thrown_away(incident, situation)
    assert (answer is not None and answer.cause == "divergence") is is_told


@pytest.mark.parametrize(
    ("losses", "ratio", "is_advised"),
    [
        ([2.2, 110.0, 8.3], 0.03, True),
        ([445.0, 1054.0, 1315.0], 0.9, True),
        ([2.2, 110.0, 2.0], 0.03, False),
        ([2.2, 2.0, 1.9], 0.9, False),
        ([2.2, 5.0, 6.0], 0.03, False),
    ],
)
def test_a_smaller_rate_is_advised_where_updates_have_raised_the_loss(
    losses: list[float], ratio: float, is_advised: bool
) -> None:
    incident, situation, _held = situated(losses, ratio)
    answer = with_smaller_updates(incident, situation)
    assert (answer is not None) is is_advised
    if answer is not None:
        assert [fix.action for fix in answer.fixes] == ["use-bf16", "lower-learning-rate"]
