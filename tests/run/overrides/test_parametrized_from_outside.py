"""O2, O3 and bf16-true on models whose weights are computed from others (`torch.nn.utils.parametrizations`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from override_loops import batches
from torch import nn
from torch.nn.utils.parametrizations import orthogonal


def train() -> tuple[nn.Module, float, torch.dtype]:
    """The model, its last loss, and the type of the parametrized weight in its last call."""
    torch.manual_seed(0)
    net = nn.Sequential(orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    seen = []
    net[1].register_forward_pre_hook(lambda *_: seen.append(net[0].weight.dtype))
    for x, y in batches(6):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net, loss.item(), seen[-1]


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_weights_are_made_in_float32_and_used_in_the_low_precision(overridden: Callable[..., Any], mode: str) -> None:
    _, in_fp32, _ = train()
    with overridden(mode) as session:
        net, loss, dtype = train()
    assert dtype == (torch.bfloat16 if mode == "bf16-true" else torch.float16)
    assert loss == pytest.approx(in_fp32, rel=0.02)
    assert session.report.run["could_not"] == []
    assert type(net[0].parametrizations.weight).__mro__[0] is nn.utils.parametrize.ParametrizationList
    assert not net[0].parametrizations.weight._forward_hooks
