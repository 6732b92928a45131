"""Blocks of training steps inside a loop that somebody else owns: each framework asks for batches, and is timed by that.

`Pace` is iterated once a step. Between two batches it enters and leaves what a row is (nothing, or the guard) and reads
the clock; when the blocks are done it ends, and so does the framework's loop.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack

from rows import Row
from torch import Tensor, nn
from torch.utils.data import IterableDataset


class Pace:
    """The blocks of one row: `pairs` pairs of neighbours, one plain and one of the row, in alternating order."""

    def __init__(self, model: nn.Module, row: Row, plain: Row, pairs: int, warm_up: int, steps: int) -> None:
        self.ratios: list[float] = []
        self.seconds: list[tuple[float, float]] = []
        """CPU seconds of each pair: plain, the row's."""
        self.steps = steps
        self._model, self._warm_up = model, warm_up
        self._order = [(plain, row) if pair % 2 == 0 else (row, plain) for pair in range(pairs)]
        self._row = row

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._warm_up):
            yield 0
        for number, (first, second) in enumerate(self._order):
            ends = []
            for of in (first, second):
                ends.append((yield from self._block(of)))
            bare, guarded = ends if number % 2 == 0 else reversed(ends)
            self.seconds.append((bare, guarded))
            self.ratios.append(guarded / bare)

    def _block(self, of: Row) -> Iterator[int]:
        with ExitStack() as stack:
            stack.enter_context(of(self._model))
            for _ in range(self._warm_up):
                yield 0
            gc.collect()
            begin = time.process_time()
            for _ in range(self.steps):
                yield 1
            return time.process_time() - begin


class SameBatch(IterableDataset[tuple[Tensor, ...]]):
    """One batch again and again, as often as the pace asks for a step."""

    def __init__(self, pace: Pace, *batch: Tensor) -> None:
        super().__init__()
        self.pace, self.batch = pace, batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for _ in self.pace:
            yield self.batch
