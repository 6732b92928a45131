"""Tensors with a class of their own, as fastai's images and MONAI's `MetaTensor` are: every operator returns that class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]

STEPS = 12
BAD_STEP = 7


class Image(Tensor):
    """Goes through every operator, with what it carries."""

    origin = "nowhere"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Image) and args and isinstance(args[0], Image):
            result.origin = args[0].origin
        return result


def image(tensor: Tensor) -> Tensor:
    made = tensor.as_subclass(Image)
    made.origin = "a file"
    return made


class Net(nn.Module):
    def __init__(self, bad_in_forward: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)
        self.gain = 1.0
        self.bad_in_forward = bad_in_forward

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x)).view(-1, 8)
        large = hidden * (self.gain if self.bad_in_forward else 1.0)
        return self.last(large / large.abs().amax().detach())


def loss_of(scores: Tensor, y: Tensor, shift: float) -> Tensor:
    flat = image(scores.transpose(-1, -1).contiguous()).view(-1, 3)
    share = torch.softmax(flat, -1) - shift
    return F.nll_loss(torch.log(share.abs().clamp(min=0) if not shift else share.clamp(min=0)), y).clone()


def train(bad: str) -> tuple[Any, list[str]]:
    seed_everything()
    model = Net(bad == "forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24 if bad == "scale" else 1024.0)
    seen = []
    for step in range(STEPS):
        x, y = image(torch.rand(5, 6) + 0.5), torch.randint(3, (5,))
        model.gain = 1e7 if step == BAD_STEP else 1.0
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model(x)
        loss = loss_of(scores.float(), y, 1.0 if bad == "loss" and step == BAD_STEP else 0.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(f"{type(loss).__name__} {loss.origin}")
    return fingerprint(model, optimizer, scaler), seen


def test_healthy_training_is_silent(guard: Guard) -> None:
    plain = train("nothing")
    run = guard(lambda: train("nothing"))
    assert run.faults == 0
    assert run.result == plain
    assert plain[1] == ["Image a file"] * STEPS
    assert run.causes == []


def test_the_settling_scale_is_no_failure(guard: Guard) -> None:
    """Such losses were taken for what no recorded operator had made, and every overflow was unexplained."""
    run = guard(lambda: train("scale"))
    assert run.faults == 0
    assert {i.severity for i in run.report.incidents} == {"info"}
    assert run.causes == ["loss-scale-overflow"]


@pytest.mark.parametrize(
    ("bad", "cause", "line"), [("forward", "fp16-overflow", "self.gain"), ("loss", "domain-error", "log")]
)
def test_a_failing_step_is_replayed(guard: Guard, bad: str, cause: str, line: str) -> None:
    run = guard(lambda: train(bad))
    assert run.faults == 0
    assert run.result == train(bad)
    assert (run.first.cause, run.first.step) == (cause, BAD_STEP)
    assert run.first.location is not None
    assert line in run.first.location.code
    assert run.first.evidence["rung"] == "replay"
    assert any(fix.verified for fix in run.first.fixes)
