"""A running statistic that a forward pass turned non-finite: the replay is of that call, not of those before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional


def test_the_call_that_poisoned_a_buffer_is_replayed_bit_for_bit(guard: Callable[..., Any]) -> None:
    """The step before it, of whose parameters nothing is left, is still in the record."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        criterion = nn.MSELoss()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    net[3].weight.mul_(2e5)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(torch.rand(4, 3, 12, 12))
                loss = criterion(out.float(), torch.zeros(4, 8, 8, 8))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            loss.item()

    run = guard(body)
    assert run.first.cause == "fp16-overflow"
    assert (run.first.step, run.first.module, run.first.op) == (2, "3", "aten.convolution.default")
    assert run.first.evidence["rung"] == "replay"
    assert "4.running_mean" in run.first.evidence["poisoned_buffers"]


class Codebook(nn.Module):
    """Refitted in some steps only: a code that nobody uses divides by its count of 0."""

    def __init__(self, size: int, written: str) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(size, 4))
        self.written, self.is_refitted = written, False

    def forward(self, z: Tensor) -> Tensor:
        nearest = torch.cdist(z, self.codes).argmin(1)
        if self.is_refitted:
            used = functional.one_hot(nearest, len(self.codes)).to(z.dtype)
            codes = used.t() @ z.detach() / used.sum(0)[:, None]
            if self.written == "assigned":
                self.codes = codes
            elif self.written == "by .data":
                self.codes.data.copy_(codes)
            else:
                self.codes.copy_(codes)
        return z + (self.codes[nearest] - z).detach()


def train_with(part: nn.Module, before: Callable[[int], None]) -> None:
    net = nn.Sequential(nn.Linear(6, 4), part, nn.Linear(4, 6))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(8):
        before(step)
        x = torch.randn(5, 6)
        loss = (net(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


@pytest.mark.parametrize(
    ("size", "written"),
    [(12, "in place"), (12, "assigned"), (20_000, "assigned"), (12, "by .data"), (8_000, "by .data")],
)
def test_the_first_write_to_a_buffer_late_in_training(guard: Callable[..., Any], size: int, written: str) -> None:
    torch.manual_seed(0)
    codebook = Codebook(size, written)

    def refit(step: int) -> None:
        codebook.is_refitted = step == 5

    run = guard(lambda: train_with(codebook, refit))
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.module) == ("division-by-zero", 5, "1")
    assert run.first.location.code == "codes = used.t() @ z.detach() / used.sum(0)[:, None]"
    assert run.first.evidence["rung"] == "replay"
    assert run.first.fixes[0].verified
    assert run.causes == ["division-by-zero"], "what followed is its consequence"


@pytest.mark.parametrize("is_bad", [False, True])
def test_what_the_script_writes_by_data_between_two_calls(guard: Callable[..., Any], is_bad: bool) -> None:
    """No version is counted: it is no doing of the next call's, which begins from it."""
    torch.manual_seed(0)
    codebook = Codebook(12, "by .data")

    def write(step: int) -> None:
        if step == 3:
            codebook.codes.data.fill_(float("nan") if is_bad else 0.5)
        if step == 5 and not is_bad:
            codebook.codes.data.copy_(torch.arange(48.0).reshape(12, 4) / 10)
        codebook.is_refitted = step == 6 and not is_bad

    run = guard(lambda: train_with(codebook, write))
    assert run.faults == 0, run.stderr
    assert run.first.evidence["rung"] == "replay"
    if is_bad:
        assert (run.causes, run.first.step) == (["nonfinite-parameter"], 3)
        assert run.first.evidence["name"] == "1.codes"
    else:
        assert (run.causes, run.first.step, run.first.module) == (["division-by-zero"], 6, "1")


class Keeping(nn.Module):
    """A mask that is made anew for a longer input, or a smallest value that is begun again: infinities of the code's own."""

    def __init__(self, is_assigned: bool) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))
        self.is_assigned, self.begins_anew = is_assigned, False

    def forward(self, z: Tensor) -> Tensor:
        if self.begins_anew and self.is_assigned:
            self.kept = torch.zeros(4).masked_fill(torch.arange(4) > 2, float("-inf"))
        elif self.begins_anew:
            self.kept.fill_(float("inf"))
        return z + self.kept.clamp(-1.0, 1.0)


@pytest.mark.parametrize("is_assigned", [False, True])
def test_an_infinity_that_the_code_keeps_in_a_buffer(guard: Callable[..., Any], is_assigned: bool) -> None:
    part = Keeping(is_assigned)

    def begin_anew(step: int) -> None:
        part.begins_anew = step == 5

    run = guard(lambda: train_with(part, begin_anew))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents
