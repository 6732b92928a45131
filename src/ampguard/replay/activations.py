"""Activation maxima, sampled: in some steps the operators are watched, and of each result that has a narrow range
(float16, not bfloat16) the largest |x| is kept.

The operators run as they are; what we compute from their results goes nowhere but into our notes. A step that is
sampled ends bit for bit as one that is not. Compiled code is never watched, and nothing while failures are traced.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.frames import user_line
from ampguard.capture.record import Event, Line, RootCall
from ampguard.capture.sampling.allowance import Allowance
from ampguard.capture.sampling.later import NumbersLater
from ampguard.numerics import largest
from ampguard.replay.live import Watching
from ampguard.replay.names import module_names
from ampguard.replay.operators import facts_of

FIRST_STEPS = frozenset({2})
SHARE = 0.004
"""Of the training's time."""

CHEAP = 0.002
"""Seconds of a look that is taken at a milestone though they are more than its share."""

NARROW = 1e6
"""A type whose numbers end below this is worth watching."""

DISPATCH_SECONDS = 4e-6
"""What it takes PyTorch to hand an operator to a mode."""

LOOKS_IN_VAIN = 3

CALLS_WITHOUT_GRADIENTS = 4
"""Calls of a step that are watched though no gradient goes through them: those of a target network, not an evaluation."""


@dataclass(frozen=True, slots=True)
class Place:
    """An operator at a line of a module."""

    module: str | None
    op: str
    file: str | None
    number: int | None
    dtype: torch.dtype
    line: Line | None = field(compare=False, default=None)


Peaks = dict[Place, float]
Seen = tuple[Place, Any]
"""A place and its operator (as long as it is kept, its identity is no other's)."""


class PeakMode(compat.DispatchMode):
    """Keeps the smallest and the largest value of every narrow result, as tensors: nothing is read here."""

    def __init__(
        self, names: dict[int, str], barrier: FaultBarrier, known: dict[tuple[int, str | None, int, torch.dtype], Seen]
    ) -> None:
        super().__init__()
        self.event: Event | None = None
        self.names = names
        self._known = known
        self.places: list[Place] = []
        self.extremes: list[Tensor] = []
        self.seconds = 0.0
        """Of this thread's own time: others may use the processor."""
        self._barrier = barrier
        self._stack: list[nn.Module] = []

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.enter_module(module)
        try:
            return original(module, *args, **kwargs)
        finally:
            self.leave_module()

    def enter_module(self, module: nn.Module) -> None:
        self._stack.append(module)

    def leave_module(self) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = compat.run_counted(func, args, kwargs or {})
        if type(output) is not Tensor or output.dtype in _narrow:  # (most results that no cast made are float32)
            self._barrier.call(self._note, func, output)
        else:
            self.seconds += DISPATCH_SECONDS
        return output

    def _note(self, func: Any, output: Any) -> None:
        facts = facts_of(func)
        if not facts.is_uninitialised:
            started = time.thread_time()
            for position, tensor in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
                if isinstance(tensor, Tensor) and tensor.dtype in _narrow and not facts.is_view(position):
                    self._note_extremes(func, tensor)
            self.seconds += time.thread_time() - started
        self.seconds += DISPATCH_SECONDS

    def _note_extremes(self, func: Any, tensor: Tensor) -> None:
        if not compat.is_dense(tensor) or not compat.has_values(tensor):
            return
        self.extremes += torch.aminmax(tensor)  # (below autograd: nothing is recorded)
        event = self.event
        line = event.line if event is not None else None
        if isinstance(event, RootCall):
            line = user_line(sys._getframe()) or line
        key = id(func), self._module(), id(line), tensor.dtype
        seen = self._known.get(key)
        if seen is None:
            file, number = (line.code.co_filename, line.number) if line is not None else (None, None)
            seen = self._known[key] = Place(key[1], str(func), file, number, tensor.dtype, line), func
        self.places.append(seen[0])

    def _module(self) -> str | None:
        for module in reversed(self._stack):
            name = self.names.get(id(module))
            if name is not None:
                return name
        return "" if self._stack else None


