"""By which scale was a loss multiplied before it was differentiated?

What `scaler.scale()` returned is remembered. A loss that was made from it (`scaler.scale(loss) / 4`, a sum of two) is
recognised by a short walk from its node in the autograd graph, through operators that are linear in their input.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.root_calls.trees import tensors_in

MAX_NODES = 96
LARGEST_WINDOW = 1024
WHOLE = 1e-6
"""How far a divisor may be from a whole number, as a share of it: it may be the inverse of a rounded factor."""
MAX_REMEMBERED = 64
_LINEAR = frozenset(
    {
        "Add",
        "Sub",
        "Neg",
        "Mul",
        "Div",
        "Sum",
        "Mean",
        "Stack",
        "Cat",
        "View",
        "Squeeze",
        "Unsqueeze",
        "Select",
        "ToCopy",
    }
    | {
        "Clone",
        "Expand",
        "ReshapeAlias",
        "Unbind",
        "Alias",
        "UnsafeView",
        "T",
        "Transpose",
        "Slice",
        "Index",
        "Permute",
    }
)


class DeviceScale:
    """A scaler's scale as it was between two updates. Read only when asked for, and kept before it changes."""

    __slots__ = ("_live", "_value", "watch")

    def __init__(self, scaler: Any, watch: Any) -> None:
        self.watch = watch
        self._live: Tensor | None = compat.loss_scale(scaler)
        self._value: float | Tensor | None = None

    def keep(self) -> None:
        """The scale is about to change."""
        if self._live is not None and self._value is None:
            self._value = self._live.item() if self._live.is_cpu else self._live.detach().clone()
            self._live = None

    @property
    def is_at_hand(self) -> bool:
        """Whether it can be read without waiting for a device."""
        return isinstance(self._value, float) or (self._live is not None and self._live.is_cpu)

    def __float__(self) -> float:
        value = self._value if self._value is not None else self._live
        if value is None:
            return math.nan
        number = float(value)
        if isinstance(value, Tensor) and not value.is_cpu:
            self._value = number  # a device is waited for once
        return number


class SquaredScale:
    """What a loss carries that was scaled and then scaled again."""

    __slots__ = ("once",)

    def __init__(self, once: DeviceScale) -> None:
        self.once = once

    @property
    def watch(self) -> Any:
        return self.once.watch

    @property
    def is_squared(self) -> bool:
        return True

    def __float__(self) -> float:
        return float(self.once) ** 2


@dataclass(slots=True)
class Scaled:
    """Something that a scaler has scaled."""

    result: weakref.ref[Tensor]
    node: Any
    scale: DeviceScale


class ScaledLosses:
    """Remembers what was scaled until it is differentiated."""

    def __init__(self) -> None:
        self._known: dict[int, Scaled] = {}
        self.of_several = False
        """The losses that were asked about last carry scales of several scalers: which gradient carries which is not known."""

    def note(self, result: Any, scale: DeviceScale) -> None:
        """`scaler.scale()` returned `result`."""
        for tensor in (result,) if type(result) is Tensor else tensors_in(result):
            if len(self._known) >= MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[id(tensor)] = Scaled(weakref.ref(tensor), tensor.grad_fn, scale)

    def nodes(self) -> set[int]:
        """The nodes of what was scaled, by their ids."""
        return {id(known.node) for known in self._known.values() if known.node is not None}

    def forget_dead(self) -> None:
        """An iteration is over: a loss that nobody holds any more will not be differentiated again."""
        if self._known:
            self._known = {key: known for key, known in self._known.items() if known.result() is not None}

    def holds_two(self, loss: Tensor, fresh: Tensor | None) -> bool:
        """Whether what a scaler has scaled was scaled again by it, before this loss was made of it."""
        scaled = self.nodes() | ({id(fresh.grad_fn)} if fresh is not None else set())
        stack, seen = [(loss.grad_fn, 0)], dict[int, Any]()
        while stack and len(seen) < MAX_NODES:
            node, times = stack.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            times += id(node) in scaled
            if times == 2:
                return True
            if is_linear(node):
                stack += [(inner, times) for inner, _ in node.next_functions]
        return False

    def scale_of_one(self, loss: Any) -> DeviceScale | None:
        """The common case: what `scaler.scale()` returned is differentiated as it is."""
        known = self._known.get(id(loss))
        return known.scale if known is not None and known.result() is loss else None

    def scale_of(
        self, losses: Iterable[Tensor], gradients: Iterable[Any], current: Iterable[DeviceScale]
    ) -> tuple[DeviceScale | None, bool]:
        """The scale that the losses (or the gradients passed with them) carry, and whether a part carries none."""
        found: DeviceScale | None = None
        is_plain = self.of_several = False
        for loss, gradient in zip(losses, gradients, strict=False):
            scale, plain = self._of_one(loss, gradient, current)
            self._join(found, scale)
            found = scale or found
            is_plain = is_plain or plain
        return found, is_plain

    def _of_one(self, loss: Tensor, gradient: Any, current: Iterable[DeviceScale]) -> tuple[DeviceScale | None, bool]:
        known = self._known.get(id(loss))
        if known is not None and known.result() is loss:
            return known.scale, False
        if isinstance(gradient, Tensor):
            known = self._known.get(id(gradient))
            if known is not None and known.result() is gradient:
                return known.scale, False
            by_hand = _equal_scale(gradient, current)
            if by_hand is not None:
                return by_hand, False
        with compat.unseen():
            return self._walk(loss.grad_fn, tuple(current))

    def _join(self, one: DeviceScale | None, other: DeviceScale | None) -> None:
        if one is not None and other is not None and one.watch is not other.watch:
            self.of_several = True

    def _walk(self, start: Any, current: tuple[DeviceScale, ...]) -> tuple[DeviceScale | None, bool]:
        nodes = {id(known.node): known.scale for known in self._known.values() if known.node is not None}
        found: DeviceScale | None = None
        is_plain = False
        stack, seen = [start], dict[int, Any]()  # (they are held: another node gets a dropped one's id)
        while stack:
            node = stack.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            scale = nodes.get(id(node)) or _by_hand(node, current)
            if scale is not None:
                self._join(found, scale)
                found = scale
            elif len(seen) > MAX_NODES or not is_linear(node):
                is_plain = True
            elif not _is_times_zero(node):
                stack += [inner for inner, _ in node.next_functions]
        return found, is_plain


