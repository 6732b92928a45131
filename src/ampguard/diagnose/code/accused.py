"""Which expression of the user's line ran the accused operator.

The text of the line is compared with the operators that the line ran. Where each of its expressions ran once, the
order tells; else only a single expression is sure.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.record import BackwardCall, GlueOp, Held, Ref, RootCall
from ampguard.diagnose.code import rewrite
from ampguard.diagnose.code import source as source_code
from ampguard.diagnose.code.text import without_comment
from ampguard.diagnose.evidence import Evidence
from ampguard.numerics import is_finite
from ampguard.replay.trace import TracedOp

HIDING = frozenset(
    ["normalize", "cosine_similarity", "cosine_embedding_loss", "triplet_margin_loss", "corrcoef", "cov", "Categorical",
     "Normal", "kl_divergence", "log_prob", "instance_norm", "gumbel_softmax", "poisson_nll_loss", "gaussian_nll_loss"]
)  # fmt: skip
"""Calls into PyTorch that divide, take roots or logarithms themselves, on the line of whoever called them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an operator on the accused line. `index` is its place in the trace, None where it was not replayed."""

    name: str
    tensors: int
    event: int
    index: int | None


def accused_expression(evidence: Evidence) -> str | None:
    """The one expression of the user's line that ran the accused operator, as it is written; None where none is sure."""
    line = line_of(evidence)
    if line is None:
        return None
    chosen = accused_alone(evidence, line.expressions(evidence.op.short_name, is_in_place(evidence.op)))
    return line.source.written(chosen.node) if chosen is not None else None


def bad_operand(evidence: Evidence) -> str | None:
    """The one operand of the accused operator that is not finite, as the user's line writes it; None where none is sure."""
    line, call, op = line_of(evidence), evidence.call, evidence.op
    if line is None or call is None:
        return None
    bad = [i for i, a in enumerate(call.args) if isinstance(a, Tensor) and a.is_floating_point() and not is_finite(a)]
    written = line.expressions(op.short_name, is_in_place(op), source_code.ARITHMETIC)
    chosen = accused_alone(evidence, written) if len(bad) == 1 else None
    node = chosen.operand(op.short_name, bad[0], argument_name(op, bad[0])) if chosen is not None else None
    return line.source.written(node) if node is not None else None


def with_changed_result(evidence: Evidence, change: rewrite.Change) -> str | None:
    """The accused line with a change of what the accused operator gives; None where the text does not tell which it is."""
    line = line_of(evidence)
    if line is None or is_in_place(evidence.op):
        return None
    chosen = accused_alone(evidence, line.expressions(evidence.op.short_name, False, source_code.ARITHMETIC))
    if chosen is None or isinstance(chosen.node, ast.AugAssign):
        return None
    return rewrite.with_changes(line, [(chosen, chosen.node)], change)


def statement(evidence: Evidence) -> str:
    """The statement of the accused line for a text: without comments, without the `def` or `if` that it hangs on."""
    code = evidence.op.line
    line = source_code.line_of_code(code) if code is not None else None
    simple = [s for _, s in line.parts if s is not None and s.lineno == s.end_lineno] if line is not None else []
    if line is not None and simple:
        return "; ".join(dict.fromkeys(line.source.written(s) for s in simple))
    if code is None:
        return ""
    return source_code.whole_statement(code) or without_comment(code.location().code)


def line_of(evidence: Evidence) -> source_code.LineOfCode | None:
    """The accused line, if its own text runs the operator: not where PyTorch's code did that it called."""
    op = evidence.op
    if op.line is None or ran_inside_pytorch(evidence):
        return None
    line = source_code.line_of_code(op.line)
    if line is None:
        return None
    hides = any(name in HIDING for part, _ in line.parts for name in source_code.called(part))
    return line if not hides or _is_written_here(evidence, line) else None


def _is_written_here(evidence: Evidence, line: source_code.LineOfCode) -> bool:
    """Whether the only expression of the text that can have run the operator was given what its own text computes.

    `torch.log(1 - a ** 2)` beside `dist.log_prob(u)`, which takes logarithms too: of what no subtraction on this line made.
    """
    op = evidence.op
    written = line.expressions(op.short_name, is_in_place(op))
    operand = written[0].operand(op.short_name, 0, argument_name(op, 0)) if len(written) == 1 else None
    made_by = op.inputs[0].made_by if op.inputs else None
    maker = evidence.trace.ops[made_by[0]] if made_by is not None else None
    if operand is None or maker is None or maker.line != op.line:
        return False
    if isinstance(operand, ast.BinOp):
        spelled = source_code.ARITHMETIC.get(type(operand.op))
        return maker.short_name == spelled or (spelled, maker.short_name) == ("sub", "rsub")
    name = source_code.called_name(operand).rstrip("_") if isinstance(operand, ast.Call) else ""
    return bool(name) and name not in HIDING and maker.short_name == source_code.ALIASES.get(name, name)


