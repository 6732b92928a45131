"""Where an infinite CTC loss can be made to count as 0: in the call, of the criterion, in the model's settings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
LENGTHS = (torch.tensor([4, 4]), torch.tensor([2, 6]))
LABELS = torch.ones(2, 6, dtype=torch.long)


def by_function(model: nn.Module) -> Tensor:
    logits = model(torch.randn(4, 2, 3)).log_softmax(-1)
    return F.ctc_loss(logits, LABELS, *LENGTHS)


def by_criterion(model: nn.Module) -> Tensor:
    criterion = nn.CTCLoss()
    loss: Tensor = criterion(model(torch.randn(4, 2, 3)).log_softmax(-1), LABELS, *LENGTHS)
    loss.backward()
    return loss


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.config = nn.Linear(3, 5), SimpleNamespace(ctc_zero_infinity=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.ctc_loss(self.head(x).log_softmax(-1), LABELS, *LENGTHS, zero_infinity=self.config.ctc_zero_infinity)


@pytest.mark.parametrize(
    ("loss_of", "written"),
    [
        (by_function, "F.ctc_loss(logits, LABELS, *LENGTHS, zero_infinity=True)"),
        (by_criterion, "criterion.zero_infinity = True"),
        (lambda _: Recogniser()(torch.randn(4, 2, 3)), ".config.ctc_zero_infinity = True"),
    ],
    ids=["a function", "a criterion", "a setting"],
)
def test_the_fix_is_written_where_it_can_be_set(
    loss_of: Callable[[nn.Module], Tensor], written: str, guard: Guard
) -> None:
    def body() -> None:
        torch.manual_seed(0)
        loss_of(nn.Linear(3, 5)).item()

    first = guard(body).first
    assert first.cause == "infeasible-target"
    assert first.fixes[0].verified
    assert first.fixes[0].how.endswith(written)
