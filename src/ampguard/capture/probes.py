"""Where the guard listens in: PyTorch's own functions, wrapped while it is on and put back after it.

Each probe installs, observes, undoes. After `undo()` every patched attribute is the original object again, unless
somebody else has replaced it since: then theirs stays, and ours, still underneath, only passes calls on.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from ampguard import compat
from ampguard.capture import hooks
from ampguard.capture.functions import aliases_of, checkpointed
from ampguard.capture.recorder import FlightRecorder
from ampguard.compat import tracing_state


class Patches:
    """Replaced attributes, and what stood there."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in place of `owner.name`."""
        original = owner.__dict__[name] if name in vars(owner) else getattr(owner, name)
        replacement = make(original)
        setattr(owner, name, replacement)
        self._done.append((owner, name, original, replacement))

    def undo(self) -> None:
        for owner, name, original, replacement in reversed(self._done):
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
        self._done.clear()


class Probes:
    """All probes of one recorder."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._handles: list[Any] = []
        self._scaling: list[Any] = []
        """The scalers whose `step` is running."""

    def install(self) -> None:
        """Begin to observe."""
        self._watch_modules()
        self._watch_backward()
        self._watch_dispatch()
        self._watch_custom_functions()
        self._watch_functional_calls()
        self._watch_scaler()
        self._watch_optimizers()
        self._watch_loaders()
        self._watch_mode_switches()
        self._recorder.active = True
        os.register_at_fork(after_in_child=self._in_child)

    def undo(self) -> None:
        """Put back every patched attribute and take the tape off the stack."""
        self._recorder.active = False
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with contextlib.suppress(Exception):  # not through the barrier: after a fault nothing comes through it
            self._recorder.tape.leave()

    def _in_child(self) -> None:
        """A forked process (a DataLoader worker) is not the guarded one."""
        self._recorder.active = False
        self._recorder.tape.abandon()

    def _watch_modules(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            def root_call(module: nn.Module, args: Any, kwargs: Any) -> Any:
                if tracing_state() is not None:
                    guarded(recorder.tape.leave)
                    return original(module, *args, **kwargs)
                root = guarded(recorder.enter_root, module, args, kwargs)
                recorder.paused = True
                try:
                    live = recorder.live if root is not None else None
                    if live is not None and root is not None:
                        with live.watch(root):
                            output = original(module, *args, **kwargs)
                    else:
                        output = original(module, *args, **kwargs)
                except BaseException as error:
                    recorder.paused = False
                    if root is not None:
                        guarded(recorder.root_raised, root, error)
                    raise
                finally:
                    recorder.paused = False
                if root is not None:
                    guarded(recorder.leave_root, root, output)
                elif recorder.counting and not torch.is_grad_enabled():
                    guarded(recorder.judge.count_output, output)
                return output

            def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
                if recorder.paused or torch.compiler.is_compiling() or not recorder.active:
                    return original(self, *args, **kwargs)
                return root_call(self, args, kwargs)

            return (
                compat.call_while_paused(recorder, __call__)
                if compat.only_forwards_to_call_impl(original)
                else __call__
            )

        self._patches.replace(nn.Module, "__call__", watch)

    def _watch_backward(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch_backward(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                if recorder.paused or not recorder.active or torch.compiler.is_compiling():
                    if not recorder.active:  # a fault inside an operator could not take the tape off
                        with contextlib.suppress(Exception):
                            recorder.tape.leave()
                    return original(tensors, *args, **kwargs)
                gradients = args[0] if args else kwargs.get("grad_tensors")
                call = guarded(recorder.before_backward, tensors, gradients)
                only = args[4] if len(args) > 4 else kwargs.get("inputs")
                if only is not None and call is not None:
                    call.only = frozenset(map(id, only if isinstance(only, (list, tuple)) else (only,)))
                recorder.paused = True
                try:
                    if recorder.live is not None and call is not None:
                        with recorder.live.watch(call):
                            return original(tensors, *args, **kwargs)
                    return original(tensors, *args, **kwargs)
                except Exception as error:
                    scaler = recorder.scaler if recorder.loss_of_scaled else None
                    guarded(recorder.gradients.raised, error, scaler)
                    raise
                finally:
                    recorder.paused = False
                    guarded(recorder.after_backward)

            return backward

        def watch_grad(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def grad(*args: Any, **kwargs: Any) -> Any:
                if recorder.paused or not recorder.active or torch.compiler.is_compiling():
                    return original(*args, **kwargs)
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
                        guarded(recorder.returned_gradients, call, returned)
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
                    with contextlib.suppress(Exception):
                        recorder.tape.leave()
                original(self, *args, **kwargs)

            return backward

        self._patches.replace(torch.Tensor, "backward", off_tape)
        self._patches.replace(torch.autograd, "backward", watch_backward)
        self._patches.replace(torch.autograd, "grad", watch_grad)
        self._patches.replace(torch.Tensor, "register_hook", hooks.watching(recorder, recorder.gradients.hooks))

    def _watch_dispatch(self) -> None:
        """PyTorch's way to a function mode takes three times as long as most functions that it is asked for."""
        calls = self._recorder.tape.calls
        for module in (torch.nn.functional, torch.functional):
            if hasattr(module, "handle_torch_function"):
                self._patches.replace(module, "handle_torch_function", calls.dispatcher)

    def _watch_custom_functions(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Any) -> Any:
            inner = original.__func__

            def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
                is_ours = recorder.active and not recorder.paused and recorder.tape.is_taping
                if cls is CheckpointFunction and recorder.active and not recorder.paused:
                    return checkpointed(recorder.log, guarded, inner, cls, *args, **kwargs)
                if not is_ours or cls.__module__.startswith("torch.") or compat.is_tracing():
                    return inner(cls, *args, **kwargs)
                call = guarded(recorder.enter_function, cls, args, kwargs)
                if call is None:
                    return inner(cls, *args, **kwargs)
                recorder.paused = True
                try:
                    if recorder.live is not None:
                        guarded(recorder.tape.leave)
                        with recorder.live.watch(call):
                            output = inner(cls, *args, **kwargs)
                    else:
                        output = inner(cls, *args, **kwargs)
                finally:
                    recorder.paused = False
                guarded(recorder.leave_function, call, output)
                guarded(recorder.resume_tape)
                return output

            return classmethod(functools.wraps(inner)(apply))

        if isinstance(torch.autograd.Function.__dict__.get("apply"), classmethod):
            known = aliases_of(torch.autograd.Function.__dict__["apply"].__func__)
            self._patches.replace(torch.autograd.Function, "apply", watch)
            for module, name in known:
                self._patches.replace(module, name, lambda bound: bound.__self__.apply)

    def _watch_functional_calls(self) -> None:
        """`torch.func.functional_call` runs a module on other parameters than its own."""
        recorder = self._recorder

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def functional_call(module: nn.Module, parameters_and_buffers: Any, *args: Any, **kwargs: Any) -> Any:
                before, recorder.swapped_state = recorder.swapped_state, (module, parameters_and_buffers)
                try:
                    return original(module, parameters_and_buffers, *args, **kwargs)
                finally:
                    recorder.swapped_state = before

            return functional_call

        place = compat.functional_call()
        if place is not None:
            self._patches.replace(*place, watch)

    def _watch_scaler(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call
        scaling = self._scaling

        def watch_scale(original: Callable[..., Any]) -> Callable[..., Any]:
            is_torchs = getattr(original, "__module__", "") == torch.amp.grad_scaler.__name__

            @functools.wraps(original)
            def scale(self: Any, outputs: Any) -> Any:
                if not recorder.active:
                    return original(self, outputs)

                def note(scaled: Any) -> None:
                    guarded(recorder.note_scaled, outputs, scaled, self)

                if is_torchs and recorder.tape.is_on_stack:
                    return recorder.tape.scale(original, self, outputs, note)
                scaled = original(self, outputs)
                note(scaled)
                return scaled

            return scale

        def watch_step(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                if not recorder.active:
                    return original(scaler, optimizer, *args, **kwargs)
                before = recorder.attempts
                if scaler.is_enabled():
                    guarded(recorder.before_update, optimizer, True)
                    if recorder.gradients.suspects_underflow:
                        guarded(self._look_for_underflow, scaler, optimizer)
                scaling.append(scaler)
                try:
                    result = original(scaler, optimizer, *args, **kwargs)
                finally:
                    scaling.pop()
                if recorder.attempts == before:  # skipped: the optimizer's own hooks did not run
                    guarded(self._held_off, scaler, optimizer)
                    guarded(recorder.after_update, optimizer, True)
                return result

            return step

        self._patches.replace(torch.amp.GradScaler, "scale", watch_scale)
        self._patches.replace(torch.amp.GradScaler, "update", self._bookkeeping(is_last=False))
        self._patches.replace(torch.amp.GradScaler, "step", watch_step)

    def _look_for_underflow(self, scaler: Any, optimizer: Optimizer) -> None:
        if not self._recorder.counting:
            self._recorder.gradients.look_for_underflow(optimizer, float(scaler.get_scale()))

    def _held_off(self, scaler: Any, optimizer: Optimizer) -> None:
        if scaler.is_enabled() and not self._recorder.counting:
            self._recorder.gradients.held_off(optimizer, float(scaler.get_scale()))

    def _watch_optimizers(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call
        scaling = self._scaling

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not recorder.active:
                return
            closure = kwargs.get("closure") if len(args) < 2 else args[1]
            scaler = scaling[-1] if scaling and scaling[-1].is_enabled() else None
            if scaler is None:
                guarded(recorder.before_update, optimizer, False, closure is not None)
            elif compat.is_told_to_skip(optimizer):  # a fused one skips by itself
                guarded(self._held_off, scaler, optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if recorder.active:
                guarded(recorder.after_update, optimizer)
                if not scaling:
                    guarded(recorder.bookkeeping_done, False)

        def watch_init(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                original(self, *args, **kwargs)
                if recorder.active:
                    guarded(recorder.steps.created, self)

            return __init__

        add_before, add_after = compat.optimizer_step_hooks()
        self._handles += [add_before(before), add_after(after)]
        self._patches.replace(Optimizer, "__init__", watch_init)
        self._patches.replace(Optimizer, "zero_grad", self._bookkeeping(is_last=True))
        self._patches.replace(nn.Module, "zero_grad", self._clearing())

    def _bookkeeping(self, is_last: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Calls between two steps that are not worth taping; what follows them is preprocessing."""
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not recorder.between_steps or not recorder.active or recorder.paused:
                    if is_last and recorder.active and not recorder.paused:
                        guarded(recorder.gradients_cleared, id(self))
                    if recorder.tape.is_of_calls:
                        return recorder.tape.pass_over(original, self, *args, **kwargs)
                    return original(self, *args, **kwargs)
                if recorder.has_no_prefix and not recorder.tape.is_on_stack:
                    return original(self, *args, **kwargs)
                guarded(recorder.tape.leave)
                result = original(self, *args, **kwargs)
                guarded(recorder.bookkeeping_done, is_last)
                return result

            return call

        return watch

    def _clearing(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        recorder = self._recorder

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
                if recorder.active and not recorder.paused:
                    recorder.barrier.call(recorder.gradients_cleared, None)
                if recorder.tape.is_of_calls and not recorder.paused:
                    return recorder.tape.pass_over(original, self, *args, **kwargs)
                return original(self, *args, **kwargs)

            return zero_grad

        return watch

    def _watch_loaders(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __next__(self: Any) -> Any:  # noqa: N807
                if recorder.paused or not recorder.active:
                    return original(self)
                guarded(recorder.tape.leave)
                recorder.paused = True
                try:
                    batch = original(self)
                finally:
                    recorder.paused = False
                guarded(recorder.note_batch, batch)
                return batch

            return __next__

        for iterator in compat.loader_iterators():
            self._patches.replace(iterator, "__next__", watch)

    def _watch_mode_switches(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def train(self: nn.Module, mode: bool = True) -> Any:
                if recorder.judge.suspects and recorder.active and not recorder.paused and self.training != mode:
                    guarded(recorder.judge.settle_all)
                return original(self, mode)

            return train

        self._patches.replace(nn.Module, "train", watch)

        def off_tape(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def cross(self: Any, *args: Any) -> Any:
                if recorder.active and not recorder.paused:
                    guarded(recorder.tape.leave)
                return original(self, *args)

            return cross

        for edge in ("__enter__", "__exit__"):
            self._patches.replace(torch.inference_mode, edge, off_tape)
