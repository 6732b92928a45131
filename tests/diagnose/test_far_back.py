"""A recurrence of many steps whose values leave their range early: where that was is hundreds of operators back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept, self.out = nn.Linear(1, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 6)
        for t in range(x.shape[1]):
            state = torch.relu(self.given(x[:, t]) + self.kept(state))
        out: Tensor = self.out(state)
        return out


def test_a_long_series_in_evaluation(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        cell = Cell()
        with torch.no_grad():
            cell.kept.weight.copy_(4.0 * torch.eye(6) - 0.1)
        optimizer = torch.optim.SGD(cell.parameters(), lr=1e-9)
        optimizer.zero_grad()
        cell(torch.rand(4, 5, 1)).square().mean().backward()
        optimizer.step()
        cell.eval()
        with torch.no_grad():
            print(cell(torch.rand(4, 380, 1)).mean().item())

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["overflow"]
    assert (run.first.mode, run.first.module, run.first.op) == ("eval", "kept", "aten.mm.default")
    assert run.first.location is not None
    assert "self.kept(state)" in run.first.location.code
