"""An error that comes out of a function under `vmap`, whose tensors are gone with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import vmap
from watching import Watched

Guard = Callable[..., Watched]


class Solving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def solved(self, x: Tensor) -> Tensor:
        matrix = torch.outer(x, x) * self.scale + torch.eye(3)
        return torch.linalg.eigh(matrix)[0].sum()

    def forward(self, x: Tensor) -> Tensor:
        return vmap(self.solved)(x)


def test_it_is_the_scripts_own_and_no_fault_of_the_guard(guard: Guard) -> None:
    def body() -> str:
        net = Solving()
        opt = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(4):
            x = torch.randn(2, 3)
            if step == 3:
                x[1] = torch.nan
            opt.zero_grad()
            try:
                net(x).mean().backward()
            except RuntimeError as error:
                return str(error)
            opt.step()
        return ""

    run = guard(body)
    assert "eigh" in run.result
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("nonfinite-input", 3)
