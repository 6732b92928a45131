"""Optimizers whose `step` is not PyTorch's: does their own arithmetic leave the numbers?

After such a step the gradients are still there, one iteration later they are not. On the CPU each optimizer's first steps
are looked at, and then every step as long as that takes a small share of the time; on another device, where looking waits,
the first ones and then those at powers of two. The first steps that reach other parameters than those before (a part is
unfrozen, or added) count as first ones again. No tensor is copied: what a step counts with plain numbers is noted before
it, so that the step can be run again as it was.
"""

from __future__ import annotations

import inspect
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.frames import is_user_code
from ampguard.capture.protocol.moves import Frame, Moves
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import Line
from ampguard.capture.sampling.copies import parameters_of
from ampguard.numerics import all_finite_on_cpu, is_finite, is_low_precision
from ampguard.protocol.events import Breach

FREE_STEPS = 64
"""Steps of each optimizer that are looked at on the CPU whatever it costs."""

FREE_SECONDS = 0.05
"""What looks on the CPU may take of a run beside their share of its time."""

SHARE = 0.005
"""Of the time since the first step, what later looks may take on the CPU."""

CLOSELY_STEPS = 3
"""Steps of each optimizer that are looked at on a device that has to be waited for."""

NUMBERS = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a step was called with, beside the optimizer: `opt.step(inv_scale=1 / scale)`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def are_numbers(self) -> bool:
        """Whether the step can be run again with them: a closure would run the model again."""
        values = (*self.args, *self.kwargs.values())
        return all(isinstance(v, NUMBERS) or (isinstance(v, Tensor) and v.numel() == 1) for v in values)


@dataclass(slots=True)
class Counters:
    """The plain numbers of an optimizer before a step: its attributes, and its state by the parameter's identity."""

    attributes: dict[str, Any] = field(default_factory=dict)
    state: list[tuple[Any, dict[str, Any] | None]] = field(default_factory=list)
    """Each key with a shallow copy of what was kept under it."""

    def of_state(self, key: Any) -> dict[str, Any] | None:
        """The plain numbers kept under a key, which is a parameter mostly. None: there was nothing before the step."""
        for known, kept in self.state:
            if known is key:
                return {k: v for k, v in (kept or {}).items() if isinstance(v, NUMBERS)}
        return None


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What `load_state_dict` has made of an optimizer's state: PyTorch's gives it the type of the parameter it is kept for.

    `names`: of the state that was in float32 in the checkpoint and is in the low precision `dtype` now.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    where: Line | None


