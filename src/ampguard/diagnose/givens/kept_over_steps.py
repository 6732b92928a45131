"""Tensors that a script keeps over the steps and writes to in each: sums, memories, averages. They are no data of a step."""

from __future__ import annotations

from torch import Tensor

from ampguard.compat import version_of
from ampguard.replay.rebuild import Replayer

FEWEST_WRITES = 8


def times_written_over_steps(tensor: Tensor, step: int, replayer: Replayer | None) -> int:
    """How often the script has written to what it keeps: about once a step; 0 for a batch, and for what was computed."""
    if replayer is None or not tensor.is_leaf or replayer.is_of_batch(tensor):
        return 0
    times = version_of(tensor)
    return times if times >= max(FEWEST_WRITES, step // 2) else 0
