"""Gradients on an accelerator that no scaler looks at: are they finite? asked without holding the script up.

A flag is queued behind the backward pass. Where the device has come to the end of the last step by then (the script itself
waits for it in each step, by `loss.item()` for one, or is what takes the time), its answer is waited for before the optimizer
changes the parameters, and a bad step can be run again. Elsewhere waiting would cost what the script gains by running ahead
by more than a step: the answer is read when it is there, behind the update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.flags import FiniteFlag, is_capturing, is_immediate
from ampguard.compat import cuda_is_in_use as is_in_use

MOST_LATE = 2
"""Steps whose answers are waited for at most: the script is not that far ahead of the device."""


@dataclass(slots=True)
class LateFlag:
    """What a device has not answered yet of a step's gradients."""

    flag: FiniteFlag
    step: int
    parameters: list[Tensor]


class DeviceGradients:
    """Asked before each update that no scaler allows."""

    def __init__(self) -> None:
        self.waits_always = False
        """Whether a bad update is to be stopped or held off, whatever the waiting costs."""
        self.late: list[LateFlag] = []
        self._end: Any = None
        """An event behind the last iteration's updates."""
        self.has_asked = False
        """Whether gradients of the running iteration lie on a device."""

    def are_finite(self, parameters: Iterable[Tensor], step: int) -> bool:
        """Whether they are, as far as it is known now: those whose gradients lie on a device are asked for in any case."""
        held = [p for p in parameters if p.grad is not None and not is_immediate(p.grad)]
        if not held or is_capturing():
            return True
        self.has_asked = True
        flag = FiniteFlag([p.grad for p in held if p.grad is not None])
        if self.waits_always or self._end is None or self._end.query():
            return flag.is_set()
        self.late.append(LateFlag(flag, step, held))
        return True

    def iteration_ends(self) -> None:
        """The update that ends it is queued."""
        self.has_asked = False
        if not is_in_use() or is_capturing():
            return
        if self._end is None:
            self._end = torch.cuda.Event()
        self._end.record()

    def take_bad(self, waits: bool) -> list[LateFlag]:
        """Those that the device has found bad since. `waits`: for all that it was asked."""
        bad = []
        while self.late and (waits or len(self.late) > MOST_LATE or self.late[0].flag.is_known):
            first = self.late.pop(0)
            if not first.flag.is_set():
                bad.append(first)
        return bad