class OwnSteps:
    """Looks at the parameters after each step of an optimizer that the script, or a library, wrote itself."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self.are_own: dict[type, bool] = {}
        """Classes of optimizers that have stepped: whether their `step` is not PyTorch's."""
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Of each optimizer, since it reaches the parameters that it reaches now."""
        self._reached: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The most parameters of each optimizer that have had gradients in a step."""
        self._began = math.inf
        self._spent = 0.0
        """Seconds that the looks have taken."""
        self._counters: Counters | None = None
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        """For each optimizer, which of its parameters were not finite before its first step: not its doing."""
        self._loaded: weakref.WeakKeyDictionary[Optimizer, LoadedState] = weakref.WeakKeyDictionary()

    def is_own(self, optimizer: Optimizer) -> bool:
        """Whether its class has a `step` that is not PyTorch's."""
        kind = type(optimizer)
        known = self.are_own.get(kind)
        if known is None:
            code = getattr(inspect.unwrap(kind.step), "__code__", None)
            known = self.are_own[kind] = code is not None and is_user_code(code)
        return known

    def loaded(self, optimizer: Optimizer, given: Any, where: Line | None) -> None:
        """The script has loaded the optimizer's state."""
        if self.is_own(optimizer):
            self._loaded.pop(optimizer, None)
            names, dtype = lowered(optimizer, given)
            if dtype is not None:
                self._loaded[optimizer] = LoadedState(tuple(names), dtype, where)

    def before(self, optimizer: Optimizer) -> None:
        """Note what it counts, where this step will be looked at."""
        start = time.perf_counter()
        self._began = min(self._began, start)
        reached = sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if reached > self._reached.get(optimizer, 0):
            self._reached[optimizer], self._steps[optimizer] = reached, 0
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if optimizer in self._told or not self._looks_now(optimizer, start):
            return
        self._counters = counters_of(optimizer)
        if optimizer not in self._known:
            self._known[optimizer] = {id(p) for p in bad_ones(parameters_of([optimizer]))}
        self._spent += time.perf_counter() - start

    def after(self, optimizer: Optimizer, arguments: Arguments, frame: Frame) -> None:
        """A parameter that is not finite although its optimizer's gradients are is the step's own doing."""
        counters, self._counters = self._counters, None
        if counters is None or not arguments.are_numbers:
            return
        start = time.perf_counter()
        bad = self._made_bad(optimizer)
        self._spent += time.perf_counter() - start
        if bad:
            self._told.add(optimizer)
            self._tell(optimizer, bad, {"counters": counters, "arguments": arguments}, frame)

    def _looks_now(self, optimizer: Optimizer, now: float) -> bool:
        steps = self._steps[optimizer]
        if all(p.is_cpu for p in parameters_of([optimizer])):
            return steps <= FREE_STEPS or self._spent <= FREE_SECONDS + SHARE * (now - self._began)
        return steps <= CLOSELY_STEPS or not steps & (steps - 1)

    def _made_bad(self, optimizer: Optimizer) -> list[Tensor]:
        held = parameters_of([optimizer])
        with torch.no_grad(), compat.unseen():
            if all(p.is_cpu for p in held) and all_finite_on_cpu(map(_touched, held)):
                return []
        bad = [p for p in bad_ones(held) if id(p) not in self._known.get(optimizer, ())]
        return [] if bad_ones([p.grad for p in held if p.grad is not None]) else bad

    def _tell(self, optimizer: Optimizer, bad: list[Tensor], before: dict[str, Any], frame: Frame) -> None:
        moves = self._moves
        watch = moves.watches.optimizer(optimizer)
        facts = {"parameters": bad, "loaded": self._loaded.get(optimizer), **before}
        moves.tell([Breach("optimizer-underflow", watch, None, None, script_line(frame), None, facts)], moves.attempt)


def _touched(parameter: Tensor) -> Tensor:
    """What a step may have moved of a parameter: of a table with a sparse gradient, the rows of that."""
    grad = parameter.grad
    rows = None if grad is None or parameter.layout is not torch.strided else compat.stored_rows(grad)
    return parameter if rows is None else parameter.detach()[rows[0]]


def bad_ones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that are not finite. Waits for the device."""
    with torch.no_grad(), compat.unseen():
        return [t for t in tensors if t.is_floating_point() and compat.has_values(t) and not is_finite(t.detach())]


def lowered(optimizer: Optimizer, given: Any) -> tuple[list[str], torch.dtype | None]:
    """Names of the state that is in float32 in a checkpoint and in low precision in the optimizer, and in which."""
    states = given.get("state", {}) if isinstance(given, dict) else {}
    names: dict[str, torch.dtype] = {}
    for number, parameter in enumerate(parameters_of([optimizer])):
        saved, here = states.get(number), optimizer.state.get(parameter, {})
        for name, value in saved.items() if isinstance(saved, dict) else ():
            now = here.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and value.dtype == torch.float32:
                names |= {name: now.dtype} if is_low_precision(now.dtype) else {}
    return list(names), next(iter(names.values()), None)


def counters_of(optimizer: Optimizer) -> Counters:
    """Its plain numbers as they are now."""
    attributes = {k: v for k, v in vars(optimizer).items() if isinstance(v, NUMBERS)}
    state = optimizer.state
    copies = [kept.copy() if isinstance(kept, dict) else None for kept in state.values()]
    return Counters(attributes, list(zip(state.keys(), copies, strict=True)))
