"""What becomes of a Python number that was read from gradients which are still scaled: does the scale cancel?

PyTorch sees the number leave (`norm.item()`) and nothing of what follows. From there on the units are followed through
the script's own source, as in a check of physical units: a number times S^k, divided by another such number, is free
of the scale S; compared with a constant, formatted or handed to a call it is not.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from ampguard.capture.protocol.script_source import calls_at, function_of, last_name, only_call_at, running_call

READING = frozenset({"item", "tolist", "float", "int", "numpy"})
_KEEPING = frozenset(
    [
        *("abs", "array", "asarray", "clone", "cpu", "detach", "fsum", "float", "hypot", "item", "list", "max", "mean"),
        *(
            "median",
            "min",
            "norm",
            "numpy",
            "round",
            "sorted",
            "stack",
            "cat",
            "sum",
            "tensor",
            "tolist",
            "tuple",
            "int",
        ),
        *(
            "double",
            "squeeze",
            "flatten",
            "view",
            "reshape",
            "values",
            "items",
            "dict",
            "zip",
            "enumerate",
            "get",
            "pop",
        ),
    ]
)
_FREE = frozenset({"isnan", "isinf", "isfinite", "len", "type", "isinstance", "id", "keys"})
_CLIPPING = frozenset({"mul_", "div_", "mul", "div", "_foreach_mul_", "_foreach_div_"})
_MULTIPLYING = frozenset({"mul_", "mul", "multiply", "_foreach_mul_", "_foreach_mul"})
_FACTORS = frozenset({"alpha", "value"})
"""Names of arguments by which an operator multiplies another one."""
_LIMITING = frozenset({"min", "minimum", "clamp", "clip"})


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a script's frame stood, and which of its names hold the loss scale (1) or its inverse (-1)."""

    code: CodeType
    line: int
    scales: Mapping[str, float]
    instruction: int = -1
    """The one that it stood at (`f_lasti`)."""


@dataclass(slots=True)
class Use:
    """What the script does with the number."""

    is_raw: bool = False
    """It is used as if it were free of the scale."""
    clips: bool = False
    """Something is multiplied by it in place, as gradients are that are clipped."""
    multiplies: bool = False
    """A factor that carries the inverse of the scale is all that it is used for: what it is multiplied by may carry the scale."""

    is_lost: bool = False
    """Where it went could not be followed, and it counts as used as it is."""

    def in_view_of(self, cancels: bool) -> Use:
        """The same, once it is known whether the scale was seen to cancel there."""
        if cancels and (self.multiplies or self.is_lost):
            return Use(False, self.clips)
        return Use(self.is_raw or self.multiplies, self.clips)


def use_of_number(spots: list[Spot], power: float) -> Use:
    """A number that carries S^`power` was read at the innermost of `spots` (the others called it)."""
    line = spots[0].line if spots else 0
    while spots and spots[0].code.co_name in ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>", "<lambda>"):
        spots = spots[1:]
    wanted: str | None = None
    for spot in spots:
        function = function_of(spot.code)
        if function is None:
            break
        seeds = calls_at(function, line if wanted is None else spot.line, {wanted} if wanted else READING)
        if not seeds:
            break
        units = Units(seeds, power, spot.scales)
        units.walk(function)
        if units.is_raw or not units.returned:
            return _use_of(units)
        power, wanted = units.returned, spot.code.co_name
    return Use(is_raw=True, is_lost=True)


def _use_of(units: Units) -> Use:
    multiplies = units.multiplies and not (units.is_raw or units.limits)
    return Use(units.is_raw or not (units.cancels or multiplies), units.clips, multiplies and not units.cancels)


def use_of_name(spots: list[Spot], name: str, power: float) -> Use:
    """A tensor that carries S^`power` is still known as `name` to the script's frame at the first of `spots` (the others
    called it)."""
    function = function_of(spots[0].code)
    if function is None:
        return Use()
    units = Units((), power, {**spots[0].scales, name: power})
    units.walk(function)
    if units.returned and not (units.is_raw or units.cancels):
        return _use_of_returned(spots, units)
    return Use(units.is_raw or not (units.cancels or units.returned), units.clips)


def _use_of_returned(spots: list[Spot], units: Units) -> Use:
    """The same of a tensor that is returned: told only where a caller uses it, and none of them knows of a scale."""
    for callee, spot in itertools.pairwise(spots):
        function = function_of(spot.code)
        if function is None or spot.scales or "get_scale" in spot.code.co_names:
            break
        calls = _calls_of(callee.code.co_name, function, spot)
        units = Units(calls, units.returned, {}, units.returned_items, units.returned_keys)
        units.walk(function)
        if units.is_raw or units.cancels or not units.returned:
            return Use(units.is_raw and not units.cancels, units.clips)
    return Use()


