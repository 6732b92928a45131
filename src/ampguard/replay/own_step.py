"""The step of an optimizer that is not PyTorch's, run again on copies: which operator leaves the numbers, and where?

It has just made parameters non-finite from finite gradients. Its gradients are still there; its weights and its state
are those of after the step. Weights that are not finite are replaced by 1, a state that is not finite in places by 0;
plain counters are put back, and state that did not exist before the step is taken away again. What the step had added up
in its state (the statistics of a preconditioner) gets the gradients a second time, or next to nothing of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.frames import user_line
from ampguard.capture.protocol.own_steps import Arguments, Counters
from ampguard.capture.record import Line
from ampguard.capture.sampling.copies import Snapshot, parameters_of, take_snapshot
from ampguard.numerics import is_finite
from ampguard.replay.operators import facts_of, flat_scalars, flat_tensors
from ampguard.replay.sandbox import neutral_thread, quiet

LITTLE = 1e-3
"""Of the gradients, where a state is to be as the step has left it: a norm of them is a divisor still, and not 0."""

Edit = Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]


@dataclass(slots=True)
class BadOperator:
    """The first operator of the step whose result is not finite although its operands are.

    `zero_at`: the position of an operand that is 0 in places, as a divisor is. `lowest`: the lowest value of the first.
    `gives_nan`: else all that is bad in the result is infinite.
    """

    op: str
    name: str
    line: Line | None
    dtype: torch.dtype
    largest: float
    zero_at: int | None
    lowest: float
    gives_nan: bool


@dataclass(slots=True)
class SteppedAgain:
    """What the step came to: whether all copies are finite, and what went wrong first."""

    is_finite: bool
    first: BadOperator | None


class OwnStep:
    """One step of one optimizer, to be run as often as asked."""

    def __init__(self, optimizer: Optimizer, counters: Counters, arguments: Arguments, snapshot: Snapshot) -> None:
        self._optimizer = optimizer
        self._counters = counters
        self._arguments = arguments
        self._snapshot = snapshot
        self._share_of_gradients = 1.0

    def with_little_gradients(self) -> OwnStep:
        """The same step, in which what was added up in the state stays as the step has left it, nearly."""
        other = OwnStep(self._optimizer, self._counters, self._arguments, self._snapshot)
        other._share_of_gradients = LITTLE
        return other

    @staticmethod
    def of(optimizer: Optimizer, counters: Counters, arguments: Arguments) -> OwnStep | None:
        """None where the optimizer cannot be copied."""
        with compat.unseen():
            snapshot = take_snapshot([optimizer])
        return None if isinstance(snapshot, str) else OwnStep(optimizer, counters, arguments, snapshot)

    def again(
        self,
        edit: Edit | None = None,
        at: BadOperator | None = None,
        dtype: torch.dtype | None = None,
        gradient_factor: float = 1.0,
        state_dtype: torch.dtype | None = None,
    ) -> SteppedAgain | None:
        """Run it. `edit` changes the operands of the operator `at`, wherever its line runs it; `dtype`: that of weights,
        gradients and state (`state_dtype`: of the state alone).

        None where the step raises.
        """
        watching = _Watching(edit, at)
        with neutral_thread(), compat.unseen(), quiet():
            leaves, fresh = self._bound(dtype, gradient_factor, state_dtype or dtype)
            try:
                watching.begin()
                try:
                    compat.step_without_hooks(self._optimizer)(fresh, *self._arguments.args, **self._arguments.kwargs)
                finally:
                    watching.end()
            except Exception:
                return None
            return SteppedAgain(all(is_finite(p.detach()) for p in leaves), watching.first)

    def _bound(
        self, dtype: torch.dtype | None, gradient_factor: float, state_dtype: torch.dtype | None
    ) -> tuple[list[Tensor], Optimizer]:
        """A fresh optimizer on fresh parameters, as far as possible as they were before the step."""
        by_original, (fresh,) = self._snapshot.stand_ins()
        leaves = list(by_original.values())
        for original in parameters_of([self._optimizer]):
            leaf = by_original[id(original)]
            leaf.data = leaf.data.nan_to_num(1.0, 1.0, 1.0).to(dtype or leaf.dtype)
            if original.grad is not None:
                leaf.grad = original.grad.detach().clone().to(leaf.dtype) * (gradient_factor * self._share_of_gradients)
            self._put_back(fresh, original, leaf, state_dtype)
        vars(fresh).update(self._counters.attributes)
        return leaves, fresh

    def _put_back(self, fresh: Optimizer, original: Tensor, leaf: Tensor, dtype: torch.dtype | None) -> None:
        counted = self._counters.of_state(original)
        if counted is None:
            fresh.state.pop(leaf, None)
            return
        state = fresh.state[leaf]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                state[name] = (value if is_finite(value) else torch.zeros_like(value)).to(dtype or value.dtype)
        state.update(counted)


class _Watching(compat.DispatchMode):
    """Finds the first operator that makes a bad value of good ones, and changes the operands of one line's."""

    def __init__(self, edit: Edit | None, at: BadOperator | None) -> None:
        super().__init__()
        self.first: BadOperator | None = None
        self._edit = edit
        self._at = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = self._at
        if at is not None and self._edit is not None and str(func) == at.op:
            args = self._edit(func, args) if user_line(sys._getframe()) == at.line else args
        asks = self.first is None and not facts_of(func).is_uninitialised
        before = _looked_at(args, kwargs) if asks else None
        output = func(*args, **kwargs)
        if before is not None and not all(is_finite(t) for t in _results(func, args, output)):
            largest, zero_at, lowest = before
            line = user_line(sys._getframe())
            result = _results(func, args, output)[0]
            gives_nan = bool(result.isnan().any())
            name = facts_of(func).name
            self.first = BadOperator(str(func), name, line, result.dtype, largest, zero_at, lowest, gives_nan)
        return output


def _looked_at(args: Any, kwargs: dict[str, Any]) -> tuple[float, int | None, float] | None:
    """The largest magnitude among finite operands, which of them is 0 in places, and the lowest value of the first; None
    where one is not finite."""
    tensors = [t for t in flat_tensors(args, kwargs) if t.is_floating_point()]
    if not all(is_finite(t) for t in tensors):
        return None
    tensors = [t if compat.is_dense(t) else compat.stored_values(t) for t in tensors]
    sizes = [float(t.detach().abs().max()) for t in tensors if t.numel()]
    sizes += [abs(number) for number in flat_scalars(args, kwargs)]
    zero_at = next((i for i in reversed(range(len(args))) if _has_zero(args[i])), None)
    lowest = float(tensors[0].detach().min()) if tensors and tensors[0].numel() and not tensors[0].is_complex() else 0.0
    return max(sizes, default=0.0), zero_at, lowest


def _has_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and compat.is_dense(value) and bool((value == 0).any())
    if isinstance(value, (list, tuple)):
        return any(_has_zero(item) for item in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _results(func: Any, args: Any, output: Any) -> list[Tensor]:
    """The floating-point tensors that the operator returned or wrote to."""
    returned = output if isinstance(output, (tuple, list)) else (output,)
    tensors = [t for t in returned if isinstance(t, Tensor)]
    tensors = tensors or flat_tensors([args[i] for i in facts_of(func).writes if i < len(args)], {})
    return [t for t in tensors if t.is_floating_point()]
