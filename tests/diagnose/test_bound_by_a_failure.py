"""Running figures that a module binds anew in the very call that fails for them: what reads them later is no new failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:std")


class Margin(nn.Module):
    """A margin that depends on how long embeddings are, against what they have been (AdaFace)."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.spread: Tensor
        if is_buffer:
            self.register_buffer("spread", torch.ones(1))
        else:
            self.spread = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x.norm(dim=1)
        with torch.no_grad():
            now = lengths.std()
            self.spread = 0.1 * now + 0.9 * self.spread
        scale = (lengths / self.spread).clip(-1, 1).detach()
        out: Tensor = self.layer(x) * scale[:, None]
        return out


def trained(is_buffer: bool, keeps_weights: bool) -> None:
    torch.manual_seed(0)
    model = Margin(is_buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(12):
        loss = model(torch.randn(1 if step == 5 else 16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if keeps_weights:
            for p in model.parameters():
                p.grad = torch.nan_to_num(p.grad)
        optimizer.step()


@pytest.mark.parametrize("keeps_weights", [True, False])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_one_failure_is_told_once(guard: Guard, is_buffer: bool, keeps_weights: bool) -> None:
    run = guard(lambda: trained(is_buffer, keeps_weights))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("empty-reduction", 5)
    assert incident.location.code == "now = lengths.std()"
