"""Numbers that the script reads from tensors (`loss.item()`, `if torch.isnan(loss)`): a bad one is healed first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.judging.judge import Judge
from ampguard.capture.patches import Patches

READING = ("item", "__float__", "__bool__")


class Reads:
    """The tape tells the judge of bad numbers that are read; here they are read again once they are healed."""

    def __init__(self, judge: Judge, barrier: FaultBarrier, heal: Callable[[], bool]) -> None:
        self._judge = judge
        self._barrier = barrier
        self._heal = heal

    def install(self, patches: Patches) -> None:
        for name in READING:
            patches.replace(torch.Tensor, name, self._watch)

    def _watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        judge = self._judge

        @functools.wraps(original)
        def read(tensor: torch.Tensor) -> Any:
            known = len(judge.suspects)
            value = original(tensor)
            if len(judge.suspects) > known and judge.suspects[-1].kind == "loss" and self._barrier.call(self._heal):
                return original(tensor)
            return value

        return read
