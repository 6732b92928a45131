"""Sums and averages to which scaled gradients are added, and all that is made of them, as far as it is certain.

Stricter than the powers that norms are followed by: a number that was computed may have the scale in it, and what it is
multiplied by is followed no further. What a scaled gradient is added to carries the scale from there on, whatever it was:
a tensor of zeros, an average of earlier gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ampguard.capture.protocol.carried_over import CarriedOver
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.penalties import holds_scale
from ampguard.capture.protocol.powers import IN_PLACE, OVER, TIMES, UNDER, Held, Powers, Quantity
from ampguard.capture.record import Line
from ampguard.compat import version_of

SUMS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__", "maximum", "lerp_", "addcmul", "addcmul_"})
"""Operators that add to what was there before."""
SUMS_IN_PLACE = frozenset({"add_", "__iadd__", "lerp_", "addcmul_"})
PRODUCTS = frozenset({"addcmul", "addcmul_"})
"""Those that add the product of two operands."""
EXACT = 1e-9

Carried = tuple[float, OptimizerWatch]


@dataclass
class Sums(Powers):
    """The powers of one window, seen that way."""

    versions: dict[int, int] = field(default_factory=dict)
    """Of what is known, as it was written to last."""
    carried_over: CarriedOver = field(default_factory=CarriedOver)

    @classmethod
    def of_window(cls, powers: Powers) -> Sums:
        gradients = {key: dataclasses.replace(held) for key, held in powers.gradients.items()}
        return cls(
            powers.scale,
            gradients,
            powers.weights,
            read=powers.read,
            cancelled=powers.cancelled,
            is_scaled_loss=powers.is_scaled_loss,
        )

    def follow(self, name: str, args: tuple[Any, ...], result: Any, where: Callable[[], Line | None]) -> None:
        """The script has called an operator. `where`: finds its line."""
        target = args[0] if name in IN_PLACE or name in SUMS_IN_PLACE else result
        if isinstance(args[0], (list, tuple)) and name.endswith("_"):
            self._lose(args[0])
        if not isinstance(target, Tensor) or target.requires_grad or self.is_weight(target):
            return
        if self.carried_over.is_open:
            self.carried_over.follow(name, args, target, self._is_scaled, where)
        carried = self._carried(name, args)
        held = self.gradient(target)
        if held is not None:
            self._written(held, target, name, carried)
            return
        if carried is None:
            self.known.pop(id(target), None)
            return
        made_of = next((known for arg in args[:2] if (known := self.quantity(arg)) is not None and known.is_sum), None)
        self.note(target, *carried, made_of.where if made_of is not None else where(), made_of=args)
        self.known[id(target)].is_sum = name in SUMS or made_of is not None
        self.versions[id(target)] = version_of(target)

    def _is_scaled(self, value: Any) -> bool:
        carried = self.of(value)
        return carried is not None and carried[0] != 0

    def _carried(self, name: str, args: tuple[Any, ...]) -> Carried | None:
        if name in TIMES | OVER | UNDER and any(self._is_unclear(arg) for arg in args[:2]):
            return None
        return (self._added(name, args) if name in SUMS else None) or self.result(name, args)

    def _written(self, held: Held, target: Tensor, name: str, carried: Carried | None) -> None:
        """A gradient itself was changed in place."""
        if carried is not None and name in IN_PLACE:
            held.power = carried[0]
        elif carried is None:
            del self.gradients[target.data_ptr()]

    def _lose(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> None:
        """All of them were written to by one call."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.known.pop(id(tensor), None)
                self.gradients.pop(tensor.data_ptr(), None)

    def _is_unclear(self, value: Any) -> bool:
        if not isinstance(value, float) or self.of_number(value) or self.of_ratio(value) is not None:
            return False
        return not is_free_of(value, self.scale)

    def _added(self, name: str, args: tuple[Any, ...]) -> Carried | None:
        """Something that carries the scale was added to what is known of nothing, or to what carries as much."""
        parts = [self.of(part) for part in (args[1:3] if name in PRODUCTS else args[:2])]
        known = [part for part in parts if part is not None]
        if not known or (name in PRODUCTS and len(known) < 2):
            return None
        power = sum(part[0] for part in known) if name in PRODUCTS else known[0][0]
        is_alike = name in PRODUCTS or all(part[0] == power for part in known)
        return (power, known[0][1]) if power and is_alike else None

    def left(self) -> list[tuple[Tensor, Quantity]]:
        """What carries the scale and is held by somebody still, as it was made."""
        found = [(tensor, known) for known in self.known.values() if (tensor := known.ref()) is not None]
        found = [(t, known) for t, known in found if known.power and (t.numel() > 1 or known.is_reduced)]
        return [
            (t, known) for t, known in found if self.gradient(t) is None and version_of(t) == self.versions.get(id(t))
        ]


def is_free_of(number: Any, scale: float) -> bool:
    """Whether this factor is one that somebody has written down, and that was not divided by the scale.

    >>> is_free_of(-1e-3, 4096.0), is_free_of(1e-3 / 4096, 4096.0), is_free_of(0.0125731, 4096.0)
    (True, False, False)
    """
    if not isinstance(number, (int, float)) or not number:
        return False
    return not holds_scale(float(number), scale) and is_written(float(number))


def is_written(number: float) -> bool:
    """Whether somebody may have written it down, or the inverse of it.

    >>> is_written(0.9), is_written(1 / 60000), is_written(0.83641)
    (True, True, False)
    """
    return not number or any(abs(value / float(f"{value:.3g}") - 1.0) < EXACT for value in (number, 1.0 / number))
