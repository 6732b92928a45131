"""One parameter's update run again on copies: in its own precision, in float32, with another epsilon.

The optimizer's own `step` runs on a stand-in that holds copies of some elements of the parameter, of its gradient and
of its state. The real optimizer, its state and the random streams are not touched.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.numerics import is_finite
from ampguard.replay.operators import facts_of, flat_tensors


@dataclass(frozen=True, slots=True)
class Update:
    """What the update gave: the new values beside the old ones, and the first operator whose result was not finite."""

    before: Tensor
    after: Tensor
    first_bad_op: str | None
    state: tuple[Tensor, ...] = ()
    """The optimizer's own tensors of that size, after it."""

    @property
    def is_finite(self) -> bool:
        return is_finite(self.after)

    @property
    def moved(self) -> Tensor:
        return self.after != self.before


class _FirstBad(compat.DispatchMode):
    """Remembers the first operator whose result, or what it wrote to, is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.op: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.op is None:
            results = output if isinstance(output, (tuple, list)) else (output,)
            tensors = [t for t in results if isinstance(t, Tensor)] or flat_tensors(
                [args[i] for i in facts_of(func).writes if i < len(args)], {}
            )
            if any(not is_finite(t) for t in tensors):
                self.op = str(func)
        return output


def update_alone(
    optimizer: Optimizer,
    parameter: Tensor,
    elements: Tensor,
    dtype: torch.dtype | None = None,
    gradient_of: float | None = None,
    **changes: Any,
) -> Update | None:
    """Update these elements of the parameter (flat positions) in `dtype`, with options of the group changed.

    `gradient_of`: what each element's gradient is instead of its own.

    None where the optimizer does not work element by element, or refuses.
    """
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        return None
    dtype = dtype or parameter.dtype
    values = _picked(parameter, elements, dtype).nan_to_num(1.0, 1.0, 1.0)
    stand_in = nn.Parameter(values.clone())
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    stand_in.grad = _picked(gradient, elements, dtype)
    if gradient_of is not None:
        stand_in.grad.fill_(gradient_of)
    state = {
        key: _copied(value, parameter, elements, dtype) for key, value in optimizer.state.get(parameter, {}).items()
    }
    alone = object.__new__(type(optimizer))
    alone.__dict__ = dict(optimizer.__dict__)
    alone.param_groups = [{**group, **changes, "params": [stand_in]}]
    alone.state = defaultdict(dict, {stand_in: state})
    watching = _FirstBad()
    try:
        with torch.random.fork_rng(devices=[]), compat.unseen(), _on(watching):
            compat.step_without_hooks(optimizer)(alone)
    except Exception:  # an optimizer that asks for more than elements: nothing can be said
        return None
    after = tuple(value for value in alone.state[stand_in].values() if _is_like(value, values))
    return Update(values, stand_in.detach(), watching.op, after)


def _is_like(value: Any, values: Tensor) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape == values.shape and value.is_floating_point()


@contextlib.contextmanager
def _on(mode: compat.DispatchMode) -> Any:
    mode.begin()
    try:
        yield
    finally:
        mode.end()


def _picked(tensor: Tensor, elements: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().reshape(-1)[elements].to(dtype)


def _copied(value: Any, parameter: Tensor, elements: Tensor, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape or not value.dim():
        return value.detach().clone()
    return _picked(value, elements, dtype if value.dtype == parameter.dtype else value.dtype)
