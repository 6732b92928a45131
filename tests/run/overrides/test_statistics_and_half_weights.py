"""Running statistics that float16 cannot hold, and weights that the script itself has made float16: explained and healed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn


def train_on_bright_images(steps: int = 6, own: bool = False) -> nn.Sequential:
    """BatchNorm over values whose variance is some 1e5: `own`, in a model that the script has made float16."""
    torch.manual_seed(0)
    dtype = torch.float16 if own else torch.float32
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(steps):
        images = torch.randn(8, 1, 8, 8) * 1000
        loss = nn.functional.cross_entropy(net(images.to(dtype)).float(), torch.randint(3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def variance(net: nn.Sequential) -> Tensor:
    buffer = net[1].running_var
    assert isinstance(buffer, Tensor)
    return buffer


@pytest.mark.parametrize(("precision", "own"), [("O3", False), (None, True)])
def test_statistics_beyond_float16_are_an_overflow_of_the_norm(
    overridden: Callable[..., Any], precision: str | None, own: bool
) -> None:
    with overridden(precision) as session:
        net = train_on_bright_images(own=own)
    assert not torch.isfinite(variance(net)).all()
    incident = session.report.incidents[0]
    assert (incident.cause, incident.module, incident.op) == ("fp16-overflow", "1", "aten.native_batch_norm.default")
    assert incident.evidence["max_abs_fp32"] > 65504
    assert any(fix.action == "disable-amp" and fix.verified for fix in incident.fixes)


@pytest.mark.parametrize(("precision", "own"), [("O3", False), (None, True)])
def test_healed_statistics_are_those_of_float32(
    overridden: Callable[..., Any], precision: str | None, own: bool
) -> None:
    exact = variance(train_on_bright_images())
    with overridden(precision, on_nonfinite="heal") as session:
        healed = variance(train_on_bright_images(own=own))
    run = session.report.run
    assert [done["cause"] for done in run["healed"]] == ["fp16-overflow"]
    assert run["steps_made_again"] == [done["step"] for done in run["healed"]]
    torch.testing.assert_close(healed.float(), exact, rtol=0.02, atol=0)


class Squares(nn.Module):
    """A norm written by hand, whose squares float16 cannot hold."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.checkpoints = nn.Linear(8, 8), nn.Linear(8, 3), checkpoints

    def normed(self, x: Tensor) -> Tensor:
        squares = self.first(x).square()
        return squares / squares.mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.last(self.normed(x))
        return self.last(torch.utils.checkpoint.checkpoint(self.normed, x, use_reentrant=False))


def test_a_half_copy_is_healed_and_keeps_its_weights(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Deployment in float16 is tried out in validation."""
    net = Squares()
    images = torch.randn(4, 8) * 1000
    with torch.no_grad():
        exact = net(images)
    with overridden(on_nonfinite="heal") as session, torch.no_grad():
        half = copy.deepcopy(net).half().eval()
        found = half(images.half())
        assert found.dtype == torch.float16  # what the script's code is written for
        assert {p.dtype for p in half.parameters()} == {torch.float16}
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)
    assert [done["action"] for done in session.report.run["healed"]] == ["disable-amp"]
    assert "healed, float16 weights run as float32 casts from now on" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_half_model_is_healed_in_training(overridden: Callable[..., Any], checkpoints: bool) -> None:
    def train(dtype: torch.dtype) -> list[float]:
        torch.manual_seed(0)
        net = Squares(checkpoints).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        losses = []
        for step in range(6):
            x, y = torch.randn(16, 8) * (1000 if step > 2 else 1), torch.randint(3, (16,))
            loss = nn.functional.cross_entropy(net(x.to(dtype)).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    exact = train(torch.float32)
    with overridden(on_nonfinite="heal") as session:
        healed = train(torch.float16)
    assert [(done["step"], done["action"]) for done in session.report.run["healed"]] == [(3, "disable-amp")]
    assert session.report.run["steps_held_off"] == 0
    assert all(math.isfinite(loss) for loss in healed)
    assert healed == pytest.approx(exact, rel=0.02)
