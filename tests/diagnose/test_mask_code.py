"""Masks that leave rows without a key: the fix is the line that masks, as the script has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
PADDED = torch.tensor([[False, False, True], [True, True, True]])


class Attention(nn.Module):
    """Scores of a linear layer, masked by what `mask` does to them."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.score, self.mask = nn.Linear(3, 3), mask

    def forward(self, x: Tensor) -> Tensor:
        return (self.mask(self.score(x)).softmax(-1) * x).sum()


def filled(scores: Tensor) -> Tensor:
    return scores.masked_fill(PADDED, float("-inf"))


def compared(scores: Tensor) -> Tensor:
    keep = (~PADDED).long()
    scores.masked_fill_(keep == 0, -math.inf)
    return scores


def chosen(scores: Tensor) -> Tensor:
    return scores + torch.where(~PADDED, 0.0, -torch.inf)


def written(scores: Tensor) -> Tensor:
    scores[PADDED] = float("-inf")
    return scores


def written_rows(scores: Tensor) -> Tensor:
    scores[PADDED.all(-1)] = -math.inf
    return scores


def closed_twice(scores: Tensor) -> Tensor:
    scores = scores.masked_fill(torch.tensor([True, False, False]), float("-inf"))
    return scores.masked_fill(torch.tensor([False, True, True]), float("-inf"))


def fixes_of(guard: Guard, mask: Callable[[Tensor], Tensor]) -> dict[str, str]:
    torch.manual_seed(0)
    model = Attention(mask)
    first = guard(lambda: model(torch.ones(2, 3)).backward()).first
    assert first.cause == "masked-softmax"
    assert all(fix.verified for fix in first.fixes)
    return {fix.action: fix.how.partition("  #")[0] for fix in first.fixes}


@pytest.mark.parametrize(
    ("mask", "opened", "bounded"),
    [
        (
            filled,
            'return scores.masked_fill(PADDED & ~PADDED.all(-1, keepdim=True), float("-inf"))',
            "return scores.masked_fill(PADDED, torch.finfo(scores.dtype).min)",
        ),
        (
            compared,
            "scores.masked_fill_((masked := keep == 0) & ~masked.all(-1, keepdim=True), -math.inf)",
            "scores.masked_fill_(keep == 0, torch.finfo(scores.dtype).min)",
        ),
        (
            chosen,
            "return scores + torch.where((kept := ~PADDED) | ~kept.any(-1, keepdim=True), 0.0, -torch.inf)",
            "return scores + torch.where(~PADDED, 0.0, torch.finfo(torch.float32).min)",
        ),
        (
            written,
            'scores[PADDED & ~PADDED.all(-1, keepdim=True)] = float("-inf")',
            "scores[PADDED] = torch.finfo(scores.dtype).min",
        ),
    ],
)
def test_the_masking_line_is_changed(mask: Callable[[Tensor], Tensor], opened: str, bounded: str, guard: Guard) -> None:
    assert fixes_of(guard, mask) == {"fix-mask": opened, "mask-value": bounded}


def test_one_of_two_masks_is_no_cure_by_itself(guard: Guard) -> None:
    fixes = fixes_of(guard, closed_twice)
    assert fixes["fix-mask"].startswith("give every row at least one key")


def test_a_mask_of_rows_has_no_row_to_leave_open(guard: Guard) -> None:
    """`scores[rows] = ...` is `index_put_`, or (since PyTorch 2.15) a `masked_fill_` of the rows' elements."""
    fixes = fixes_of(guard, written_rows)
    assert fixes["fix-mask"].startswith("give every row at least one key")
    assert fixes["mask-value"] == "scores[PADDED.all(-1)] = torch.finfo(scores.dtype).min"


def test_a_log_of_a_determinant_is_written_with_slogdet(guard: Guard) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))

    def body() -> None:
        loss = model(torch.ones(1, 2)).sum() - torch.logdet(model.weight)
        loss.backward()

    (fix,) = guard(body).first.fixes
    assert fix.verified
    assert fix.how == "loss = model(torch.ones(1, 2)).sum() - torch.linalg.slogdet(model.weight)[1]"