def _calls_of(name: str, function: ast.AST, caller: Spot) -> tuple[ast.Call, ...]:
    """The calls of a function of this name at a frame's line; where there is none, that in which the frame stands."""
    named = calls_at(function, caller.line, {name})
    return named or running_call(function, caller.code, caller.instruction) or only_call_at(function, caller.line)


def computes_with_scale(spot: Spot) -> bool:
    """Whether the function multiplies or divides by one of its names that hold the loss scale."""
    function = function_of(spot.code) if spot.scales else None
    if function is None:
        return False
    units = Units((), 0.0, spot.scales)
    units.walk(function)
    return units.computes


def _strongest(powers: Iterable[float]) -> float:
    return max(powers, key=abs, default=0.0)


@dataclass
class Units:
    """Follows S^power through one function, statement by statement."""

    seeds: tuple[ast.AST, ...]
    seed_power: float
    fixed: Mapping[str, float]
    """What some names are known to carry, by their values."""
    seed_items: tuple[float, ...] | None = None
    """What each item of a seed carries that is a tuple."""
    seed_keys: Mapping[str, float] = field(default_factory=dict)
    """What the values of a seed carry that is a dictionary, by `[key]` as it is written."""
    names: dict[str, float] = field(default_factory=dict)
    computes: bool = False
    is_raw: bool = False
    clips: bool = False
    cancels: bool = False
    multiplies: bool = False
    limits: bool = False
    """A factor was limited: `min(1.0, limit / norm)`."""
    kept: set[str] = field(default_factory=set)
    """Names of what holds something that carries the scale for later: a list, a dictionary, an attribute."""
    returned: float = 0.0
    returned_items: tuple[float, ...] | None = None
    """Where a tuple is returned that is written out."""
    returned_keys: dict[str, float] = field(default_factory=dict)
    """Where a dictionary is returned whose values are known by their keys."""
    _handlers: dict[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names |= self.fixed
        self._handlers = {
            ast.BinOp: self._arithmetic, ast.Call: self._call, ast.Compare: self._compare, ast.JoinedStr: self._format,
            ast.IfExp: self._choice, ast.NamedExpr: self._named, ast.ListComp: self._comprehension,
            ast.GeneratorExp: self._comprehension, ast.SetComp: self._comprehension, ast.DictComp: self._comprehension,
        }  # fmt: skip

    def walk(self, function: ast.AST) -> None:
        """Twice: what a loop computes is used in its next turn."""
        body = [ast.Expr(function.body)] if isinstance(function, ast.Lambda) else list(getattr(function, "body", ()))
        for _ in range(2):
            self._block(body)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            by = self.power(node.value)
            self.clips = self.clips or (bool(by) and isinstance(node.op, (ast.Mult, ast.Div)))
            self._set(node.target, self._combined(node.op, self.power(node.target), by, node.value))
        elif isinstance(node, (ast.Return, ast.Expr)) and node.value is not None:
            power = self.power(node.value)
            if isinstance(node, ast.Return):
                self.returned = _strongest((self.returned, power))
                if isinstance(node.value, ast.Tuple):
                    self.returned_items = tuple(self.power(item) for item in node.value.elts)
                self.returned_keys |= self._keys_of(node.value)
                self.returned = _strongest((self.returned, *self.returned_keys.values()))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._set(node.target, self.power(node.iter))
        elif isinstance(node, (ast.If, ast.While, ast.Assert)):
            self.power(node.test)
        for name in ("body", "orelse", "finalbody"):
            self._block(getattr(node, name, ()))
        for handler in getattr(node, "handlers", ()):
            self._block(handler.body)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            for inner, part in zip(target.elts, value.elts, strict=False):
                self._assign(inner, part)
        elif self.seed_keys and any(value is s for s in self.seeds):
            name = ast.unparse(target)
            self.names |= {name: 0.0, **{name + key: power for key, power in self.seed_keys.items()}}
        elif isinstance(target, (ast.Tuple, ast.List)) and self.seed_items and any(value is s for s in self.seeds):
            for inner, power in zip(target.elts, self.seed_items, strict=False):
                self._set(inner, power)
        else:
            self._set(target, self.power(value))

    def _keys_of(self, node: ast.AST) -> dict[str, float]:
        """What a dictionary holds that carries the scale: one that is written out, or a name of one."""
        if isinstance(node, ast.Dict):
            pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
            return {f"[{ast.unparse(key)}]": self.power(value) for key, value in pairs}
        name = ast.unparse(node)
        return {key[len(name) :]: power for key, power in self.names.items() if key.startswith(f"{name}[")}

    def _set(self, target: ast.AST, power: float) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for inner in target.elts:
                self._set(inner, power)
            return
        name = ast.unparse(target)
        if isinstance(target, ast.Subscript):
            self._keep(target.value, power)
        elif isinstance(target, ast.Attribute):
            self._keep(target, power)
        if name not in self.fixed:
            self.names[name] = power

    def _keep(self, holder: ast.AST, power: float) -> None:
        if power:
            self.kept |= {ast.unparse(holder)}

    # --- expressions --------------------------------------------------------------------------------------------------

    def power(self, node: ast.AST) -> float:
        """Which power of the scale the value carries; 0 where nothing is known of it."""
        if any(node is seed for seed in self.seeds):
            return self.seed_power
        handler = self._handlers.get(type(node))
        if handler is not None:
            return float(handler(node))
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            known = self.names.get(ast.unparse(node))
            if known is None and isinstance(node, ast.Subscript):
                return self.power(node.value)
            return known or 0.0
        if isinstance(node, (ast.Lambda, ast.Constant)):
            return 0.0
        return _strongest(self.power(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    def _arithmetic(self, node: ast.BinOp) -> float:
        return self._combined(node.op, self.power(node.left), self.power(node.right), node.right)

    def _combined(self, op: ast.operator, left: float, right: float, exponent: ast.expr) -> float:
        if isinstance(op, (ast.Mult, ast.Div)):
            self.computes = self.computes or bool(left or right)
            if isinstance(op, ast.Mult) and self._is_factor(left, right, exponent):
                return 0.0
            power = left + right if isinstance(op, ast.Mult) else left - right
            self.cancels = self.cancels or (not power and bool(left))
            return power
        if isinstance(op, ast.Pow):
            value = getattr(exponent, "value", None)
            return left * value if isinstance(value, (int, float)) else left
        return _strongest((left, right))

    def _is_factor(self, left: float, right: float, other: ast.expr) -> bool:
        """Whether one side of a product carries the inverse of the scale, and the other one may carry the scale."""
        is_one = min(left, right) < 0 and not max(left, right) and not isinstance(other, ast.Constant)
        self.multiplies = self.multiplies or is_one
        return is_one

    def _call(self, node: ast.Call) -> float:
        name = last_name(node.func)
        given = [self.power(arg) for arg in (*node.args, *(k.value for k in node.keywords))]
        own = self.power(node.func.value) if isinstance(node.func, ast.Attribute) else 0.0
        power = _strongest(given)
        if name == "get_scale":
            return 1.0
        if name in ("append", "extend", "add") and isinstance(node.func, ast.Attribute):
            self._keep(node.func.value, power)
            self._set(node.func.value, _strongest((own, power)))
            return 0.0
        if name.endswith("sqrt"):
            return _strongest((own, power)) / 2
        if name in _FREE:
            return 0.0
        if name in _LIMITING and power < 0 and any(isinstance(arg, ast.Constant) for arg in node.args):
            self.limits = True
        if name in _KEEPING:
            return _strongest((own, power))
        factors = node.args if name in _MULTIPLYING else [k.value for k in node.keywords if k.arg in _FACTORS]
        if power < 0 and sum(map(bool, given)) == sum(bool(self.power(factor)) for factor in factors):
            self.multiplies = True
            self.clips = self.clips or name in _CLIPPING
            return 0.0
        if power:
            self.is_raw = True
            self.clips = self.clips or name in _CLIPPING
        return 0.0

    def _compare(self, node: ast.Compare) -> float:
        sides = [node.left, *node.comparators]
        powers = [self.power(side) for side in sides]
        if any(powers):
            if len(set(powers)) == 1:
                self.cancels = True
            elif not any(isinstance(side, ast.Constant) and not side.value for side in sides):
                self.is_raw = True
        return 0.0

    def _format(self, node: ast.JoinedStr) -> float:
        if any(self.power(part.value) for part in node.values if isinstance(part, ast.FormattedValue)):
            self.is_raw = True
        return 0.0

    def _choice(self, node: ast.IfExp) -> float:
        self.power(node.test)
        return _strongest((self.power(node.body), self.power(node.orelse)))

    def _named(self, node: ast.NamedExpr) -> float:
        power = self.power(node.value)
        self._set(node.target, power)
        return power

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) -> float:
        for loop in node.generators:
            self._set(loop.target, self.power(loop.iter))
        return self.power(node.value if isinstance(node, ast.DictComp) else node.elt)