class ActivationSampling:
    """The recorder's live tracer in a sampled step."""

    def __init__(
        self, barrier: FaultBarrier, later: NumbersLater, on_peaks: Callable[[int, Peaks, float], None]
    ) -> None:
        self.allowance = Allowance(SHARE, FIRST_STEPS, CHEAP)
        self.barrier = barrier
        self._later = later
        self._on_peaks = on_peaks
        self._names: dict[int, str] = {}
        self._known: dict[tuple[int, str | None, int, torch.dtype], Seen] = {}
        self._mode: PeakMode | None = None
        self._in_vain = 0
        self._without_gradients = 0

    def wants_call(self) -> bool:
        """Whether the call of a root module that is about to come in a sampled step is to be watched."""
        if torch.is_grad_enabled():
            return True
        self._without_gradients += 1
        return self._without_gradients <= CALLS_WITHOUT_GRADIENTS and not torch.is_inference_mode_enabled()

    def is_due(self, step: int) -> bool:
        """Whether iteration number `step` is to be sampled."""
        if not step or (self._in_vain >= LOOKS_IN_VAIN and step & (step - 1)):
            return False
        return self.allowance.is_due(step) and not compat.has_compiled()

    def iteration_ended(self, step: int, rate: float) -> None:
        """The sampled iteration is over: hand its maxima on."""
        mode, self._mode = self._mode, None
        self._without_gradients = 0
        if mode is None:
            return
        started = time.thread_time()
        self._in_vain = 0 if mode.extremes else self._in_vain + 1
        places = mode.places
        if places:
            self._later.ask(mode.extremes, lambda values: self._on_peaks(step, peaks_of(places, values), rate))
        self.allowance.spend(mode.seconds + time.thread_time() - started)

    def begin_step(self) -> None:
        """A backward pass ended; micro-steps of one iteration are sampled together."""

    def watch(self, event: Event) -> AbstractContextManager[Any]:
        """A context in which the results of what the event runs are looked at."""
        is_alone = compat.dispatch_depth() == 0 and not compat.in_functorch()
        if is_alone and isinstance(event, RootCall) and not compat.any_compiled(event.module):
            return Watching(self, event)
        return contextlib.nullcontext()

    def enter(self, event: Event) -> PeakMode:
        if self._mode is None:
            self._mode = PeakMode(self._names, self.barrier, self._known)
        mode = self._mode
        mode.event = event
        if isinstance(event, RootCall) and id(event.module) not in self._names:
            self._names |= module_names(event.module, event.prefix)
        mode.begin()
        return mode


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether values of this type can outgrow it in an ordinary training: float16, not bfloat16.

    Nor float8: what is stored in it was scaled to fill its range.

    >>> is_narrow(torch.float16), is_narrow(torch.bfloat16), is_narrow(torch.int8), is_narrow(torch.float8_e4m3fn)
    (True, False, False, False)
    """
    return dtype.is_floating_point and dtype.itemsize > 1 and largest(dtype) < NARROW


_narrow = frozenset(t for t in vars(torch).values() if isinstance(t, torch.dtype) and is_narrow(t))
"""Asked of every result: a look into a set is no call."""


def peaks_of(places: list[Place], extremes: list[float | None]) -> Peaks:
    """The largest |x| at each place. A constant at the very end of the range is a mask, and no activation."""
    peaks: Peaks = {}
    for place, low, high in zip(places, extremes[::2], extremes[1::2], strict=True):
        limit = largest(place.dtype)
        sizes = [abs(v) for v in (low, high) if v is not None and abs(v) < limit]
        if sizes:
            peaks[place] = max(peaks.get(place, 0.0), *sizes)
    return peaks
