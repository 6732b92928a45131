"""Tensors that are made of gradients which are still scaled, and which power of the loss scale S each of them carries.

A gradient carries S, its norm S, the square of it S^2, a ratio of two norms S^0. The rules are those of physical units;
what an operator does that has no rule here is not followed any further.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.record import Line


@dataclass(slots=True, eq=False)
class Quantity:
    """A tensor that was computed from scaled gradients. `where`: the script's line that did."""

    ref: weakref.ref[Tensor]
    power: float
    watch: OptimizerWatch
    where: Line | None
    is_used: bool = False
    """Something was computed from it, or compared with it."""
    is_limited: bool = False
    """It came out of a limit that carries no scale: `(max_norm / norm).clamp(max=1.0)`."""
    is_reduced: bool = False
    """It is one number made of several. (A copy of a gradient of one element is no norm.)"""
    is_sum: bool = False
    """It was added to something else, or is made of such a sum."""


@dataclass(slots=True)
class Held:
    """All of a parameter's gradient, by its memory."""

    numel: int
    watch: OptimizerWatch
    power: float = 1.0


KEEPS = frozenset(
    (
        *(
            "norm",
            "vector_norm",
            "_foreach_norm",
            "abs",
            "mean",
            "sum",
            "max",
            "min",
            "amax",
            "std",
            "clamp",
            "clamp_min",
        ),
        *(
            "clamp_max",
            "detach",
            "clone",
            "float",
            "double",
            "to",
            "type_as",
            "expand_as",
            "view_as",
            "cpu",
            "flatten",
            "view",
            "reshape",
            "ravel",
            "squeeze",
        ),
        *("stack", "cat", "maximum", "minimum", "add", "sub", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__"),
        *("add_", "__neg__"),
    )
)
FACTORS = {"square": 2.0, "sqrt": 0.5, "reciprocal": -1.0, "rsqrt": -0.5, "var": 2.0, "sign": 0.0}
POWERS = frozenset({"pow", "__pow__", "pow_"})
TIMES = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__", "_foreach_mul_", "_foreach_mul"})
OVER = frozenset({"div", "__truediv__", "div_", "__itruediv__", "true_divide", "_foreach_div_", "_foreach_div"})
UNDER = frozenset({"__rtruediv__", "__rdiv__"})
IN_PLACE = frozenset({"mul_", "__imul__", "div_", "__itruediv__", "_foreach_mul_", "_foreach_div_"})
BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "sum", "norm"})
"""Their second argument is a limit or a dimension."""
LIKE = frozenset({"to", "type_as", "expand_as", "view_as"})
"""Of their second argument they take the precision, the device or the shape, and no number."""
FOREACH = frozenset(
    {"_foreach_norm", "_foreach_mul_", "_foreach_div_", "_foreach_mul", "_foreach_div", "_foreach_add_"}
)
LIMITS = {
    **dict.fromkeys(("clamp_max", "minimum", "min"), -1),
    **dict.fromkeys(("clamp_min", "maximum", "max"), 1),
    "clamp": 0,
}
"""Which power they change: those that bound from above (-1) a factor over a norm, from below (1) a norm."""
SMALLEST_LIMIT = 1e-3
"""A smaller one only keeps a divisor from being 0."""
DRAWS_IN_PLACE = frozenset({"normal_", "uniform_"})
DRAWS = frozenset({"randn_like", "rand_like", "randn", "rand", "normal"}) | DRAWS_IN_PLACE
"""Random numbers of a size of their own, whatever they are shaped like."""
DIFFERENCES = frozenset({"sub", "__sub__", "__rsub__"})
COMPARES = frozenset({"__gt__", "__lt__", "__ge__", "__le__", "gt", "lt", "ge", "le"})
COUNTS = frozenset({"histc"})
"""Their limits are those of what they count, where they are given."""
ADDED_PRODUCTS = {"addcmul_": "mul", "addcmul": "mul", "addcdiv_": "div", "addcdiv": "div"}
"""What they add: this, of their second and third operand."""
READS = frozenset({"item", "tolist", "__float__", "__format__", "__repr__", "__str__", "numpy", "__array__"})
MAX_READ = 64
ROUND = 1e-7
SHOWS = frozenset({"__format__", "__repr__", "__str__"})


