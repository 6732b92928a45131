"""What is captured of an operator are the numbers that it met, whatever is written to its operands behind it."""

from __future__ import annotations

import torch

from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import Variant


def test_each_operator_keeps_its_own_of_a_tensor_that_is_written_to_in_between() -> None:
    x = torch.ones(3)
    mode = ReplayMode(Variant(capture=frozenset({0, 2})), None, {})
    with torch.no_grad(), mode:
        x.sum()
        x.mul_(2)
        x.sum()
        x.mul_(2)
    captured = mode.captured()
    assert [captured[i].args[0].tolist() for i in (0, 2)] == [[1.0] * 3, [2.0] * 3]
    assert [captured[i].result.item() for i in (0, 2)] == [3.0, 6.0]
