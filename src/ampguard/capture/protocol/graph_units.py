"""Losses made of gradients that are still scaled: does such a loss carry the scale itself?

GradNorm takes gradients of each task's loss by `torch.autograd.grad(scaler.scale(loss), ...)`, and differentiates a distance
between their norms: whatever is linear in what carries the scale carries it as well. The units are followed from the loss
back through its graph: a product adds the powers of the scale, a norm keeps them, a sum has those of its parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.loss_scale import DeviceScale

MAX_NODES = 256
MAX_TAKEN = 512
KEEPS = frozenset(
    (
        *("Add", "Sub", "Sum", "Mean", "Neg", "Abs", "View", "UnsafeView", "Select", "Slice", "Stack", "Cat", "Unsqueeze"),
        *("Squeeze", "Expand", "T", "Transpose", "Permute", "Clone", "ToCopy", "Index", "Unbind", "Split", "Alias"),
        *("Norm", "LinalgVectorNorm", "Max", "Min", "Amax", "Amin", "ReshapeAlias"),
    )
)  # fmt: skip
PRODUCTS = {"Mul": 1.0, "Div": -1.0}
"""And with which sign the second operand's power counts."""
FACTORS = {"Sqrt": 0.5, "Reciprocal": -1.0, "Rsqrt": -0.5}


class TakenGradients:
    """What `torch.autograd.grad` has returned of scaled losses, until the next update."""

    def __init__(self) -> None:
        self._scale: DeviceScale | None = None
        self._nodes: dict[int, Any] = {}
        self._memory: dict[int, weakref.ref[Tensor]] = {}
        self._looked_at: tuple[weakref.ref[Tensor], DeviceScale | None] | None = None
        """The loss that was asked about last, and the answer: its graph may be gone by the next time."""

    @property
    def are_there(self) -> bool:
        return self._scale is not None

    def note(self, results: Iterable[Any], scale: DeviceScale) -> None:
        """They carry this scale."""
        if self._scale is not scale:
            self.forget()
        for result in results:
            if isinstance(result, Tensor) and len(self._nodes) + len(self._memory) < MAX_TAKEN:
                self._scale = scale
                if result.grad_fn is not None:
                    self._nodes[id(result.grad_fn)] = result.grad_fn
                else:
                    self._memory[compat.storage_key(result)] = weakref.ref(result)

    def forget(self) -> None:
        """The scale may have changed."""
        self._scale = self._looked_at = None
        self._nodes, self._memory = {}, {}

    def carried_by(self, loss: Any) -> DeviceScale | None:
        """The scale that this loss carries, because it is linear in them."""
        if self._scale is None or not isinstance(loss, Tensor) or loss.grad_fn is None:
            return None
        if self._looked_at is None or self._looked_at[0]() is not loss:
            with compat.unseen():
                answer = self._scale if self._power_of(loss.grad_fn, {}) == 1.0 else None
            self._looked_at = weakref.ref(loss), answer
        return self._looked_at[1]

    def _power_of(self, node: Any, known: dict[int, float | None]) -> float | None:
        """Of the scale, in what this node has computed; None where that is not known."""
        key = id(node)
        if key in self._nodes:
            return 1.0
        if key not in known:
            if len(known) >= MAX_NODES:
                return None
            known[key] = None  # (while its operands are looked at)
            known[key] = self._of_operands(node, known)
        return known[key]

    def _of_operands(self, node: Any, known: dict[int, float | None]) -> float | None:
        inner = [each for each, _ in node.next_functions]
        if not inner:
            return 0.0  # a leaf
        name = type(node).__name__.partition("Backward")[0]
        powers = [self._power_of(each, known) for each in inner if each is not None]
        if None in powers:
            return None
        if name in PRODUCTS:
            left, *right = self._with_constants(node, inner, known)
            return left + PRODUCTS[name] * sum(right)
        first = powers[0] if powers else 0.0
        if first is None or any(power != first for power in powers):
            return None  # a sum of what is scaled and of what is not
        if name in FACTORS:
            return first * FACTORS[name]
        if name == "Pow":
            exponent = compat.exponent_of(node)
            return first * exponent if exponent is not None else None
        return first if name in KEEPS or not first else None

    def _with_constants(self, node: Any, inner: list[Any], known: dict[int, float | None]) -> Iterator[float]:
        """The powers of a product's operands, those too that it is not differentiated for."""
        for each, name in zip(inner, ("self", "other"), strict=False):
            saved = compat.saved_by(node, name) if each is None else None
            yield self._of_constant(saved) if each is None else self._power_of(each, known) or 0.0

    def _of_constant(self, tensor: Tensor | None) -> float:
        if tensor is None:
            return 0.0
        taken = self._memory.get(compat.storage_key(tensor))
        if taken is not None and taken() is not None:
            return 1.0
        scale = float(self._scale) if self._scale is not None else 1.0
        number = float(tensor) if tensor.numel() == 1 and tensor.is_cpu else 0.0
        return next((power for power in (1.0, -1.0) if number == scale**power != 1.0), 0.0)