@dataclass
class Powers:
    """What is known in one window between a backward pass and the next call of the protocol. `scale`: S."""

    scale: float
    gradients: dict[int, Held] = field(default_factory=dict)
    weights: dict[int, Held] = field(default_factory=dict)
    """The parameters themselves, which carry no scale."""
    known: dict[int, Quantity] = field(default_factory=dict)
    read: dict[int, tuple[Line | None, float, list[float]]] = field(default_factory=dict)
    """Numbers that were read from quantities, by the line that computed these: which power they carry."""
    cancelled: set[Line | None] = field(default_factory=set)
    """Lines of numbers that were seen to take the scale out of what they were multiplied by."""
    veiled: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    """Products of gradients with what nobody knows (a mask): how much of the scale they carry is not known either."""
    is_scaled_loss: Callable[[Tensor], bool] = lambda loss: True
    """Of a loss (a number with a graph behind it): whether it is the scaled one."""

    def hold(self, watches: Iterable[OptimizerWatch], power: float = 1.0) -> None:
        """Their gradients are scaled, or (0) true ones."""
        for watch in watches:
            for p in watch.parameters():
                grad = p.grad
                if grad is not None and type(grad) is Tensor and not grad.is_sparse:
                    self.gradients[grad.data_ptr()] = Held(grad.numel(), watch, power)
                    self._hold_weight(p, watch)

    def hold_weights(self, watches: Iterable[OptimizerWatch]) -> None:
        """The same of their parameters, whose gradients are about to come."""
        for watch in watches:
            for p in watch.parameters():
                self._hold_weight(p, watch)

    def _hold_weight(self, p: Tensor, watch: OptimizerWatch) -> None:
        if type(p) in (Tensor, Parameter):
            self.weights[p.data_ptr()] = Held(p.numel(), watch, 0.0)

    def gradient(self, tensor: Any) -> Held | None:
        """The gradient of which the tensor is all (itself, `.data`, `.detach()`, a flat view)."""
        if not isinstance(tensor, Tensor):
            return None
        held = self.gradients.get(tensor.data_ptr())
        return held if held is not None and held.numel == tensor.numel() else None

    def _weight(self, tensor: Any) -> Held | None:
        held = self.weights.get(tensor.data_ptr()) if isinstance(tensor, Tensor) else None
        return held if held is not None and held.numel == tensor.numel() else None

    def is_weight(self, tensor: Any) -> bool:
        """Whether it is all of a parameter (itself, `.data`)."""
        return self._weight(tensor) is not None

    def weight_of(self, tensor: Any) -> Tensor | None:
        """The parameter that it is all of."""
        held = self._weight(tensor)
        owned = held.watch.parameters() if held is not None else []
        return next((p for p in owned if p.data_ptr() == tensor.data_ptr()), None)

    def times_weights(self, tensor: Tensor, watch: OptimizerWatch) -> float:
        """How long it is, in lengths of the weights that have its shape; 0 where there are none. Waits for the device."""
        same = [float(p.detach().norm()) for p in watch.parameters() if p.shape == tensor.shape]
        longest = max(same, default=0.0)
        return float(tensor.detach().norm()) / longest if longest else 0.0

    def quantity(self, value: Any) -> Quantity | None:
        found = self.known.get(id(value))
        return found if found is not None and found.ref() is value else None

    def of(self, value: Any) -> tuple[float, OptimizerWatch] | None:
        """The power that a tensor (or a list of them) carries, and whose gradients it is made of."""
        if isinstance(value, (list, tuple)):
            parts = [part for item in value if (part := self.of(item)) is not None]
            return parts[0] if parts and all(part[0] == parts[0][0] for part in parts) else None
        known = self.quantity(value)
        if known is not None:
            return known.power, known.watch
        held = self.gradient(value) or self._weight(value)
        if held is None and self._is_plain_loss(value):
            held = next(iter(self.gradients.values()), None)
            return (0.0, held.watch) if held is not None else None
        return (held.power, held.watch) if held is not None else None

    def _is_plain_loss(self, value: Any) -> bool:
        """A loss as it was before it was scaled."""
        is_loss = isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None
        return is_loss and not self.is_scaled_loss(value)

    def of_number(self, value: Any) -> float:
        """1 for S itself, -1 for 1/S, 2 and -2 for their squares, 0 for any other number."""
        if isinstance(value, Tensor):
            if value.numel() != 1 or not value.is_cpu or value.requires_grad:
                return 0.0
            value = float(value)
        if not isinstance(value, float) or value == 1.0 or not value:
            return 0.0
        return next((p for p in (1.0, -1.0, 2.0, -2.0) if abs(value / self.scale**p - 1) < 1e-6), 0.0)

    def note_read(self, number: Any, power: float, where: Line | None) -> None:
        """A number was read that carries S^power."""
        if isinstance(number, float) and math.isfinite(number) and number and len(self.read) < MAX_READ:
            self.read.setdefault(hash((where, power)), (where, power, []))[2].append(number)

    def of_ratio(self, value: Any) -> tuple[float, Line | None] | None:
        """What a number carries that is a round number over what was read, or times it; and where that was computed."""
        if not isinstance(value, float) or not value or not math.isfinite(value):
            return None
        for where, power, numbers in self.read.values():
            for found, carried in _totals(numbers, power):
                if _is_round(value * found):
                    return -carried, where
                if _is_round(value / found):
                    return carried, where
        return None

    def _of_factor(self, value: Any) -> float:
        by_scale = self.of_number(value)
        ratio = self.of_ratio(value) if not by_scale else None
        return ratio[0] if ratio is not None else by_scale

    def note_factor(self, value: Any, power: float) -> None:
        """Something that carries S^power was multiplied by this number."""
        ratio = self.of_ratio(value) if power else None
        if ratio is not None and ratio[0] + power == 0:
            self.cancelled.add(ratio[1])

    def _is_unknown(self, value: Any) -> bool:
        """A tensor that was computed from who knows what, perhaps from scaled gradients as well."""
        return isinstance(value, Tensor) and self.of(value) is None and not self.of_number(value)

    def is_veiled(self, value: Any) -> bool:
        ref = self.veiled.get(id(first_of(value)))
        return ref is not None and ref() is first_of(value)

    def veil(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """`name(*args)` is a product of gradients with who knows what: what it is multiplied by may cancel, unless limited."""
        name = ADDED_PRODUCTS.get(name, name)
        if not (name in TIMES | OVER | UNDER | KEEPS and any(map(self._is_of_gradients, args[:2]))):
            return
        for arg in args[:2]:
            known = self.quantity(arg)
            if known is None or not known.is_limited:
                self.mark_used(arg)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                self.veiled[id(tensor)] = weakref.ref(tensor)

    def _is_of_gradients(self, value: Any) -> bool:
        """Whether it is a gradient, or all of one times something; not one number that was made of them."""
        value = first_of(value)
        known = self.quantity(value)
        if known is not None:
            return known.power > 0 and not known.is_reduced
        held = self.gradient(value)
        return self.is_veiled(value) or (held is not None and held.power > 0)

    def mark_used(self, value: Any) -> None:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            known = self.quantity(item)
            if known is not None:
                known.is_used = True

    def result(self, name: str, args: tuple[Any, ...]) -> tuple[float, OptimizerWatch] | None:
        """What `name(*args)` carries; None where that is not known."""
        if name in LIKE:
            args = args[:1]
        if name in DRAWS:
            return next(((0.0, held.watch) for held in self.gradients.values()), None)
        first = self.of(args[0])
        second = self.of(args[1]) if len(args) > 1 else None
        whose = first or second
        if whose is None:
            return None
        watch = whose[1]
        if name in DIFFERENCES and None in (first, second) and any(self._weight(arg) for arg in args[:2]):
            return 0.0, watch  # what a weight is compared with is of a weight's kind
        if len(args) > 1 and name not in BOUNDS and any(self._is_unknown(arg) for arg in args[:2]):
            return None
        left = first[0] if first is not None else self._of_factor(args[0])
        right = second[0] if second is not None else self._of_factor(args[1]) if len(args) > 1 else 0.0
        if name in KEEPS:
            if first is not None and second is not None and left != right:
                return None  # a sum of what is scaled and what is not
            return (left or right), watch
        if name in FACTORS:
            return left * FACTORS[name], watch
        if name in POWERS and len(args) > 1 and isinstance(args[1], (int, float)):
            return left * args[1], watch
        if name in TIMES:
            return left + right, watch
        if name in OVER:
            return left - right, watch
        return (right - left, watch) if name in UNDER else None

    def note(
        self,
        result: Any,
        power: float,
        watch: OptimizerWatch,
        where: Line | None,
        is_limited: bool = False,
        made_of: tuple[Any, ...] = (),
    ) -> None:
        """A tensor (or each of a list) carries S^power. `made_of`: the operands."""
        is_one = not made_of or any(map(self._are_several, made_of))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                is_reduced = is_one and tensor.numel() == 1
                known = Quantity(weakref.ref(tensor), power, watch, where, is_limited=is_limited, is_reduced=is_reduced)
                self.known[id(tensor)] = known

    def _are_several(self, value: Any) -> bool:
        """Whether an operand has several elements, or is one number that was made of several."""
        if isinstance(value, (list, tuple)):
            return any(map(self._are_several, value))
        known = self.quantity(value)
        return isinstance(value, Tensor) and (value.numel() > 1 or (known is not None and known.is_reduced))

    def is_limited(self, name: str, args: tuple[Any, ...], options: dict[str, Any], power: float) -> bool:
        """Whether the result of `name(*args)`, which carries S^power, comes out of a limit that carries none."""
        if any((known := self.quantity(arg)) is not None and known.is_limited for arg in args[:2]):
            return True
        side = LIMITS.get(name)
        if side is None or not power or (side and side * power < 0):
            return False
        if side:
            limits = [arg for arg in args[:2] if self.of(arg) is None] + list(options.values())
        else:
            by_place = dict(zip(("min", "max"), args[1:3], strict=False))
            limits = [{**by_place, **options}.get("min" if power > 0 else "max")]
        return any(self._is_limit(limit) for limit in limits)

    def _is_limit(self, value: Any) -> bool:
        if isinstance(value, Tensor) and (value.numel() != 1 or not value.is_cpu or value.requires_grad):
            return False
        is_number = isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
        return is_number and not self.of_number(value) and abs(float(value)) >= SMALLEST_LIMIT


def first_of(value: Any) -> Any:
    """The first of a list; what is none itself."""
    return value[0] if isinstance(value, (list, tuple)) and value else value


def _totals(numbers: list[float], power: float) -> Iterator[tuple[float, float]]:
    """What a script makes of such numbers, and what that carries: one of them, their sum, the norm that they make."""
    yield from ((number, power) for number in numbers)
    yield sum(numbers), power
    yield sum(n * n for n in numbers) ** 0.5, power
    yield abs(sum(numbers)) ** 0.5, power / 2


def _is_round(value: float) -> bool:
    """Whether it has no more than two significant digits.

    >>> _is_round(0.05000000001), _is_round(0.0512)
    (True, False)
    """
    return bool(value) and math.isfinite(value) and abs(value / float(f"{value:.1e}") - 1.0) < ROUND
