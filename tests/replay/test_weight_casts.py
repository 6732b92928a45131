"""Autocast casts each weight once in a region: all calls share it, and their gradients meet in the low precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_bits import STEPS, Shifted, at_bad_gradients, compared, mlp, replays_bitwise, training
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from watching import fingerprint, seed_everything

import ampguard
from ampguard.capture.record import BadResult
from ampguard.capture.recorder import FlightRecorder
from ampguard.replay.rebuild import Replayer

Loss = Callable[[nn.Module], Tensor]


def half_precision(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16, **options)


def distance(one: Tensor, two: Tensor) -> Tensor:
    return F.mse_loss(one.float(), two.float()) + one.float().pow(2).mean() * 0.3


def bitwise(net: nn.Module, loss_of: Loss, out: Path) -> None:
    """The gradients of the net, beside which another parameter gets bad ones."""
    seed_everything()
    model = Shifted(net)
    replays_bitwise(training(model, lambda _, step: loss_of(net) + model.spoilt(step)), out)


def batch() -> Tensor:
    return torch.randn(6, 4)


def in_one_region(net: nn.Module) -> Tensor:
    with half_precision():
        return distance(net(batch()), net(batch()))


def without_cache(net: nn.Module) -> Tensor:
    with half_precision(cache_enabled=False):
        return distance(net(batch()), net(batch()))


def in_two_regions(net: nn.Module) -> Tensor:
    with half_precision():
        one = net(batch())
    with half_precision():
        two = net(batch())
    return distance(one, two)


def in_inner_regions(net: nn.Module) -> Tensor:
    with half_precision():
        with half_precision():
            one = net(batch())
        with torch.autocast("cpu", enabled=False):
            two = net(batch())
        three = net(batch())
    return distance(one, two) + three.float().mean()


def after_a_call_without_gradient(net: nn.Module) -> Tensor:
    with half_precision():
        one = net(batch())
        with torch.no_grad():
            two = net(batch())
        return distance(one, two) + net(batch()).float().mean()


def with_a_checkpoint(net: nn.Module) -> Tensor:
    with half_precision():
        one = checkpoint(net, batch(), use_reentrant=False)
        return distance(one, net(batch()))


LOSSES = [
    in_one_region,
    without_cache,
    in_two_regions,
    in_inner_regions,
    after_a_call_without_gradient,
    with_a_checkpoint,
]


@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss: loss.__name__)
def test_module_called_several_times(loss_of: Loss, tmp_path: Path) -> None:
    bitwise(mlp(4, 8, 5), loss_of, tmp_path)


class Unrolled(nn.Module):
    """One weight used several times in a call, in regions around the call or within it."""

    def __init__(self, opens_regions: bool) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.opens_regions = opens_regions

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            with half_precision() if self.opens_regions else contextlib.nullcontext():
                for _ in range(3):
                    x = self.cell(x).tanh()
        return x.float()


@pytest.mark.parametrize("opens_regions", [True, False])
def test_weight_used_several_times_in_one_call(opens_regions: bool, tmp_path: Path) -> None:
    def loss_of(net: nn.Module) -> Tensor:
        with contextlib.nullcontext() if opens_regions else half_precision():
            return distance(net(batch()), net(batch()))

    bitwise(Unrolled(opens_regions), loss_of, tmp_path)


def test_weight_also_used_outside_its_module(tmp_path: Path) -> None:
    """Tied weights: the cast lies in autocast's cache when the loss is computed."""

    def loss_of(net: nn.Module) -> Tensor:
        x = batch()
        with half_precision():
            return distance(net(x) @ net[0].weight, x)  # type: ignore[index]

    bitwise(nn.Sequential(nn.Linear(4, 8, bias=False)), loss_of, tmp_path)


def test_untraced_replay_finds_no_casts(tmp_path: Path) -> None:
    """Nothing was looked for in a trace before: the weight is cast anew, and the replay says that it is not exact."""
    seed_everything()
    net = nn.Sequential(nn.Linear(4, 8, bias=False))
    model = Shifted(net)

    def loss_of(_: nn.Module, step: int) -> Tensor:
        x = batch()
        with half_precision():
            return distance(net(x) @ net[0].weight, x) + model.spoilt(step)

    def look(recorder: FlightRecorder, bad: BadResult) -> tuple[bool, bool, bool]:
        outcome = Replayer(bad, recorder).run(traced=False)
        weight = next(c for c in compared(outcome, bad) if c.real.shape == (8, 4))
        return outcome.is_bad, outcome.is_exact, torch.allclose(weight.real, weight.replayed, rtol=1e-2)

    assert at_bad_gradients(training(model, loss_of), tmp_path, look) == [(True, False, True)]


@pytest.mark.parametrize("calls", [1, 2])
def test_replay_inside_a_region_is_not_called_exact(calls: int, tmp_path: Path) -> None:
    """There the cache holds the script's own casts, and a weight that was cast once is cast for each call."""
    seed_everything()
    net = mlp(4, 8, 5)
    model = Shifted(net)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            with half_precision():
                outputs = [net(batch()) for _ in range(calls)]
                (distance(outputs[0], outputs[-1]) + model.spoilt(step)).backward()
                optimizer.step()

    def look(recorder: FlightRecorder, bad: BadResult) -> tuple[bool, bool]:
        outcome = Replayer(bad, recorder).run()
        return outcome.is_exact, all(c.is_same for c in compared(outcome, bad))

    ((is_exact, is_same),) = at_bad_gradients(body, tmp_path, look)
    assert is_exact == is_same == (calls == 1)


def test_replay_inside_a_region_leaves_its_casts_alone(tmp_path: Path) -> None:
    """The step ends inside the region, and the next one goes on with the same casts: those of the first step."""

    def run() -> dict[str, Any]:
        seed_everything()
        net = mlp(4, 8, 5)
        model = Shifted(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with half_precision():
            for step in range(STEPS + 2):
                optimizer.zero_grad()
                (distance(net(batch()), net(batch())) + model.spoilt(step - 1)).backward()
                optimizer.step()
        return fingerprint(model, optimizer)

    plain = run()
    with ampguard.watch(out=tmp_path) as session:
        guarded = run()
    assert session.report is not None
    assert "singular-gradient" in [incident.cause for incident in session.report.incidents]
    assert {k: repr(v) for k, v in guarded.items()} == {k: repr(v) for k, v in plain.items()}
