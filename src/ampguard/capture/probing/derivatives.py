"""The probe of `backward` and of `torch.autograd.grad`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch

from ampguard import compat
from ampguard.capture import hooks
from ampguard.capture.backward_calls import each_of
from ampguard.capture.probing.probe import Probe


class DerivativeProbe(Probe):
    """Tells the recorder what is differentiated, and keeps the tape off it."""

    def install(self) -> None:
        self._watch_backward()

    def _watch_backward(self) -> None:
        recorder = self._recorder
        guarded, turns, lock = recorder.barrier.call, recorder.turns, recorder.turns.lock
        captures = recorder.captures

        def watch_backward(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                if recorder.paused or not recorder.active or compat.is_compiling():
                    if not recorder.active:  # a fault inside an operator could not take the tape off
                        with contextlib.suppress(Exception):
                            recorder.tape.leave()
                            captures.differentiates(tensors)
                    return original(tensors, *args, **kwargs)
                me = get_ident()
                if (me == turns.thread or guarded(turns.follows, tensors)) and lock.acquire(False):
                    try:
                        if me == turns.thread:
                            return followed(tensors, *args, **kwargs)
                    finally:
                        lock.release()
                return original(tensors, *args, **kwargs)

            def followed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                gradients = args[0] if args else kwargs.get("grad_tensors")
                call = guarded(recorder.before_backward, tensors, gradients)
                only = args[4] if len(args) > 4 else kwargs.get("inputs")
                if only is not None and isinstance(only, Iterator):
                    only = tuple(only)
                    args, kwargs = _with_inputs(only, 4, args, kwargs)
                if only is not None and call is not None:
                    call.only = frozenset(map(id, each_of(only)))
                recorder.paused = True
                try:
                    if recorder.live is not None and call is not None:
                        with recorder.live.watch(call):
                            return original(tensors, *args, **kwargs)
                    return original(tensors, *args, **kwargs)
                except Exception as error:
                    scaler = recorder.scaling.scaler if recorder.scaling.losses else None
                    guarded(recorder.gradients.raised, error, scaler)
                    raise
                finally:
                    recorder.paused = False
                    guarded(recorder.after_backward)

            return backward

        def watch_grad(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def grad(*args: Any, **kwargs: Any) -> Any:
                what = args[0] if args else kwargs.get("outputs")
                if recorder.paused or not recorder.active or compat.is_compiling():
                    if not recorder.active:
                        captures.differentiates(what)
                    return original(*args, **kwargs)
                if compat.in_functorch() or compat.is_of_transform(what):
                    return original(*args, **kwargs)  # of torch.func's: its operators are taped as they come
                me = get_ident()
                if (me == turns.thread or guarded(turns.follows, what)) and lock.acquire(False):
                    try:
                        if me == turns.thread:
                            return followed(*args, **kwargs)
                    finally:
                        lock.release()
                return original(*args, **kwargs)

            def followed(*args: Any, **kwargs: Any) -> Any:
                inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
                if type(inputs) not in (list, tuple) and isinstance(inputs, Iterator):
                    args, kwargs = _with_inputs(tuple(inputs), 1, args, kwargs)
                given = dict(
                    zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args, strict=False)
                )
                given |= kwargs
                ends = not given.get("create_graph", False)
                guarded(recorder.tape.leave)
                call = None
                if given.get("outputs") is not None:
                    what = (given["outputs"], given.get("grad_outputs"), given.get("inputs"), not ends)
                    call = guarded(recorder.before_backward, *what)
                recorder.paused = True
                try:
                    if recorder.live is not None and call is not None:
                        with recorder.live.watch(call):
                            returned = original(*args, **kwargs)
                    else:
                        returned = original(*args, **kwargs)
                    if call is not None:
                        guarded(recorder.backward_calls.returned, call, returned)
                    return returned
                finally:
                    recorder.paused = False
                    if ends:
                        guarded(recorder.after_backward)
                    guarded(recorder.resume_tape)

            return grad

        def off_tape(original: Callable[..., Any]) -> Callable[..., Any]:
            """The tape must be off the stack before PyTorch calls any function mode for `backward`."""

            @functools.wraps(original)
            def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
                if recorder.tape.is_on_stack and not recorder.paused:
                    try:  # noqa: SIM105 - a context manager is the dearer one here
                        recorder.tape.leave()
                    except Exception:
                        pass
                original(self, *args, **kwargs)

            return backward

        self._patches.replace(torch.Tensor, "backward", off_tape)
        self._patches.replace(torch.autograd, "backward", watch_backward)
        self._patches.replace(torch.autograd, "grad", watch_grad)
        self._patches.replace(torch.Tensor, "register_hook", hooks.watching(recorder, recorder.gradients.hooks))


def _with_inputs(
    inputs: tuple[Any, ...], position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with what an iterator (`net.parameters()`) gave: it can be read once, and is looked at before PyTorch does."""
    if len(args) > position:
        return (*args[:position], inputs, *args[position + 1 :]), kwargs
    return args, {**kwargs, "inputs": inputs}
