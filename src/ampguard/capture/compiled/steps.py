"""A training step that is compiled as a whole: a function that differentiates, perhaps updates.

What runs inside is not seen, but for the calls at which Dynamo stops: `backward`, a scaler's, an optimizer's. The call
is recorded as a module's is, and its results are what it differentiates. A replay calls the function again, eagerly,
and leaves it where it differentiates for the time in question: what lies before that makes a forward pass, and the
gradients are those of a recorded backward pass, as in a step that is not compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.compiled.functions import CompiledFunction, recorded
from ampguard.capture.compiled.leaving import (
    LeftError,
    bad_number_in,
    gradients_kept,
    left_at,
    nothing_updated,
    replaced,
    stays_in_graph,
    with_unscaled,
)
from ampguard.capture.compiled.reached import may_differentiate, may_drive, modules_reached, of_kind, only_updates
from ampguard.capture.glue.untaped import without_tape
from ampguard.capture.record import Ref, RootCall
from ampguard.capture.recorder import FlightRecorder


class CompiledStep(CompiledFunction):
    """A compiled training step in the record, up to the `turn`-th time that it differentiates.

    `raises`: it does so before that, with a loss in hand that is not finite, which is its result then.
    """

    raises = False

    def __init__(
        self, compiled: Callable[..., Any], function: Any, reached: Mapping[str, nn.Module], turn: int
    ) -> None:
        super().__init__(compiled, function, reached)
        self._turn = turn
        self._later: CompiledStep | None = None

    def alike(self, turn: int = 1) -> CompiledStep:
        """The same step, up to another time."""
        return CompiledStep(self._compiled, self._function, dict(self.named_children()), turn)

    def following(self) -> CompiledStep:
        """The same step, up to the next time."""
        if self._later is None:
            object.__setattr__(self, "_later", self.alike(self._turn + 1))  # not as a part of this module
        assert self._later is not None
        return self._later

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        optimizers = of_kind(Optimizer, self._function, args, kwargs).values()
        held = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        with gradients_kept([*self.parameters(), *held]), nothing_updated(), left_at(self._turn):
            try:
                return super().forward(*args, **kwargs)
            except LeftError as left:
                return left.losses
            except Exception as error:
                loss = bad_number_in(error) if self.raises else None
                if loss is None:
                    raise
                return loss


class _OpenStep:
    """A call of a compiled step that is under way."""

    def __init__(self, recorder: FlightRecorder, root: RootCall) -> None:
        self._recorder = recorder
        self._first = root
        self._root: RootCall | None = None
        """The event whose results were differentiated last."""

    @property
    def has_differentiated(self) -> bool:
        return self._root is not None

    def differentiates(self, tensors: Any) -> None:
        """Losses are about to be differentiated: what this call has made so far."""
        log = self._recorder.log
        if self._root is None:
            root = self._first
        else:
            module = self._root.module
            assert isinstance(module, CompiledStep)
            index, made = log.claim_index(), self._recorder.steps.attempts
            root = dataclasses.replace(
                self._root, index=index, module=module.following(), outputs=[], floating=[], updates_before=made
            )
            log.append(root)
        self._root = root
        for position, tensor in enumerate(with_unscaled(tensors, self._recorder.scaling.losses.get)):
            root.outputs.append(log.producers.define(tensor, Ref(root.index, position)))
            root.floating.append(tensor.is_floating_point())

    def raised(self, error: Exception) -> None:
        """The call raised: a loss that the step has in hand, and that is not finite, may be why."""
        bad, module = bad_number_in(error), self._first.module
        if self.has_differentiated or bad is None or not isinstance(module, CompiledStep):
            return
        self._first.module = raising = module.alike()
        raising.raises = True
        self._first.outputs.append(self._recorder.log.producers.define(bad, Ref(self._first.index, 0)))
        self._first.floating.append(True)

    def end(self, output: Any) -> None:
        """The call has returned."""
        recorder = self._recorder
        if not self.has_differentiated:
            recorder.leave_root(self._first, output)
            return
        recorder.look_at_buffers(self._first)


def recorded_as_called(
    recorder: FlightRecorder, function: Any, compiled: Callable[..., Any], hide: Callable[[], None]
) -> Callable[..., Any]:
    """A compiled function; whether it is a training step is seen at its first call, by what that has at hand."""
    chosen: Callable[..., Any] | None = None

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen
        if recorder.paused or compat.is_compiling() or not recorder.active:
            return compiled(*args, **kwargs)
        if chosen is None:
            drives = recorder.barrier.call(may_drive, function, args, kwargs)
            chosen = (
                recorded_step(recorder, function, compiled, hide) if drives else recorded(recorder, function, compiled)
            )
        return chosen(*args, **kwargs)

    return call


def recorded_step(
    recorder: FlightRecorder, function: Any, compiled: Callable[..., Any], hide: Callable[[], None]
) -> Callable[..., Any]:
    """A compiled function that differentiates, whose calls outside every module are recorded.

    `hide` keeps our own code from being compiled where compiled code stops at it.

    Dynamo puts back the dispatch state of its entry, the tape's with it: the tape stays off.
    """
    guarded = recorder.barrier.call
    known: dict[tuple[int, ...], CompiledStep] = {}

    differentiates: bool | None = None

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledStep | None:
        nonlocal differentiates
        if differentiates is None:
            differentiates = may_differentiate(function, args, kwargs)
        modules = modules_reached(function, args, kwargs)
        if not (modules or torch.is_grad_enabled()) or (not differentiates and only_updates(function, args, kwargs)):
            return None
        key = tuple(map(id, modules.values()))
        if key not in known:
            known[key] = CompiledStep(compiled, function, modules, 1)
        return known[key]

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_nested = recorder.paused or compat.is_compiling() or recorder.tape.is_barred
        if is_nested or not recorder.active:
            return compiled(*args, **kwargs)
        guarded(hide)
        if not recorder.turns.take():
            return compiled(*args, **kwargs)
        try:
            return followed(args, kwargs)
        finally:
            recorder.turns.lock.release()

    def followed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = guarded(begin, args, kwargs)
        root = guarded(recorder.enter_root, step, args, kwargs) if step is not None else None
        opened = _OpenStep(recorder, root) if root is not None else None
        with without_tape(recorder), telling(recorder, opened):
            try:
                output = compiled(*args, **kwargs)
            except Exception as error:
                if opened is not None:
                    guarded(opened.raised, error)
                raise
        if opened is not None:
            guarded(opened.end, output)
        return output

    return call


@contextlib.contextmanager
def telling(recorder: FlightRecorder, opened: _OpenStep | None) -> Iterator[None]:
    """What is differentiated meanwhile are results of the step that is under way."""
    if opened is None:
        yield
        return
    guarded = recorder.barrier.call
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def is_ours() -> bool:
        return recorder.active and not recorder.paused and not compat.is_compiling()

    @functools.wraps(backward)
    def told_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours():
            guarded(opened.differentiates, tensors)
        return backward(tensors, *args, **kwargs)

    @functools.wraps(grad)
    def told_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return grad(outputs, *args, **kwargs)
        if not stays_in_graph(args, kwargs):
            guarded(opened.differentiates, outputs)
            return grad(outputs, *args, **kwargs)
        recorder.paused = True  # a part of the forward pass, as inside a module
        try:
            return grad(outputs, *args, **kwargs)
        finally:
            recorder.paused = False

    with replaced([(torch.autograd, "backward", told_backward), (torch.autograd, "grad", told_grad)]):
        yield
