"""A script that skips a batch whose loss is not finite has lost that batch, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def training(bad: set[int], skips: bool, steps: int = 30) -> Callable[[], None]:
    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in range(steps):
            x, y = torch.randn(16, 8), torch.randn(16, 1)
            if batch in bad:
                x[3] = float("nan")
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            if skips and torch.isnan(loss):
                continue
            loss.backward()
            optimizer.step()

    return body


def test_a_batch_that_is_skipped_is_a_warning_in_the_end(guard: Guard) -> None:
    run = guard(training({11}, skips=True))
    assert (run.first.cause, run.first.severity, run.first.step) == ("nonfinite-input", "warning", 11)
    assert run.first.evidence["skipped_by_script"] is True
    assert "a batch was lost" in run.first.explanation
    assert "error[nonfinite-input]" in run.stderr  # at that moment nobody knew
    assert run.report.status == "incidents"


def test_two_of_them(guard: Guard) -> None:
    run = guard(training({11, 20}, skips=True))
    assert (run.first.severity, run.first.occurrences) == ("warning", 2)
    assert "2 batches were lost" in run.first.explanation


@pytest.mark.parametrize(
    ("bad", "skips"),
    [({11}, False), ({28}, True), (set(range(5, 20)), True)],
    ids=["an update is made with it", "the run ends soon after", "half of all batches"],
)
def test_what_is_an_error_all_the_same(bad: set[int], skips: bool, guard: Guard) -> None:
    run = guard(training(bad, skips))
    assert (run.first.cause, run.first.severity) == ("nonfinite-input", "error")


def test_a_step_that_the_scaler_skips_is_not_the_scripts_doing(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for batch in range(30):
            x = torch.randn(16, 8) * (1e5 if batch == 11 else 1.0)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    run = guard(body)
    assert [i.severity for i in run.report.incidents if i.cause != "loss-scale-overflow"] == ["error"]


def test_a_statistic_that_is_poisoned_is_no_batch_that_was_lost(guard: Guard) -> None:
    """The loss was finite, and the update was made; nothing here reads what is NaN now."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("spread", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            with torch.no_grad():
                self.spread.lerp_(h.std(0), 0.1)
            return h.square().mean()

    def body() -> None:
        seed_everything()
        model = Spread()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in range(20):
            optimizer.zero_grad()
            model(torch.randn(1 if batch == 7 else 16, 8)).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="degrees of freedom"):
        run = guard(body)
    assert (run.first.cause, run.first.severity, run.first.step) == ("empty-reduction", "info", 7)
    assert "A checkpoint holds it" in run.first.explanation


class Wrapped:
    """Not an optimizer by its class, as the wrappers of some frameworks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_a_statistic_that_the_batch_has_poisoned_broke_the_run(guard: Guard) -> None:
    """The losses stay finite, and the evaluation does not: it is the skipped batch that has to be repaired."""

    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Conv1d(2, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for batch in range(20):
            x, y = torch.randn(16, 2, 4) * (1e6 if batch == 7 else 1.0), torch.randn(16, 1)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(Wrapped(optimizer))  # type: ignore[arg-type]
            scaler.update()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 2, 4)).mean().item()

    report = guard(body).report
    first, second = report.incidents
    assert report.steps == second.step == 20  # the skipped one is counted through the wrapper
    assert (first.cause, first.severity, first.mode, first.step) == ("fp16-overflow", "error", "train", 7)
    assert "was lost" not in first.explanation
    assert (second.cause, second.severity, second.mode) == ("nonfinite-parameter", "error", "eval")


def training_at_a_pole(bad: set[int], stops_at: str) -> Callable[[], None]:
    """`acos` at 1 in some batches: the loss is finite, and its gradients are not."""

    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in range(30):
            cosine = F.cosine_similarity(model(torch.randn(16, 4)), torch.randn(16, 2)) * 0.9
            loss = torch.acos(cosine * (0 if batch in bad else 1) + (batch in bad)).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if stops_at == "the norm" and not norm.isfinite():
                continue
            if stops_at == "a gradient" and any(g.isnan().any() for g in gradients):
                optimizer.zero_grad()
                continue
            optimizer.step()

    return body


@pytest.mark.parametrize("stops_at", ["the norm", "a gradient"])
def test_gradients_that_are_thrown_away_are_a_warning_as_well(stops_at: str, guard: Guard) -> None:
    run = guard(training_at_a_pole({11, 20}, stops_at))
    first = run.first
    assert (first.cause, first.severity, first.occurrences) == ("singular-gradient", "warning", 2)
    assert "made no update with these gradients (2 batches were lost)" in first.explanation
    assert first.fixes[0].verified


@pytest.mark.parametrize(("bad", "stops_at"), [({11}, "nothing"), ({28}, "the norm"), (set(range(5, 20)), "the norm")])
def test_gradients_that_are_an_error_all_the_same(bad: set[int], stops_at: str, guard: Guard) -> None:
    run = guard(training_at_a_pole(bad, stops_at))
    assert (run.first.cause, run.first.severity) == ("singular-gradient", "error")
