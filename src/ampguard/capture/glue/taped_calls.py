"""Functions that the script called outside every module, in place of the operators that they are made of (see `told`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampguard.capture.record import GlueOp, Modes

_USUAL = Modes(True, False, ())


@dataclass(slots=True)
class TapedCall(GlueOp):
    """A function that the script called outside every module, in place of the operators that it is made of (see `told`).

    `func` is what was called, `operands` are its arguments themselves, `modes` are those in which it was called, `index`
    is that of its last operator.
    """

    operands: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    modes: Modes = _USUAL
    made: Sequence[int] = ()
    """The versions of its results when it returned."""


@dataclass(slots=True)
class WritingCall(TapedCall):
    """The same of a function that wrote to its first operand and did nothing else (`weight.mul_(0.9)`): one operator.

    `before` is the operand's value before; None where an earlier call wrote to it. `is_first`: since the last backward pass,
    so that the value is taken as given, whatever made it.
    """

    before: Tensor | None = None
    is_first: bool = False
