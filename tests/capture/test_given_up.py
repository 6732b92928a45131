"""Iterations that a script gives up by itself, without asking the optimizer, are attempted steps; other passes are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]


class Training:
    """A loss scale of its own; `bad_from`: the iteration from which on the model's result is not finite."""

    def __init__(self, scale: float, bad_from: int, clears: str, micro_batches: int = 1) -> None:
        seed_everything()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scale, self.bad_from, self.clears, self.micro_batches = scale, bad_from, clears, micro_batches
        self.done = self.skipped = 0

    def clear(self) -> None:
        if self.clears == "optimizer":
            self.optimizer.zero_grad()
        for p in self.model.parameters():
            if self.clears == "to None":
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()

    def loss(self) -> Tensor:
        x = torch.randn(8, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x).float()
        if self.done >= self.bad_from:
            out = out / out.detach().mul(0.0)
        return F.mse_loss(out, x[:, :2])

    def iteration(self) -> None:
        self.clear()
        for _ in range(self.micro_batches):
            (self.loss() * self.scale).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.done += 1
        if not all(bool(g.isfinite().all()) for g in gradients):
            self.scale /= 2
            self.skipped += 1
            return
        for gradient in gradients:
            gradient.div_(self.scale)
        self.optimizer.step()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("clears", ["optimizer", "to None", "to 0"])
def test_all_iterations_are_counted_however_far_the_scale_falls(clears: str, micro_batches: int, guard: Guard) -> None:
    def body() -> tuple[int, object]:
        training = Training(256.0, 6, clears, micro_batches)
        for _ in range(24):
            training.iteration()
        return training.skipped, fingerprint(training.model, training.optimizer)

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.result[0] == 18
    assert run.report.steps == 24
    assert (run.first.cause, run.first.step) == ("division-by-zero", 6)


def test_a_scale_that_is_no_power_of_two_and_fits_after_some_iterations(guard: Guard) -> None:
    def body() -> int:
        training = Training(1e8, 99, "to None")
        for _ in range(24):
            training.iteration()
        return training.skipped

    run = guard(body)
    assert run.result > 3
    assert run.report.steps == 24


def test_what_follows_is_told_of_its_iteration(guard: Guard) -> None:
    def body() -> int:
        training = Training(2.0**26, 19, "optimizer")
        for _ in range(22):
            training.iteration()
        return training.skipped

    run = guard(body)
    assert run.result > 6
    assert (run.first.cause, run.first.step) == ("division-by-zero", 19)
    (settling,) = [i for i in run.report.incidents if i.cause == "loss-scale-overflow"]
    assert settling.severity == "info"
    assert "scaler" not in settling.explanation, "there is none"
    assert "call-order" not in [fix.action for fix in settling.fixes]


class Loop:
    """Without any scale; some batches give gradients that are not finite."""

    def __init__(self) -> None:
        seed_everything()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self, is_bad: bool = False) -> Tensor:
        cosine = F.cosine_similarity(self.model(torch.randn(16, 4)), torch.randn(16, 2)) * 0.9
        return torch.acos(cosine * (not is_bad) + is_bad).mean()

    @property
    def is_finite(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)


def test_batches_with_bad_gradients_that_are_thrown_away(guard: Guard) -> None:
    def body() -> None:
        loop = Loop()
        for batch in range(30):
            loop.optimizer.zero_grad()
            loop.loss(batch in (11, 20)).backward()
            if loop.is_finite:
                loop.optimizer.step()

    run = guard(body)
    assert run.report.steps == 30
    assert (run.first.step, run.first.evidence["last_step"], run.first.severity) == (11, 20, "warning")


def test_passes_that_are_no_training_are_no_steps(guard: Guard) -> None:
    """An attack on the trained model: the gradients of its weights are cleared each time; some are not finite."""

    def body() -> None:
        loop = Loop()
        for _ in range(10):
            loop.optimizer.zero_grad()
            loop.loss().backward()
            loop.optimizer.step()
        for batch in range(12):
            loop.model.zero_grad()
            loop.loss(is_bad=batch == 5).backward()
        for _ in range(3):
            loop.optimizer.zero_grad()
            loop.loss().backward()
            loop.optimizer.step()

    assert guard(body).report.steps == 13


def test_finite_gradients_that_are_thrown_away_are_no_steps(guard: Guard) -> None:
    def body() -> None:
        loop = Loop()
        for batch in range(24):
            loop.optimizer.zero_grad()
            (256.0 * loop.loss()).backward()
            if batch % 6 != 5:
                loop.optimizer.step()

    assert guard(body).report.steps == 20


def test_a_bad_micro_batch_in_a_window_that_goes_on_is_no_step(guard: Guard) -> None:
    def body() -> None:
        loop = Loop()
        for batch in range(40):
            loop.loss(is_bad=batch == 9).backward()
            if batch % 4 == 3:
                nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
                if loop.is_finite:
                    loop.optimizer.step()
                loop.optimizer.zero_grad()

    assert guard(body).report.steps == 10


def test_a_game_of_two_in_which_one_is_not_asked(guard: Guard) -> None:
    """Both players have an optimizer: nothing was given up in an iteration in which the other one has stepped."""

    def body() -> None:
        one, other = Loop(), Loop()
        for batch in range(20):
            for player, is_bad in ((one, batch == 7), (other, False)):
                player.optimizer.zero_grad()
                player.loss(is_bad).backward()
                if player.is_finite:
                    player.optimizer.step()

    assert guard(body).report.steps in (19, 20)  # who is in use shows only as they step
