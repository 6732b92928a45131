"""A flow's invertible convolution: `torch.logdet` of a weight whose determinant has become negative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Mix(nn.Module):
    """As in WaveGlow and Glow: a 1x1 convolution and the logarithm of its determinant."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 1, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(torch.eye(channels).unsqueeze(-1))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(z), z.size(0) * z.size(2) * torch.logdet(self.conv.weight.squeeze())


def train(flips_at: int, steps: int = 3, rate: float = 1e-3) -> None:
    torch.manual_seed(0)
    mixes = nn.ModuleList([Mix(4), Mix(4)])
    optimizer = torch.optim.Adam(mixes.parameters(), lr=rate)
    for step in range(steps):
        if step == flips_at:
            with torch.no_grad():
                mixes[1].conv.weight[0].neg_()
        z, total = torch.randn(2, 4, 8), torch.zeros(())
        for mix in mixes:
            z, log_det = mix(z)
            total = total + log_det
        loss = (z.square().sum() / 2 - total) / z.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_negative_determinant_is_said_to_be_one(guard: Guard) -> None:
    run = guard(lambda: train(flips_at=1))
    assert (run.first.cause, run.first.step, run.first.phase) == ("domain-error", 1, "forward")
    assert "determinant" in run.first.explanation
    assert "4x4" in run.first.explanation
    assert run.first.evidence["negative"] == 1
    assert math.isclose(run.first.evidence["log_of_its_size"], 0.0, abs_tol=0.05)
    assert "torch.logdet" in run.first.location.code
    fix = run.first.fixes[0]
    assert (fix.action, fix.verified) == ("stable-form", True)
    assert "slogdet" in fix.how


def test_nan_that_the_script_chooses_itself_is_no_determinant(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        out = net(torch.randn(3, 4))
        torch.where(out > -1e9, torch.tensor(math.nan), out).mean().backward()

    assert "determinant" not in guard(body).first.explanation


def test_positive_determinants_are_left_alone(guard: Guard) -> None:
    assert guard(lambda: train(flips_at=99)).causes == []


def test_rate_that_throws_the_weights_away_is_divergence_though_it_ends_in_a_determinant(guard: Guard) -> None:
    run = guard(lambda: train(flips_at=99, steps=4, rate=3.0))
    assert (run.first.cause, run.first.evidence["ended_as"]) == ("divergence", "domain-error"), run.stderr
    assert {fix.action for fix in run.first.fixes} == {"lower-learning-rate", "clip-gradients"}
