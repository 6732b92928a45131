"""The -Inf of a mask is no failure: not in a step that a fix has cured, and not in a metric's counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

import ampguard
from ampguard.capture.glue import schedule
from ampguard.incident import Incident

Guard = Callable[..., Watched]


def trained() -> nn.Module:
    """A few steps, so that what follows is an evaluation."""
    seed_everything()
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return model.eval()


def incidents_of(script: Callable[[], None], folder: Path) -> tuple[Incident, ...]:
    """Those of a script that ends with PyTorch's error."""
    with pytest.raises(RuntimeError), ampguard.watch(out=folder / "run") as session:
        script()
    assert session.report is not None
    return tuple(session.report.incidents)


def test_fix_is_enough_where_only_the_mask_is_left(tmp_path: Path) -> None:
    def script() -> None:
        model = trained()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            logits = model(3 * torch.ones(2, 4)) / 1e-6
            logits = torch.where(logits >= logits.topk(3).values[:, -1:], logits, float("-inf"))
            torch.multinomial(logits.softmax(-1), 1)

    (first,) = incidents_of(script, tmp_path)
    assert (first.cause, first.op) == ("fp16-overflow", "aten.div.Tensor")
    assert "no cure" not in first.explanation
    assert {fix.action: fix.verified for fix in first.fixes}["force-fp32"] is True


def test_eval_output_with_a_mask_and_an_overflow(guard: Guard) -> None:
    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 5)
            self.register_buffer("banned", torch.tensor([False, True, False, False, False]))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            return self.head(hidden * hidden * hidden / 1e6).masked_fill(self.banned, float("-inf"))

    def body() -> None:
        seed_everything()
        model = Scorer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(6, 4)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).softmax(-1)[:, 0].mean()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            model(100 * x)

    first = guard(body).first
    assert (first.cause, first.mode) == ("fp16-overflow", "eval")
    assert {fix.action: fix.verified for fix in first.fixes}["force-fp32"] is True


def test_refused_constant_beside_a_mask(tmp_path: Path) -> None:
    def body() -> None:
        model = trained()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            logits = model(torch.ones(2, 4))
            logits[:, 0] = float("-inf")
            logits = logits.scatter(1, torch.tensor([[1], [2]]), -1e9)

    (first,) = incidents_of(body, tmp_path)
    assert first.cause == "mask-overflow"
    fix = next(fix for fix in first.fixes if fix.action == "mask-value")
    assert fix.verified is True
    assert fix.how.endswith("logits = logits.scatter(1, torch.tensor([[1], [2]]), torch.finfo(torch.float16).min)")


def test_metric_that_counts(guard: Guard) -> None:
    """0/0 for a class that has not come yet, left out of the mean that is read."""

    class MeanIoU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("both", torch.zeros(4))
            self.register_buffer("either", torch.zeros(4))

        def forward(self, predicted: Tensor, label: Tensor) -> Tensor:
            for k in range(4):
                self.both[k] += ((predicted == k) & (label == k)).sum()
                self.either[k] += ((predicted == k) | (label == k)).sum()
            return self.both / self.either

    def body() -> float:
        model, metric = trained(), MeanIoU().eval()
        with torch.inference_mode():
            for _ in range(3):
                iou = metric(model(torch.randn(6, 4)).argmax(1) % 3, torch.randint(3, (6,)))
        return iou.nanmean().item()

    run = guard(body)
    assert list(run.report.incidents) == []
    assert 0 <= run.result <= 1


def test_watching_ends_where_weights_are_spoiled(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that cannot be run again has spoiled the weights: the steps after it are not watched closely for nothing."""
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)  # however slow the machine is, the step is a quick one
    monkeypatch.setattr(schedule, "FREE_SECONDS", 0.0)

    def body() -> None:
        seed_everything()
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(20):
            state = out = model(torch.randn(4, 3))
            for _ in range(100):
                state = 0.9 * state + 0.1 * out
            optimizer.zero_grad()
            (state / (0 * state if step == 7 else 1)).square().mean().backward()
            optimizer.step()

    run = guard(body)
    assert (run.first.cause, run.first.step) == ("unexplained", 7)
    assert "only read weights that it had spoiled" in run.first.explanation
    assert not run.session._recorder.pace.is_attentive
