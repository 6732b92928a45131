"""State that a loop carries from step to step, detached and cleared in part where the next step begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]
STEPS = 6


@dataclass
class Past:
    total: Tensor

    def keep(self, rows: Tensor) -> Past:
        return Past(torch.where(rows[:, None], self.total.detach(), torch.zeros((), dtype=self.total.dtype)))


class Summing(nn.Module):
    """A sum in float16 over all that was seen, and its square."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(30.0))

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Past]:
        now = Past(past.total + (self.gain * x).half())
        return (now.total * now.total).float(), now


def train(bad: list[int]) -> None:
    """Each step makes the gain smaller: the sums of before would be smaller today."""
    net = Summing()
    opt = torch.optim.SGD(net.parameters(), 2.0)
    past = Past(torch.zeros(3, 8, dtype=torch.float16))
    for step in range(STEPS):
        past = past.keep(torch.tensor([True, True, step % 2 > 0]))
        out, past = net(torch.full((3, 8), 2.4), past)
        loss = out.mean()
        opt.zero_grad()
        loss.backward()
        if net.gain.grad.isfinite():
            net.gain.grad.fill_(1.0)
        opt.step()
        if not loss.isfinite():
            bad.append(step)


def test_a_state_is_what_it_was_and_not_made_again(guard: Guard) -> None:
    bad: list[int] = []
    run = guard(lambda: train(bad))
    assert run.faults == 0, run.stderr
    assert bad[0] == 3
    assert (run.first.cause, run.first.step, run.first.phase) == ("fp16-overflow", bad[0], "forward")
    assert "now.total * now.total" in run.first.location.code
    assert 66000 < run.first.evidence["max_abs_fp32"] < 68000
