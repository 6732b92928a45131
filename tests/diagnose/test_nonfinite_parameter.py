"""A table with a hole in it: which entry it is tells what made it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.capture.events import written_weights

Guard = Callable[..., Any]


class Weighted(nn.Module):
    """A loss weighted by the noise level of each sample, where the last level has no signal left: 0/0."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)
        signal = torch.cumprod(1 - torch.linspace(0.05, last, 20, dtype=torch.float64), 0)
        ratio = signal / (1 - signal)
        self.register_buffer("loss_weight", (ratio / ratio).float())

    def forward(self, x: Tensor, levels: Tensor) -> Tensor:
        weight: Tensor = self.loss_weight  # type: ignore[assignment]
        return (self.net(x) - x).square().mean(1).mul(weight.gather(0, levels)).mean()


def train(last: float) -> None:
    torch.manual_seed(0)
    model = Weighted(last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(5):
        levels = torch.randint(0, 19, (4,))
        levels[0] = 19 if step == 3 else 0
        loss = model(torch.randn(4, 8), levels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def test_the_entry_of_a_table_is_named(guard: Guard) -> None:
    run = guard(lambda: train(last=1.0))
    assert (run.first.cause, run.first.step, run.first.op) == ("nonfinite-parameter", 3, "aten.gather.default")
    assert run.first.evidence["name"] == "loss_weight"
    assert run.first.evidence["at"] == [[19]]
    assert "1 of 20 values, at [19]." in run.first.explanation


def test_table_that_was_never_written_to_was_made_so(guard: Guard) -> None:
    """The losses before were finite because they did not use the entry: it has not been spoiled since."""
    incident = guard(lambda: train(last=1.0)).first
    assert incident.evidence["times_written"] == 0
    assert incident.evidence["since_step"] is None
    assert "written to since" not in incident.explanation.replace("no write to it since", "")
    assert "The script made them so before its first step" in incident.explanation
    assert "initialise-parameter" in [fix.action for fix in incident.fixes if fix.verified]


def test_table_that_was_written_to_in_training_was_spoiled_since(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Weighted(0.99)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(4):
            if step == 2:
                model.loss_weight[19] = torch.nan
            levels = torch.tensor([0, 1, 2, 19 if step == 3 else 3])
            loss = model(torch.randn(4, 8), levels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).first
    assert incident.evidence["times_written"] == 1
    assert "it was written to since" in incident.explanation


def test_a_schedule_that_keeps_some_signal_is_silent(guard: Guard) -> None:
    assert guard(lambda: train(last=0.99)).causes == []


def test_weights_that_the_script_has_just_made_bad_are_told_with_their_line(guard: Guard) -> None:
    """Averaged weights, corrected for their start at 0, before anything was averaged: 0/0."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        shadow, updates = [torch.zeros_like(p) for p in model.parameters()], 0
        for step in range(3):
            backup = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p, s in zip(model.parameters(), shadow, strict=True):
                    p.copy_(s / (1 - 0.9**updates))
                with torch.inference_mode():
                    model.eval()(torch.ones(2, 4))
                for p, b in zip(model.parameters(), backup, strict=True):
                    p.copy_(b)
            model.train()(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                updates += 1
                torch._foreach_lerp_(shadow, list(model.parameters()), 0.1)

    run = guard(body)
    incident = run.first
    assert [i.cause for i in run.report.incidents] == ["division-by-zero"]
    assert (incident.step, incident.mode, incident.phase) == (0, "eval", "parameters")
    assert incident.location is not None
    assert incident.location.code == "p.copy_(s / (1 - 0.9**updates))"
    assert incident.fixes[0].verified is True


def test_weights_that_a_cast_made_infinite(guard: Guard) -> None:
    """Trained in float32, with a weight beyond float16's range; then `.half()` for the test."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(3):
            loss = net(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            net[1].weight.mul_(1e6)  # an adapter that was merged into it
        net.half().eval()
        with torch.inference_mode():
            net(torch.randn(8, 4).half())

    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.evidence["name"], incident.mode) == ("nonfinite-parameter", "1.weight", "eval")
    assert "cast to float16" in incident.explanation
    assert "beyond 65504" in incident.explanation
    assert "poisoned" not in incident.explanation
    assert [fix.action for fix in incident.fixes] == ["use-bf16"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 2), nn.Conv1d(3, 2, 1), nn.LayerNorm(4)], ids=lambda m: type(m).__name__
)
def test_a_weight_is_named_in_evaluation(guard: Guard, mode: Callable[[], Any], layer: nn.Module) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Identity(), layer).eval()
        with mode():
            with torch.no_grad():
                layer.weight.view(-1)[0] = float("nan")  # type: ignore[operator]
            net(torch.randn(2, 3, 4))

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.evidence["name"]) == ("nonfinite-parameter", "1.weight")


