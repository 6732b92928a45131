"""A count that is 0 and that several lines divide by (`loss_a / n`, `loss_b / n`): changed once, in the line that makes it.

A change of one of these lines is not enough, and an epsilon in each makes a loss of thousands: a count has to be at least 1.
Which line made it, the trace tells of a tensor. Of a plain number the text does: the replay is asked which functions stood
around the division, and the name is followed to where it was assigned.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ampguard.capture.frames import frames_up, is_user_code, locals_of
from ampguard.capture.record import Line
from ampguard.diagnose import words
from ampguard.diagnose.code import rewrite
from ampguard.diagnose.code import source as source_code
from ampguard.diagnose.code.assigned import Assignment, is_parameter, last_assigned_to
from ampguard.diagnose.code.text import joined_lines
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.locate.lineage import LOOK_THROUGH
from ampguard.numerics import NAN
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import CodePlace, Variant

MOST_PLACES = 32
MOST_FRAMES = 40
MOST_STATEMENTS = 6
"""Assignments that are followed from a divisor to what it was counted from."""

COUNTING = frozenset({"len", "numel", "size", "count_nonzero", "nelement"})


@dataclass(frozen=True, slots=True)
class _Function:
    """A function that was running: where it stood, and which of its variables were the number 0."""

    code: CodeType
    number: int
    zeros: frozenset[str]


@dataclass(frozen=True, slots=True)
class Definition:
    """The statement that made a divisor, and its line."""

    line: Line
    source: source_code.Source
    statement: Assignment

    @property
    def value(self) -> ast.expr:
        assert self.statement.value is not None
        return self.statement.value

    def never_zero(self, is_tensor: bool, is_count: bool) -> str | None:
        """The statement with a value that is at least 1, or (what counts nothing) 1 in place of 0; None where it is too long
        to be written out."""
        target = self.statement.target if isinstance(self.statement, ast.AnnAssign) else self.statement.targets[0]
        value = self.source.written(self.value)
        in_parentheses = value if isinstance(self.value, rewrite.PRIMARY) else f"({value})"
        guarded = (
            f"{in_parentheses}.clamp(min=1)"
            if is_tensor
            else f"max({value}, 1)"
            if is_count
            else f"{in_parentheses} or 1"
        )
        text = joined_lines(f"{self.source.written(target)} = {guarded}")
        return text if len(text) <= source_code.LONGEST_STATEMENT else None

    def counts(self) -> bool:
        """Whether the text makes a number of things of it: `sum(len(t) for t in targets)`, in this statement or before."""
        waiting, seen = [self.statement], 0
        while waiting and seen < MOST_STATEMENTS:
            statement = waiting.pop()
            seen += 1
            parts = list(ast.walk(statement.value)) if statement.value is not None else []
            if any(map(_is_fraction, parts)):
                return False
            if any(map(_is_counting, parts)):
                return True
            names = {node.id for node in parts if isinstance(node, ast.Name)}
            found = (last_assigned_to(self.source, name, statement.lineno) for name in sorted(names))
            waiting += [other for other in found if other is not None]
        return False


def of_a_tensor(evidence: Evidence, position: int, is_count: bool) -> Proposal | None:
    """The fix of a tensor that several lines divide by; None where one line does, or where it is no count."""
    chain = _made_of(evidence, evidence.op, position)
    sharing = [
        op
        for op in evidence.trace.ops
        if op.short_name == "div" and not op.in_backward and op.is_bad and op.place != evidence.op.place
        and len(op.inputs) == 2 and chain and set(_made_of(evidence, op, 1)) & set(chain)
    ]  # fmt: skip
    if not sharing:
        return None
    root = next((i for i in chain if all(i in _made_of(evidence, op, 1) for op in sharing)), None)
    maker = evidence.trace.ops[root] if root is not None else None
    found = _statement_of(maker.line) if maker is not None and maker.line is not None else None
    if maker is None or found is None or not (is_count or found.counts()):
        return None
    how = found.never_zero(is_tensor=True, is_count=True)

    def clamped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs).clamp(min=1)

    return _proposal(evidence, how, found, [maker.place], sharing, clamped)


def of_a_number(evidence: Evidence) -> Proposal | None:
    """The fix of a plain number that several lines divide by; None where one line does, or where it is no count."""
    sharing = [
        op
        for op in evidence.trace.ops
        if _divides_by_plain_zero(op) and op.is_bad and op.place != evidence.op.place and not op.in_backward
    ]
    places = list(dict.fromkeys([evidence.op.place, *(op.place for op in sharing)]))
    if not sharing or len(places) > MOST_PLACES:
        return None
    found = definitions(evidence, places)
    first = found.get(evidence.op.place)
    shared = [place for place in places if first is not None and found.get(place) == first]
    sharing = [op for op in sharing if op.place in shared]
    if first is None or not sharing:
        return None
    is_count = first.counts()
    if not is_count and not any(map(_is_of_nothing, (evidence.op, *sharing))):
        return None

    def guarded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*(1 if is_plain_zero(argument) else argument for argument in args), **kwargs)

    return _proposal(evidence, first.never_zero(is_tensor=False, is_count=is_count), first, shared, sharing, guarded)


def _proposal(
    evidence: Evidence,
    how: str | None,
    found: Definition,
    changed: list[CodePlace],
    sharing: list[TracedOp],
    change: Any,
) -> Proposal | None:
    if how is None:
        return None
    return Proposal(
        "guard-empty",
        words.region(evidence),
        f"{how}  # {words.line_name(found.line)}",
        trial=lambda e: Variant(at_places=dict.fromkeys(changed, change)),
        mends=frozenset(op.place for op in sharing),
    )


def counts_by_its_text(evidence: Evidence) -> bool:
    """Whether the plain number that the accused line divides by is made, by its text, by counting something."""
    found = definitions(evidence, [evidence.op.place]).get(evidence.op.place)
    return found is not None and found.counts()


def is_plain_zero(argument: Any) -> bool:
    return isinstance(argument, (int, float)) and not isinstance(argument, bool) and argument == 0


def _divides_by_plain_zero(op: TracedOp) -> bool:
    return op.short_name == "div" and len(op.inputs) == 1 and 0.0 in op.scalars


def _is_of_nothing(op: TracedOp) -> bool:
    """Whether a division by 0 is one of 0: the sum of an empty selection."""
    bad = op.outputs[0].bad
    return bad is not None and op.inputs[0].bad is None and bool((bad.kinds == NAN).any())


def _made_of(evidence: Evidence, op: TracedOp, position: int) -> list[int]:
    """The operators that an operand came from unchanged, the latest first, and the one that computed it."""
    made = op.inputs[position].made_by if position < len(op.inputs) else None
    found: list[int] = []
    while made is not None and made[0] not in found:
        found.append(made[0])
        maker = evidence.trace.ops[made[0]]
        is_view = maker.short_name in LOOK_THROUGH and maker.inputs
        made = maker.inputs[0].made_by if is_view else None
    return found


# --- the text ---------------------------------------------------------------------------------------------------------


def definitions(evidence: Evidence, places: list[CodePlace]) -> dict[CodePlace, Definition]:
    """By the place of a division by a plain 0: the statement that gave its divisor that value, where the text tells."""
    functions = _functions_around(evidence, places)
    found: dict[CodePlace, Definition] = {}
    for place in places:
        stack = functions.get(place) or _own_function(evidence, place)
        name = _divisor_name(stack[0]) if stack else None
        definition = _followed(stack, name) if name is not None else None
        if definition is not None:
            found[place] = definition
    return found


def _functions_around(evidence: Evidence, places: list[CodePlace]) -> dict[CodePlace, list[_Function]]:
    """The functions that run around each division by 0, from the innermost on. One replay."""
    found: dict[CodePlace, list[_Function]] = {}

    def watch(place: CodePlace) -> Any:
        def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if place not in found and any(map(is_plain_zero, args)):
                around = [f for f in frames_up(sys._getframe(1), MOST_FRAMES) if is_user_code(f.f_code)]
                stack = [_Function(f.f_code, f.f_lineno, _zeros(locals_of(f))) for f in around]
                if stack and (stack[0].code.co_filename, stack[0].number) == place[1:]:
                    found[place] = stack
            return func(*args, **kwargs)

        return look

    if evidence.replayer is not None:
        evidence.replayer.run(Variant(at_places={place: watch(place) for place in places}), traced=False)
    return found


def _own_function(evidence: Evidence, place: CodePlace) -> list[_Function]:
    """Of what ran outside modules a replay runs no code: the function of the line alone."""
    line = next((op.line for op in evidence.trace.ops if op.place == place), None)
    return [_Function(line.code, line.number, frozenset())] if line is not None else []


def _zeros(variables: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in variables.items() if is_plain_zero(value))


def _divisor_name(function: _Function) -> str | None:
    """The variable that the only quotient of a line divides by."""
    line = source_code.line_of_code(Line(function.code, function.number))
    quotients = [*line.expressions("div", False), *line.expressions("div", True)] if line is not None else []
    operands = [q.operand("div", 1, "other") for q in quotients]
    names = {operand.id for operand in operands if isinstance(operand, ast.Name)}
    return names.pop() if len(names) == len(operands) == 1 else None


def _followed(stack: list[_Function], name: str) -> Definition | None:
    """The assignment of a name, in the innermost function or in one that handed it on as an argument."""
    for function, caller in zip(stack, [*stack[1:], None], strict=True):
        line = Line(function.code, function.number)
        found = source_code.line_of_code(line)
        if found is None or found.number != function.number:  # the line by itself: its file cannot be read
            return None
        statement = last_assigned_to(found.source, name, function.number)
        if statement is not None:
            return Definition(Line(function.code, statement.lineno), found.source, statement)
        if caller is None or not is_parameter(found.source, name, function.number):
            return None
        handed = _handed_on(caller, name)
        if handed is None:
            return None
        name = handed
    return None


def _handed_on(caller: _Function, name: str) -> str | None:
    """The variable of the calling function that was given for a parameter: the only one in the call that is 0."""
    line = source_code.line_of_code(Line(caller.code, caller.number))
    given: set[str] = set()
    for call, _ in line.calls(lambda call: True) if line is not None else ():
        named = {k.arg: k.value for k in call.keywords if k.arg is not None}
        for value in [named[name]] if name in named else call.args:
            if isinstance(value, ast.Name) and value.id in caller.zeros:
                given.add(value.id)
    return given.pop() if len(given) == 1 else None


def _statement_of(line: Line) -> Definition | None:
    """The line's only statement, where it gives one name a value."""
    found = source_code.line_of_code(line)
    statements = [s for _, s in found.parts if s is not None] if found is not None else []
    if found is None or found.number != line.number or len(statements) != 1:
        return None
    statement = statements[0]
    if (
        not isinstance(statement, ast.Assign)
        or len(statement.targets) != 1
        or not isinstance(statement.targets[0], ast.Name)
    ):
        return None
    return Definition(line, found.source, statement)


def _is_counting(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and source_code.called_name(node) in COUNTING
    return is_call or (isinstance(node, ast.Attribute) and node.attr == "shape")


def _is_fraction(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value != round(node.value)
