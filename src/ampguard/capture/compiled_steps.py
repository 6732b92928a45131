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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard.capture.compiled_functions import CompiledFunction
from ampguard.capture.reached import modules_reached, of_kind
from ampguard.capture.record import Ref, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.untaped import without_tape


class LeftError(BaseException):
    """A replay leaves a training step here; `losses` is what was about to be differentiated."""

    def __init__(self, losses: Sequence[Tensor]) -> None:
        super().__init__()
        self.losses = losses


class CompiledStep(CompiledFunction):
    """A compiled training step in the record, up to the `turn`-th time that it differentiates."""

    def __init__(
        self, compiled: Callable[..., Any], function: Any, reached: Mapping[str, nn.Module], turn: int
    ) -> None:
        super().__init__(compiled, function, reached)
        self._turn = turn
        self._later: CompiledStep | None = None

    def following(self) -> CompiledStep:
        """The same step, up to the next time."""
        if self._later is None:
            object.__setattr__(
                self,
                "_later",
                CompiledStep(self._compiled, self._function, dict(self.named_children()), self._turn + 1),
            )
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


@contextlib.contextmanager
def left_at(turn: int) -> Iterator[None]:
    """What is differentiated for the `turn`-th time raises `LeftError`; what was before leaves no gradients."""
    turns = 0
    before_scaling: dict[int, tuple[Tensor, Tensor]] = {}
    multiply, differentiate = torch.amp.GradScaler.scale, torch.autograd.grad

    def leave(tensors: Any) -> None:
        nonlocal turns
        turns += 1
        if turns == turn:
            raise LeftError(with_unscaled(tensors, before_scaling.get))

    def scale(scaler: Any, loss: Any) -> Any:
        scaled = multiply(scaler, loss)
        if isinstance(scaled, Tensor) and scaled is not loss:
            before_scaling[id(scaled)] = (scaled, loss)
        return scaled

    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not stays_in_graph(args, kwargs):
            leave(outputs)
        return differentiate(outputs, *args, **kwargs)

    calls = [
        (torch.autograd, "backward", lambda tensors, *args, **kwargs: leave(tensors)),
        (torch.autograd, "grad", grad),
    ]
    with replaced([*calls, (torch.amp.GradScaler, "scale", scale)]):
        yield


@contextlib.contextmanager
def nothing_updated() -> Iterator[None]:
    """Optimizers, scalers and schedulers stay as they are: an earlier turn's update has been made."""
    kinds = [(kind, "step") for kind in subclasses_of(Optimizer) if "step" in vars(kind)]
    kinds += [(torch.amp.GradScaler, name) for name in ("step", "update", "unscale_")]
    kinds += [(kind, "step") for kind in subclasses_of(torch.optim.lr_scheduler.LRScheduler) if "step" in vars(kind)]
    with replaced([(kind, name, lambda *args, **kwargs: None) for kind, name in kinds]):
        yield


@contextlib.contextmanager
def gradients_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """What is done to these gradients is done to copies."""
    kept = [(p, p.grad) for p in {id(p): p for p in parameters}.values() if p.is_leaf]
    try:
        for parameter, gradient in kept:
            if gradient is not None:
                parameter.grad = gradient.detach().clone()
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def replaced(attributes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes that stand for something else for as long."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in attributes]
    try:
        for owner, name, value in attributes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def subclasses_of(kind: type[Any]) -> list[type[Any]]:
    """A class and all that are derived from it."""
    derived: list[type[Any]] = kind.__subclasses__()
    return [kind, *(inner for one in derived for inner in subclasses_of(one))]


def with_unscaled(tensors: Any, scaled_from: Callable[[int], tuple[Any, Tensor] | None]) -> list[Tensor]:
    """What is differentiated; and behind that, of each tensor that a scaler has multiplied, what it was before."""
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return losses + [known[1] for loss in losses if (known := scaled_from(id(loss))) is not None]


def stays_in_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `torch.autograd.grad`, given these after its outputs, makes gradients that are differentiated again."""
    return bool(args[3] if len(args) > 3 else kwargs.get("create_graph", False))


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
            index, made = log.claim_index(), self._recorder.attempts
            root = dataclasses.replace(
                self._root, index=index, module=module.following(), outputs=[], floating=[], updates_before=made
            )
            log.append(root)
        self._root = root
        for position, tensor in enumerate(with_unscaled(tensors, self._recorder.loss_of_scaled.get)):
            root.outputs.append(log.producers.define(tensor, Ref(root.index, position)))
            root.floating.append(tensor.is_floating_point())

    def end(self, output: Any) -> None:
        """The call has returned."""
        recorder = self._recorder
        if not self.has_differentiated:
            recorder.leave_root(self._first, output)
            return
        poisoned = recorder.context.after_call(self._first)
        if poisoned:
            recorder.judge.suspect_buffers(self._first, poisoned)


def recorded_step(
    recorder: FlightRecorder, function: Any, compiled: Callable[..., Any], hide: Callable[[], None]
) -> Callable[..., Any]:
    """A compiled function that differentiates, whose calls outside every module are recorded.

    `hide` keeps our own code from being compiled where compiled code stops at it.

    Dynamo puts back the dispatch state of its entry, the tape's with it: the tape stays off.
    """
    guarded = recorder.barrier.call
    known: dict[tuple[int, ...], CompiledStep] = {}

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledStep:
        modules = modules_reached(function, args, kwargs)
        key = tuple(map(id, modules.values()))
        if key not in known:
            known[key] = CompiledStep(compiled, function, modules, 1)
        return known[key]

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_nested = recorder.paused or torch.compiler.is_compiling() or recorder.tape.is_barred
        if is_nested or not recorder.active:
            return compiled(*args, **kwargs)
        guarded(hide)
        step = guarded(begin, args, kwargs) if torch.is_grad_enabled() else None
        root = guarded(recorder.enter_root, step, args, kwargs) if step is not None else None
        opened = _OpenStep(recorder, root) if root is not None else None
        with without_tape(recorder), telling(recorder, opened):
            output = compiled(*args, **kwargs)
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
        return recorder.active and not recorder.paused and not torch.compiler.is_compiling()

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
