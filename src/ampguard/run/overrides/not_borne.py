"""Modules whose own code does not go with gained autocast: they run in float32, and the call is made again.

`out.index_add_(0, i, self.expert(x[i]))`, `y[mask] = self.head(h)`, messages that are scattered: PyTorch refuses these where
one tensor was made in float32 and the other came out of autocast. Who writes a script for autocast writes a cast there.
"""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch import nn

from ampguard import compat
from ampguard.numerics import dtype_name
from ampguard.run.overrides.forced import Forced
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.moment import Moment
from ampguard.run.overrides.plan import Plan

OF_TYPES = re.compile(r"dtype|scalar type|input type|\bHalf\b|\bB?Float(16|32)\b", re.IGNORECASE)
"""What PyTorch says where operands' types do not go together, and code that asserts a type."""

REFUSALS = (RuntimeError, TypeError, AssertionError)

Parts = Callable[[], dict[str, nn.Module]]


class NotBorne:
    """Around calls that gained autocast. What is not borne is seen in the first call of most models."""

    def __init__(self, plan: Plan, ledger: Ledger, forced: Forced) -> None:
        self._plan = plan
        self._ledger = ledger
        self._forced = forced
        self._in_float32: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._has_run: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Roots that have returned from a call: what a later one changes is not kept before it."""
        self.given_up: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Roots that gain no autocast: their own `forward` does not bear it, or they are no model."""

    def call(
        self, root: nn.Module, run: Callable[[], Any], run_plain: Callable[[], Any], parts: Parts, is_lent: bool = False
    ) -> Any:
        """`run`, a call of the root under autocast, until all modules that do not bear it are in float32.

        `is_lent`: autocast is around more than the call, which may be given low-precision inputs.
        """
        moment = Moment.before(root) if root not in self._has_run else None
        while root not in self.given_up:
            try:
                output = run()
            except REFUSALS as error:
                # Ranks that train together would have to make the call again together, as all do with their first.
                if not is_of_types(error) or (moment is None and compat.several_ranks()):
                    raise
                self._give_way(root, error, parts(), is_lent)
            else:
                self._has_run.add(root)
                return output
            if moment is not None:
                moment.restore()
        return run_plain()

    def _give_way(self, root: nn.Module, error: Exception, parts: dict[str, nn.Module], is_lent: bool) -> None:
        """Put the innermost module that was running when it failed in float32; where that is of no use, the root."""
        name, module = innermost(error.__traceback__, parts)
        if not name and is_lent:  # a root whose inputs have to be cast as well
            name, module = type(root).__name__, root
        is_new = name and module not in self._in_float32 and not compat.needs_other_ranks(root)
        if is_new and module is not None and self._forced.force([(name, module)], cast_back=True):
            self._in_float32.add(module)
        else:
            module = None
            self.given_up.add(root)
        what = type(root).__name__ if module is None else name
        low = dtype_name(self._plan.dtype) if self._plan.dtype is not None else "low-precision"
        said = first_line_of(error)
        self._ledger.failed(f"{what} stays in float32: its own code does not go with {low} autocast ({said})")


def is_of_types(error: BaseException) -> bool:
    """Whether it is one of the `REFUSALS` over types: by its words, or by the line of an `assert` that has none."""
    return isinstance(error, REFUSALS) and OF_TYPES.search(first_line_of(error)) is not None


def first_line_of(error: BaseException) -> str:
    """What it says; of an `assert` without words, the line itself."""
    said = str(error)
    frames = (
        traceback.extract_tb(error.__traceback__, limit=-1) if isinstance(error, AssertionError) and not said else []
    )
    said = said or (frames[0].line or "" if frames else "")
    return said.splitlines()[0].rstrip(".") if said else type(error).__name__


def innermost(frames: TracebackType | None, parts: dict[str, nn.Module]) -> tuple[str, nn.Module | None]:
    """The module whose code was running last, by the first arguments of what was called."""
    names = {id(module): name for name, module in parts.items()}
    found: tuple[str, nn.Module | None] = "", None
    for owner in _first_arguments(frames):
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = names[id(owner)], owner
    return found


def _first_arguments(frames: TracebackType | None) -> Iterator[object]:
    while frames is not None:
        code = frames.tb_frame.f_code
        if code.co_argcount:
            yield frames.tb_frame.f_locals.get(code.co_varnames[0])
        frames = frames.tb_next
