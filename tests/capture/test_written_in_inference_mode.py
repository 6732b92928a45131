"""Inference tensors count no versions: what is written to one in place, or into a part of it, is followed all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
ROWS, DIM = 6, 4


def written_whole(features: Tensor) -> Tensor:
    size = features.norm(dim=1, keepdim=True)
    features.div_(size)
    return features.fill_diagonal_(0.0)


def written_in_parts(features: Tensor) -> Tensor:
    table = torch.zeros(ROWS, DIM)
    for at in range(0, ROWS, 2):
        part = features[at : at + 2]
        table[at : at + 2] = part / part.norm(dim=1, keepdim=True)
    return table @ table.T


CODES = {
    written_whole: "features.div_(size)",
    written_in_parts: "table[at : at + 2] = part / part.norm(dim=1, keepdim=True)",
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("compute", list(CODES))
@pytest.mark.parametrize("blank", [None, 3])
def test_the_line_that_made_it_bad_is_told(
    guard: Guard, compute: Callable[[Tensor], Tensor], mode: Callable[[], Any], blank: int | None
) -> None:
    def body() -> float:
        torch.manual_seed(0)
        net = nn.Linear(DIM, DIM, bias=False).eval()
        x = torch.randn(ROWS, DIM)
        if blank is not None:
            x[blank] = 0.0
        with mode():
            return compute(net(x)).mean().item()

    run = guard(body)
    assert run.faults == 0, run.stderr
    if blank is None:
        assert not run.report.incidents
        return
    assert run.causes == ["division-by-zero"]
    assert run.first.mode == "eval"
    assert run.first.location.code == CODES[compute]
    assert run.first.fixes[0].verified