def ran_inside_pytorch(evidence: Evidence) -> bool:
    """Whether the operator ran in a module of PyTorch's own (`nn.LayerNorm`), so that the line only called it.

    Not so where it is the script's hook on such a module.
    """
    op = evidence.op
    root = next((e for e in evidence.events() if e.index == op.event and isinstance(e, RootCall)), None)
    if root is None:
        return False
    if root.line is not None and op.line is not None and root.line.code is op.line.code:
        return True
    owner = next((m for m in compat.all_modules(root.module) if id(m) == op.owner), None)
    if owner is None or not type(owner).__module__.startswith("torch."):
        return False
    return op.line is None or not any(getattr(h, "__code__", None) is op.line.code for h in compat.hooks_of(owner))


def is_in_place(op: TracedOp) -> bool:
    return op.name.split(".")[1].endswith("_")


def argument_name(op: TracedOp, argument: int) -> str | None:
    arguments = compat.schema_of(op.func).arguments
    name = arguments[argument].name if argument < len(arguments) else None
    return "input" if name == "self" else name


def accused_alone(evidence: Evidence, expressions: list[source_code.Expression]) -> source_code.Expression | None:
    """The expression that ran the accused operator: the only one, or the one whose turn it was."""
    op = evidence.op
    turn = turn_of(evidence, expressions)
    if turn is not None:
        return expressions[turn]
    able = [e for e in expressions if not _has_a_plain_number(e, op.short_name) and not has_another_number(e, op)]
    return able[0] if len(able) == 1 else None


def has_another_number(expression: source_code.Expression, op: TracedOp) -> bool:
    """`x ** 2` on a line whose `y ** 0.5` is accused. (In a derivative the number is not the one that is written.)"""
    takes_one = op.name.endswith(".Tensor_Scalar") and len(op.scalars) == 1 and not op.in_backward
    written = expression.operand(op.short_name, 1, "exponent") if takes_one else None
    number = source_code.plain_number(written) if written is not None else None
    return number is not None and [number] != op.scalars


def _has_a_plain_number(expression: source_code.Expression, operator: str) -> bool:
    """`x / 2`: no run of it has a tensor that could be changed."""
    operand = expression.operand(operator, 1, "other")
    return operator == "div" and operand is not None and source_code.is_python_number(operand)


def turn_of(evidence: Evidence, expressions: list[source_code.Expression]) -> int | None:
    """Which of the line's expressions it was, where the line ran each of them once, in the order of the text."""
    op = evidence.op
    if not all(e.in_order for e in expressions):
        return None
    for group in runs_of_the_line(evidence):
        turn = next((i for i, run in enumerate(group) if _is_accused(run, op)), None)
        if turn is None or len(group) != len(expressions):
            continue
        if all(_agree(run, e) for run, e in zip(group, expressions, strict=True)):
            return turn
    return None


def _is_accused(run: Run, op: TracedOp) -> bool:
    return run.index == op.index if run.index is not None else run.event == op.event


def _agree(run: Run, expression: source_code.Expression) -> bool:
    """A divisor that is written as a number is no tensor."""
    return not _has_a_plain_number(expression, run.name.split(".")[1]) or run.tensors == 1


def runs_of_the_line(evidence: Evidence) -> list[list[Run]]:
    """The runs of the operator (and of those that share its spelling) on its line.

    Apart for each call of a root module; outside modules for each micro-batch of a window, up to its backward pass;
    in a hook or a hand-written backward for each operator that is differentiated there.
    """
    op = evidence.op
    names = next((f for f in source_code.FAMILIES if op.short_name in f), frozenset({op.short_name}))
    in_place = is_in_place(op)

    def is_such(func: Any, line: Any) -> bool:
        name = str(func).split(".")[1]
        here = line is not None and op.line is not None and (line.code, line.number) == (op.line.code, op.line.number)
        return here and name.rstrip("_") in names and name.endswith("_") == in_place

    if op.root is None and not op.in_backward:
        index_of = {o.event: o.index for o in evidence.trace.ops if o.root is None}
        parts: list[list[Run]] = [[]]
        for e in evidence.bad.record.events:
            if isinstance(e, BackwardCall) and not e.is_functional:
                parts.append([])
            elif isinstance(e, GlueOp) and is_such(e.func, e.line):
                parts[-1].append(Run(str(e.func), _count_operands(e), e.index, index_of.get(e.index)))
        return [part for part in parts if part]
    groups: dict[tuple[int, int | None], list[Run]] = defaultdict(list)
    for o in evidence.trace.ops:
        if o.in_backward == op.in_backward and (o.root is not None or op.in_backward) and is_such(o.func, o.line):
            groups[o.event, o.forward if op.in_backward else None].append(Run(o.name, len(o.inputs), o.event, o.index))
    return list(groups.values())


def _count_operands(event: GlueOp) -> int:
    return sum(isinstance(a, (Held, Ref, Tensor)) for a in event.args)
