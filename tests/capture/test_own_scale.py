"""A loss scale that the script keeps by itself: its losses are those of before it, and what it skips is counted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

from ampguard.capture.judging.own_scale import factor_of
from ampguard.report.history import StepRow, read_history

Guard = Callable[..., Watched]


def steps_of(run: Watched) -> list[StepRow]:
    path = run.session.path
    assert path is not None
    with read_history(path) as history:
        return list(history.steps())


class MixedPrecision:
    """As in guided-diffusion: 2**lg in front of the loss, lowered by one where the gradients overflow."""

    def __init__(self, lg: float, rate: float = 0.05) -> None:
        seed_everything()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self.lg = lg
        self.losses: list[float] = []
        self.skipped: list[bool] = []

    def step(self, micro_batches: int = 1) -> None:
        parameters = list(self.model.parameters())
        for p in parameters:
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        total = 0.0
        for _ in range(micro_batches):
            x = torch.randn(32, 16)
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.model(x)
            loss = F.mse_loss(out.float(), x[:, :4])
            total += loss.item()
            (loss * 2**self.lg).backward()
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        self.losses.append(total)
        self.skipped.append(not bool(norm.isfinite()))
        if self.skipped[-1]:
            self.lg -= 1
            return
        for p in parameters:
            assert p.grad is not None
            p.grad.mul_(1.0 / 2**self.lg)
        self.optimizer.step()
        self.lg += 1e-3


def test_losses_are_those_before_the_scale_and_skipped_steps_are_counted(guard: Guard) -> None:
    def body() -> MixedPrecision:
        training = MixedPrecision(lg=20.0)
        for _ in range(12):
            training.step(micro_batches=2)
        return training

    run = guard(body)
    done = run.result
    rows = steps_of(run)
    assert done.skipped[0]
    assert not done.skipped[-1]
    assert run.report.steps == 12
    assert [row.skipped for row in rows] == done.skipped
    torch.testing.assert_close([row.loss for row in rows], done.losses)
    assert [i.severity for i in run.report.incidents] == ["info"]


def test_divergence_under_such_a_scale_is_seen_and_its_fix_tried(guard: Guard) -> None:
    def body() -> None:
        training = MixedPrecision(lg=8.0)
        for step in range(40):
            if step == 20:
                training.optimizer.param_groups[0]["lr"] = 4.0
            training.step()

    run = guard(body)
    assert run.first.cause == "divergence"
    assert run.first.evidence["began_at_step"] in (19, 20, 21)
    assert [fix.verified for fix in run.first.fixes if fix.action == "lower-learning-rate"] == [True]
    assert [i.cause for i in run.report.incidents if i.severity == "error"] == ["divergence"]


def test_a_weight_in_front_of_the_loss_is_no_scale(guard: Guard) -> None:
    def body() -> list[float]:
        seed_everything()
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        seen = []
        for _ in range(4):
            loss = 100 * F.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    run = guard(body)
    assert [row.loss for row in steps_of(run)] == run.result
    assert [row.scale for row in steps_of(run)] == [None] * 4


def test_only_what_multiplies_the_whole_loss_is_a_factor() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 5).mean()
    assert factor_of(loss) == 1.0
    assert factor_of(loss * 1024.0) == 1024.0
    assert factor_of(torch.tensor(64.0) * (loss / 4)) == 64.0
    assert factor_of(loss + loss * 1024.0) == 1.0
    assert factor_of(loss * weight.sum()) == 1.0
