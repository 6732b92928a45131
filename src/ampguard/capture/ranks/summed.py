"""A sum over all ranks outside modules, as operators of this rank: what it puts in, and what the others have added.

Run again as it was, the result is what it was, bit for bit; where this rank puts in something else (a fix), the others
add what they added.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.log import EventLog

aten = torch.ops.aten


class SummedUp:
    """One sum. `tensor`: what this rank puts in, not yet overwritten."""

    def __init__(self, log: EventLog, tensor: Tensor, frame: FrameType) -> None:
        self._log = log
        self._frame = frame
        with compat.unseen():
            self.own = tensor.detach().clone()
        log.is_copy_of(self.own, tensor, frame)

    def became(self, tensor: Tensor) -> Tensor:
        """The sum is there. Returns what stands for it among the operands: 0 where it is not finite."""
        with compat.unseen():  # the tape is on in evaluation, and these are no operators of the script's
            value, before = tensor.detach().clone(), self.own.clone()
            is_known = torch.isfinite(value)
            zero = torch.zeros_like(value)
            value, others = torch.where(is_known, value, zero), torch.where(is_known, value - before, zero)
        is_same = self._recorded(aten.eq.Tensor, self.own, before)
        is_as_it_was = self._recorded(aten.logical_and.default, is_same, is_known)
        otherwise = self._recorded(aten.add.Tensor, self.own, others)
        self._recorded(aten.where.self, is_as_it_was, value, otherwise, result=tensor)
        return value

    def _recorded(self, func: Any, *operands: Tensor, result: Tensor | None = None) -> Tensor:
        """Record an operator. `result`: what holds its result already."""
        op = self._log.add_operator(func, operands, {}, None, self._frame)
        with compat.unseen():
            made: Tensor = func(*operands) if result is None else result
        if op is not None:
            self._log.add_results(op, made, writes=False)
        return made