def goes_on(gradient: Any) -> bool:
    """Whether a gradient that was given for a loss is that of an earlier backward pass, which goes on here.

    The graph was cut in two (cached representations, stages of a pipeline). Ones are what a vector of losses is given.
    """
    if not isinstance(gradient, Tensor) or gradient.numel() < 2:
        return False
    if not gradient.is_cpu or gradient.layout is not torch.strided:
        return True
    with torch.no_grad(), compat.unseen():
        return bool((gradient != gradient.flatten()[0]).any())


def constant_factors(loss: Tensor) -> list[float]:
    """The numbers by which a loss was multiplied as a whole before it is differentiated: `(loss / 4) * 4096.0`."""
    found: list[float] = []
    with compat.unseen():
        node = loss.grad_fn
        for _ in range(MAX_NODES):
            if node is None or type(node).__name__ not in SCALING:
                break
            found += [float(factor) for factor in _factors(node) if factor.numel() == 1 and factor.is_cpu]
            node = next((inner for inner, _ in node.next_functions if inner is not None), None)
    return found


def constants_around(loss: Tensor, factor: float) -> float:
    """What a loss was multiplied by from one of its constant factors on: 1024 for `loss / 8 * 4096.0 / 4`, of 4096."""
    whole = 1.0
    with compat.unseen():
        node = loss.grad_fn
        for _ in range(MAX_NODES):
            if node is None or type(node).__name__ not in SCALING:
                break
            numbers = [float(f) for f in _factors(node) if f.numel() == 1 and f.is_cpu]
            divisor = compat.saved_by(node, "other") if type(node).__name__ == "DivBackward0" else None
            if divisor is not None and divisor.numel() == 1 and divisor.is_cpu and divisor.item():
                numbers = [1.0 / float(divisor)]
            whole *= math.prod(numbers)
            if factor in numbers:
                break
            node = next((inner for inner, _ in node.next_functions if inner is not None), None)
    return whole


def window_of(loss: Tensor) -> int | None:
    """The whole number by which a loss was divided as a whole: in how many parts a window of accumulation is."""
    with compat.unseen():
        node = loss.grad_fn
        for _ in range(MAX_NODES):
            if node is None or type(node).__name__ not in SCALING:
                break
            is_division = type(node).__name__ == "DivBackward0"
            numbers = [compat.saved_by(node, "other")] if is_division else _factors(node)
            for found in [n for n in numbers if n is not None and n.numel() == 1 and n.is_cpu and n.item()]:
                divisor = float(found) if is_division else 1.0 / float(found)
                if 1.5 < divisor < LARGEST_WINDOW and abs(divisor / round(divisor) - 1.0) < WHOLE:
                    return round(divisor)
            node = next((inner for inner, _ in node.next_functions if inner is not None), None)
    return None


SCALING = ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0")


def is_linear(node: Any) -> bool:
    """Whether an operator of the graph hands on a scale that its input carries."""
    name: str = type(node).__name__
    return name.partition("Backward")[0] in _LINEAR and any(inner is not None for inner, _ in node.next_functions)


def _by_hand(node: Any, current: tuple[DeviceScale, ...]) -> DeviceScale | None:
    """`loss * scaler.get_scale()`: a multiplication by exactly the present scale."""
    for factor in _factors(node):
        scale = _equal_scale(factor, current)
        if scale is not None:
            return scale
    return None


def _is_times_zero(node: Any) -> bool:
    """`0.0 * unused.sum()`: part of the graph, nothing of the gradient."""
    return any(factor.numel() == 1 and factor.is_cpu and factor.item() == 0 for factor in _factors(node))


def _factors(node: Any) -> list[Tensor]:
    if type(node).__name__ != "MulBackward0":
        return []
    operands = zip(node.next_functions, ("self", "other"), strict=False)
    saved = [compat.saved_by(node, name) for (inner, _), name in operands if inner is None]
    return [factor for factor in saved if factor is not None]


def _equal_scale(factor: Tensor, current: Iterable[DeviceScale]) -> DeviceScale | None:
    if factor.numel() != 1 or not factor.is_floating_point() or not factor.is_cpu:
        return None
    with torch.no_grad():
        value = float(factor)
    return next((scale for scale in current if float(scale) == value and value != 1.0), None)