def train_two(stays: bool, both_first: bool) -> None:
    """Two models side by side; the schedule of the second one's optimizer divides 0 by 0, for one step or for good."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
    for step in range(7):
        optimizers[1].param_groups[0]["lr"] = float("nan") if step == 4 or (stays and step > 4) else 0.01
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            loss = (net(torch.randn(8, 4)) - 1).square().mean()
            losses.append(loss)
            if not both_first:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for loss, optimizer in zip(losses, optimizers, strict=True) if both_first else ():
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("both_first", [True, False])
def test_the_optimizer_of_the_poisoned_model_did_it(stays: bool, both_first: bool, guard: Guard) -> None:
    incident = guard(lambda: train_two(stays, both_first)).first
    assert (incident.cause, incident.step) == ("nonfinite-parameter", 5)
    assert incident.evidence["since_step"] == 4
    assert "written_by_script" not in incident.evidence
    assert "initialise-parameter" not in [fix.action for fix in incident.fixes]
    why = "for the `lr` of SGD is nan" if stays else "the gradients of that update were finite"
    assert why in incident.explanation


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_averaged_weights_that_only_the_script_writes(
    wants_gradients: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad from the first average on, and used at the end: the finite losses say nothing about them."""
    monkeypatch.setattr(
        written_weights, "LARGEST", 0
    )  # weights so large that they are not looked at when they are written

    alive: list[torch.optim.Optimizer] = []

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        averaged = nn.Linear(4, 3).requires_grad_(wants_gradients)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        alive.append(optimizer)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            share = torch.tensor(float(step)) / step if step else torch.tensor(math.nan)
            with torch.no_grad():
                for mean, p in zip(averaged.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, share)
        with torch.no_grad():
            averaged.eval()(torch.randn(5, 4))

    run = guard(body)
    assert (run.first.cause, run.first.mode, run.first.step) == ("nonfinite-parameter", "eval", 6)
    assert "No optimizer trains it, nor anything else in its model" in run.first.explanation
    assert run.first.evidence["since_step"] is None
    assert [fix.action for fix in run.first.fixes] == ["load-weights"]


def by_entry(weight: Tensor) -> None:
    with torch.no_grad():
        weight[2, 1] = math.nan


def by_row_of_data(weight: Tensor) -> None:
    weight.data[2] = math.inf


def by_row(weight: Tensor) -> None:
    with torch.no_grad():
        weight[3].fill_(math.nan)


def by_all_of_data(weight: Tensor) -> None:
    weight.data.fill_(math.nan)


@pytest.mark.parametrize("write", [by_entry, by_row_of_data, by_row, by_all_of_data])
@pytest.mark.parametrize("drawn", [False, True])
def test_the_line_that_wrote_bad_values_into_a_weight(
    drawn: bool, write: Callable[[Tensor], None], guard: Guard
) -> None:
    """Long after the first steps, and in a part of the weight."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        data, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
        for step in range(25):
            if step == 20:
                write(net[0].weight)
            chosen = torch.randint(0, 64, (16,)) if drawn else slice(0, 16)
            loss = nn.functional.cross_entropy(net(data[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.step, incident.evidence["name"]) == ("nonfinite-parameter", 20, "0.weight")
    assert incident.evidence["written_at"]["line"] == write.__code__.co_firstlineno + (
        2 if "data" not in write.__name__ else 1
    )
    assert "The script itself has given it these values in this step" in incident.explanation
    assert [fix.action for fix in incident.fixes if fix.verified] == ["initialise-parameter"]


def test_running_statistics_are_written_to_though_pytorch_counts_it_nowhere(guard: Guard) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for step in range(3):
        model(torch.full((5, 4), math.nan) if step == 1 else torch.randn(5, 4))
    model.eval()

    def body() -> float:
        with torch.no_grad():
            return float(model(torch.randn(5, 4)).sum())

    incident = guard(body).first
    assert (incident.cause, incident.evidence["batches_tracked"]) == ("nonfinite-parameter", 3)
    assert "updated it in 3 batches of training" in incident.explanation
    assert "no write to it" not in incident.explanation
