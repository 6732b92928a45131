"""Training by `torch.func.grad`, `grad_and_value` and `jvp`: no `.backward()`, no `.grad`, and mostly no optimizer.

What runs inside such a transform cannot be recorded. Its loss and gradients are looked at as they come out: each
outermost call is a step where no optimizer is known, its loss goes into the history. Where a number is not finite the
same function is run once more, with the same random numbers, and differentiated by `torch.autograd.grad`, where every
operator can be followed. Under `vmap` that is done for the first member whose number is not finite; where it is finite
alone (it draws random numbers, its function refers to other batched tensors), only the loss is judged.

Where there is an optimizer and the loss has a graph, it may be part of a larger loss (MAML's inner step): what was seen
waits until that is differentiated, and is nothing then, or until an optimizer steps, which uses the gradients themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.recorder import FlightRecorder
from ampguard.numerics import is_finite
from ampguard.stderr import say

UNDER_VMAP = (
    "this run differentiates by torch.func under vmap, and what is not finite there does not come again when one member is "
    "run alone: it is told without its operator"
)


@dataclass(frozen=True, slots=True)
class _Bad:
    """A gradient or loss that is not finite. `call`: what can be run again, `is_of_many` for one member of a `vmap`."""

    call: tuple[Any, ...] | None
    loss: Tensor
    random: Tensor
    is_of_many: bool


class FunctionalTraining:
    """Wraps the one function that all of torch.func's gradients go through."""

    def __init__(self, recorder: FlightRecorder, guarded: Callable[..., Any]) -> None:
        self.calls = 0
        """Outermost gradients that were taken."""
        self._recorder = recorder
        self._guarded = guarded
        self._depth = 0
        self._has_said = False
        self._has_failed = False

    def watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, guarded = self._recorder, self._guarded

        @functools.wraps(original)
        def grad_and_value(func: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
            is_ours = self._depth == 0 and recorder.active and not recorder.paused
            if not is_ours or torch.compiler.is_compiling():
                return original(func, argnums, has_aux, args, kwargs)
            if recorder.ends_run:
                guarded(recorder.listener.on_forward)
            random = torch.get_rng_state()
            self._depth += 1
            try:
                result = original(func, argnums, has_aux, args, kwargs)
            finally:
                self._depth -= 1
            guarded(self._after, (func, argnums, has_aux, args, kwargs), result, random)
            return result

        return grad_and_value

    def watch_slope(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of `torch.func.jvp`: a loss and its slope along a direction, by which a loop may update its weights."""
        recorder, guarded = self._recorder, self._guarded

        @functools.wraps(original)
        def jvp_with_argnums(func: Any, primals: Any, tangents: Any, *args: Any, **kwargs: Any) -> Any:
            if compat.is_compiling():
                return original(func, primals, tangents, *args, **kwargs)
            is_ours = self._depth == 0 and recorder.active and not recorder.paused
            if not is_ours or compat.in_functorch() or not recorder.steps.counts_backwards:
                return original(func, primals, tangents, *args, **kwargs)
            if recorder.ends_run:
                guarded(recorder.listener.on_forward)
            random, calls = torch.get_rng_state(), self.calls
            result = original(func, primals, tangents, *args, **kwargs)
            if self.calls == calls and isinstance(primals, tuple):
                call: tuple[Any, ...] = (func, tuple(range(len(primals))), len(result) > 2, primals, {})
                guarded(self._after_slope, call, result, random)
            return result

        return jvp_with_argnums

    def _after_slope(self, call: tuple[Any, ...], result: Any, random: Tensor) -> None:
        """A slope was taken. It is that of a loss where it is a number, and no part of another loss."""
        loss, slope = result[:2]
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and isinstance(slope, Tensor)):
            return
        if loss.requires_grad or slope.requires_grad or not (loss.is_cpu and compat.has_values(loss)):
            return
        is_bad = not (is_finite(loss) and is_finite(slope))
        is_new = is_bad and not (self._has_failed and self._are_spoilt(call)) and not self._recorder.counting
        self._used(float(loss), _Bad(call, loss, random, is_of_many=False) if is_new else None)

    def _after(self, call: tuple[Any, ...], result: Any, random: Tensor) -> None:
        """A gradient was taken."""
        gradients, value = result
        recorder = self._recorder
        loss = compat.without_transforms(value[0] if call[2] else value)
        may_be_part = torch.is_grad_enabled() and loss.requires_grad and not recorder.steps.counts_backwards
        loss = loss.detach()
        with compat.unseen():
            leaves = [compat.without_transforms(g) for g in compat.tree_leaves(gradients) if isinstance(g, Tensor)]
            size = float(loss.double().mean()) if loss.is_cpu and compat.has_values(loss) else None
            is_bad = any(g.is_cpu and not is_finite(g.detach()) for g in (loss, *leaves))
        is_new = is_bad and not (self._has_failed and self._are_spoilt(call))
        bad = None
        if is_new and compat.in_functorch():
            bad = _Bad(_one_member(call, result) if not recorder.counting else None, loss, random, is_of_many=True)
        elif is_new and not recorder.counting:
            bad = _Bad(call, loss, random, is_of_many=False)
        if may_be_part:
            recorder.undecided.append(functools.partial(self._used, size, bad))
        else:
            self._used(size, bad)

    def _used(self, size: float | None, bad: _Bad | None) -> None:
        """A gradient is used as it is. `size`: the loss."""
        self.calls += 1
        recorder = self._recorder
        if size is not None:
            recorder.judge.losses.append(size)
        if bad is not None:
            self._has_failed = True
            if not bad.is_of_many and bad.call is not None:
                self._again(bad.call, bad.random)
                return
            with compat.outside_vmap():
                if bad.call is not None and self._comes_again(bad.call, bad.random):
                    return
                self._tell_without_operator(bad.loss)
        if recorder.steps.counts_backwards:
            recorder.backward_calls.place = None
            recorder.after_backward()

    def _tell_without_operator(self, loss: Tensor) -> None:
        if not self._has_said:
            self._has_said = True
            say(UNDER_VMAP)
        if not math.isfinite(float(loss.double().sum())):
            self._recorder.judge.judge_losses([loss])

    def _comes_again(self, call: tuple[Any, ...], random: Tensor) -> bool:
        """Whether one member alone is not finite. Its function may need what only lives under `vmap`, and raise."""
        if compat.in_functorch():
            return False  # this PyTorch cannot leave it
        try:
            return self._again(call, random)
        except Exception:  # the script's own code, run as it was not written for: no fault
            return False

    @staticmethod
    def _are_spoilt(call: tuple[Any, ...]) -> bool:
        """Whether the parameters are bad already: an update with the gradients of an earlier failure."""
        wanted = (call[1],) if isinstance(call[1], int) else tuple(call[1])
        held = [compat.without_transforms(t) for i in wanted for t in compat.tree_leaves(call[3][i]) if _is_on_cpu(t)]
        with compat.unseen():
            return any(t.is_floating_point() and not is_finite(t.detach()) for t in held)

    def _again(self, call: tuple[Any, ...], random: Tensor) -> bool:
        """Run the function as plain code and differentiate it: the recorder sees every operator, and judges.

        Returns whether what came out is not finite again.
        """
        func, argnums, has_aux, args, kwargs = call
        recorder = self._recorder
        recorder.judge.take_losses()
        wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        given = [compat.tree_map(_as_leaf, arg) if i in wanted else arg for i, arg in enumerate(args)]
        leaves = [t for i in wanted for t in compat.tree_leaves(given[i]) if isinstance(t, Tensor) and t.requires_grad]
        after, self._depth = torch.get_rng_state(), 1
        torch.set_rng_state(random)
        recorder.backward_calls.is_again = True
        try:
            recorder.resume_tape()
            with torch.enable_grad():
                value = func(*given, **kwargs)
                loss = value[0] if has_aux else value
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        finally:
            self._depth = 0
            recorder.backward_calls.is_again = False
            torch.set_rng_state(after)
        with compat.unseen():
            return any(not is_finite(t.detach()) for t in (loss, *gradients) if t is not None)


def _one_member(call: tuple[Any, ...], result: Any) -> tuple[Any, ...] | None:
    """The call for the first member alone whose loss or gradient is not finite; None where there is none."""
    func, argnums, has_aux, args, kwargs = call
    gradients, value = result
    results = [value[0] if has_aux else value, *compat.tree_leaves(gradients)]
    index = next((i for t in results if isinstance(t, Tensor) and (i := _bad_member(t)) is not None), None)
    if index is None:
        return None
    args, kwargs = compat.tree_map(lambda v: _member(v, index), (args, kwargs))
    return func, argnums, has_aux, args, kwargs


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cpu


def _bad_member(value: Tensor) -> int | None:
    """The first index of a batched tensor at which it is not finite."""
    dimension = compat.batch_dim(value)
    stacked = compat.without_transforms(value).detach()
    if dimension is None or not stacked.is_cpu or not stacked.is_floating_point():
        return None
    with compat.unseen(), compat.outside_vmap():
        bad = [i for i, one in enumerate(stacked.unbind(dimension)) if not is_finite(one)]
    return bad[0] if bad else None


def _member(value: Any, index: int) -> Any:
    """One member of a batched tensor; anything else as it is."""
    dimension = compat.batch_dim(value) if isinstance(value, Tensor) else None
    if dimension is None:
        return value
    with compat.unseen(), compat.outside_vmap():
        return compat.without_transforms(value).detach().select(dimension, index)


def _as_leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value
