"""Hooks of the script's within the graph that clip gradients in the middle of a scaled backward pass.

`h.register_hook(lambda g: g.clamp(-1, 1))` on a hidden state, or a module's full backward hook, sees gradients times the
loss scale, as a hook on a parameter does (`leaf_hooks`). What such a hook gets and what it returns is compared in
iterations that are looked at closely: then a hook is put in its place that calls it and looks on.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampguard import compat
from ampguard.capture.protocol.gradients import SMALL
from ampguard.capture.protocol.script_lines import is_script_code, script_line
from ampguard.capture.record import Line

MOST_KNOWN = 64
MOST = 32
"""Changes that are kept of a pass."""


@dataclass(frozen=True, slots=True)
class Change:
    """A gradient before a hook and behind it, and the line that computed what the hook returned."""

    where: Line
    before: Tensor
    after: Tensor
    hook: Any

    def knows(self, scale: float) -> bool:
        """Whether the hook has the scale at hand: as a variable from outside, or kept in the object that it is."""
        function = getattr(self.hook, "__func__", self.hook)
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
        outside = [getattr(function, "__globals__", {}).get(name) for name in names]
        own = list((getattr(getattr(self.hook, "__self__", self.hook), "__dict__", None) or {}).values())
        given = [*getattr(self.hook, "args", ()), *getattr(self.hook, "keywords", {}).values()]
        numbers = [value for value in (*cells, *outside, *own, *given) if isinstance(value, (int, float))]
        return any(number in (scale, 1.0 / scale) for number in numbers)


class GraphHooks:
    """What the script's hooks change in the backward pass that is looked at."""

    def __init__(
        self,
        looks: Callable[[bool], bool],
        guarded: Callable[..., Any],
        arrives: Callable[[Tensor, None], None] = lambda gradient, watch: None,
    ) -> None:
        """`looks`: whether the iteration is looked at closely; it is told whether such a hook was never seen before.

        `arrives` is told of each gradient that a hook is about to get.
        """
        self._arrives = arrives
        self._looks = looks
        self._guarded = guarded
        self._known: set[CodeType] = set()
        self._is_open = False
        self._changes: list[Change] = []

    def begin(self) -> None:
        """A backward pass of a scaled loss begins."""
        self._is_open = True
        self._changes = []

    def end(self) -> list[Change]:
        """It has ended."""
        self._is_open = False
        changes, self._changes = self._changes, []
        return changes

    def on_tensor(self, hook: Any) -> Any:
        """What to register in the place of a hook on a computed tensor; the hook itself where nobody looks."""
        return self._seen(hook, lambda gradient: (gradient,))

    def on_leaf(self, hook: Any) -> None:
        """A hook on a parameter: what those do is seen from the outside, in an iteration that is looked at."""
        self._code_to_watch(hook)

    def on_module(self, hook: Any) -> Any:
        """The same of a module's hook, which gets the module and tuples of gradients."""
        return self._seen(hook, lambda module, inputs, outputs: inputs)

    def before_module(self, hook: Any) -> Any:
        """The same of a hook that runs before a module's backward pass."""
        return self._seen(hook, lambda module, outputs: outputs)

    def _seen(self, hook: Any, gradients: Callable[..., Any]) -> Any:
        """`gradients`: those that the hook may change, of what it is given."""
        code = self._code_to_watch(hook)
        if code is None:
            return hook

        @functools.wraps(hook)
        def seen(*given: Any) -> Any:
            if self._is_open:
                self._guarded(self._tell_arrived, given)
            return self._call(hook, code, gradients(*given), lambda: hook(*given))

        seen.of_script = hook  # type: ignore[attr-defined]
        return seen

    @property
    def are_there(self) -> bool:
        """Whether the script has put some into its graphs."""
        return bool(self._known)

    def _tell_arrived(self, given: tuple[Any, ...]) -> None:
        for item in given:
            for gradient in item if isinstance(item, (tuple, list)) else (item,):
                if isinstance(gradient, Tensor):
                    self._arrives(gradient, None)

    def _code_to_watch(self, hook: Any) -> CodeType | None:
        code = code_of(hook)
        if code is None or torch.compiler.is_compiling() or not is_script_code(code):
            return None
        is_new = code not in self._known and len(self._known) < MOST_KNOWN
        if is_new:
            self._known.add(code)
        return code if self._looks(is_new) else None

    def _call(self, hook: Any, code: CodeType, given: Any, run: Callable[[], Any]) -> Any:
        if not self._is_open or len(self._changes) >= MOST:
            return run()
        before = self._guarded(_copies, given)
        with _Lines(self._guarded) as lines:
            returned = run()
        self._guarded(self._compare, hook, Line(code, code.co_firstlineno), given, before, returned, lines)
        return returned

    def _compare(
        self, hook: Any, begin: Line, given: Any, before: list[Tensor | None], returned: Any, lines: _Lines
    ) -> None:
        results = given if returned is None else returned if isinstance(returned, (tuple, list)) else (returned,)
        for old, new in zip(before, results, strict=False):
            if old is None or not isinstance(new, Tensor) or new.shape != old.shape:
                continue
            with torch.no_grad(), compat.unseen():
                if not torch.equal(old, new):
                    self._changes.append(Change(lines.of(new) or begin, old, new.detach().clone(), hook))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has no value yet
        return False


def code_of(hook: Any) -> CodeType | None:
    """What a hook runs: a function, decorated or not, a method, a partial of one, or an object that can be called."""
    hook = inspect.unwrap(getattr(hook, "func", hook))
    code = getattr(hook, "__code__", None)
    if code is None and callable(hook):
        code = getattr(type(hook).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


class _Lines(TorchFunctionMode):
    """Which lines of the script computed which tensors."""

    def __init__(self, guarded: Callable[..., Any]) -> None:
        super().__init__()
        self._guarded = guarded
        self._made: list[tuple[Any, Line | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._made.append((result, self._guarded(script_line, sys._getframe(1))))
        return result

    def of(self, tensor: Tensor) -> Line | None:
        return next((line for made, line in reversed(self._made) if made is tensor), None)


def _copies(given: Any) -> list[Tensor | None]:
    with torch.no_grad(), compat.unseen():
        return [
            g.detach().clone() if isinstance(g, Tensor) and g.layout == torch.strided and g.numel() <= SMALL else None
            for g in given
        ]
