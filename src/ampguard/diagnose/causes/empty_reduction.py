"""empty-reduction: a mean, a loss or a norm over no elements; a standard deviation over one.

What happens   the mean of an empty selection (no positive anchors, every target ignored) is 0/0 = NaN; the standard
               deviation of one element with the usual correction is 0/0 as well.
Why it hurts   it comes with the rare batch that has nothing to select.
Instead        skip the term when the selection is empty, or divide its sum by max(count, 1).
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.diagnose import words
from ampguard.diagnose.causes.division_by_zero import guards, is_count
from ampguard.diagnose.code import accused, rewrite
from ampguard.diagnose.code import source as source_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes import loss_of_nothing
from ampguard.diagnose.fixes.proposals import at_the_head, changed_result, spelled
from ampguard.diagnose.fixes.segments import beginning_at_zero, empty_segment
from ampguard.diagnose.locate import lineage

SPREADS = frozenset({"var", "std", "var_mean", "std_mean"})
ONE_ELEMENT = "takes the spread of one element"
SPREAD_OPTIONS = frozenset({"dim", "axis", "keepdim", "correction", "unbiased"})
EPSILON = 1e-6
LONGEST = 60
"""Letters of what is reduced, up to which it can stand in the line twice."""

LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss", "nll_loss"})


@cause("empty-reduction")
def empty_reduction(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.op.refused:
        return None
    what = _nothing_to_reduce(evidence)
    if what is None:
        return _of_a_segment(evidence)
    advice = "leave the term out when there is nothing to reduce (or use its sum / max(count, 1))"
    if what == ONE_ELEMENT:
        advice = "take the spread with correction=0, which is 0 for one element, or leave out what has only one"
    summed = loss_of_nothing.written_safely(evidence) if evidence.op.short_name in LOSSES else _as_sum(evidence)
    if summed is not None:
        advice, shown = "leave the term out when there is nothing to reduce, or let it be 0", summed
    else:
        corrected = _with_correction(evidence)
        advice += ", in" * (corrected is None)
        shown = corrected or words.code(evidence)
    trial = at_the_head(_without_correction) if what == ONE_ELEMENT else changed_result(_left_out)
    proposal = Proposal(
        "guard-empty",
        words.region(evidence),
        f"{advice}: {shown}",
        trial=trial,
        otherwise=_as_divisor(evidence) if what == ONE_ELEMENT else None,
    )
    if evidence.op.short_name == "div":
        proposal = _divided_safely(evidence) or proposal
    return Finding(
        "empty-reduction",
        f"{words.operator(evidence)} {words.place(evidence)} {what}, which is 0/0 in any precision.",
        weight=80,
        evidence={"operands": [o.stats.as_dict() for o in evidence.operands]},
        proposals=(proposal,),
    )


def _of_a_segment(evidence: Evidence) -> Finding | None:
    segment = empty_segment(evidence)
    if segment is None:
        return None
    return Finding(
        "empty-reduction",
        f"{words.operator(evidence)} {words.place(evidence)} reduces segment {segment}, which has no elements, and gives "
        f"{spelled(evidence.kind)} for it in any precision.",
        weight=80,
        evidence={"segment": segment, "operands": [o.stats.as_dict() for o in evidence.operands]},
        proposals=(beginning_at_zero(evidence),),
    )


def reduction_fixes(evidence: Evidence) -> tuple[Proposal, ...]:
    """What a reduction of too few elements needs that the loss does not see and the derivative does; nothing where it has enough.

    The loss is to stay as it is: the line may take the spread of many elements as well.
    """
    found = empty_reduction(evidence)
    if found is None:
        return ()
    written = _with_correction(evidence, of_one_alone=True)
    if written is None:
        return found.proposals
    how = f"take the spread of one element, and of nothing else, with correction=0: {written}"
    alone = Proposal("guard-empty", words.region(evidence), how, trial=at_the_head(_without_correction_of_one))
    return (*found.proposals, alone)


def _nothing_to_reduce(evidence: Evidence) -> str | None:
    name = evidence.op.short_name
    floats = evidence.float_operands
    if name in LOSSES:
        return _no_targets(evidence) if loss_of_nothing.zero_weights(evidence) is None else None
    if floats and floats[0].values.numel() == 0:
        return "reduces no elements"
    if name in SPREADS and floats and floats[0].contributing.numel() <= 1 and evidence.link.kind == 1:
        return ONE_ELEMENT
    if name == "div" and len(evidence.operands) == 2 and _is_mean_of_nothing(evidence):
        is_size = is_count(evidence, 1, evidence.operands[1])
        return f"divides the sum of an empty selection by {'its size, ' if is_size else ''}0"
    return None


def _no_targets(evidence: Evidence) -> str | None:
    """A loss whose targets are all `ignore_index`: the weights of the targets sum to 0."""
    call = evidence.capture(evidence.op.index)
    if call is None or not isinstance(call.output, (tuple, list)) or len(call.output) < 2:
        integers = [o for o in evidence.operands if not o.values.is_floating_point()]
        ignored = next((s for s in reversed(evidence.scalars) if s < 0), -100.0)
        if integers and bool((integers[0].values == ignored).all()):
            return "averages over no target: all are ignored"
        return None
    total = call.output[1]
    if isinstance(total, torch.Tensor) and total.numel() == 1 and float(total) == 0.0:
        if loss_of_nothing.are_all_ignored(call.args):
            return "averages over no target: all are ignored (total weight 0)"
        return "averages over no target that counts: the weights of their classes are all 0 (total weight 0)"
    return None


def _is_mean_of_nothing(evidence: Evidence) -> bool:
    maker = lineage.maker(evidence.trace, evidence.op, 0)
    return maker is not None and maker.short_name == "sum" and any(0 in t.shape for t in maker.inputs)


def _divided_safely(evidence: Evidence) -> Proposal | None:
    """The line with a divisor that is never 0; None where the text does not tell which quotient it is."""
    written = accused.accused_expression(evidence) is not None
    found = next(iter(guards(evidence)), None) if written else None
    if found is None or found.trial is None:
        return None
    if found.mends:  # a divisor that other terms have as well
        return found
    how = f"leave the term out when there is nothing to reduce, or let it be 0: {found.how}"
    return Proposal("guard-empty", words.region(evidence), how, trial=found.trial)


def _as_sum(evidence: Evidence) -> str | None:
    """The line with `x.sum() / max(x.numel(), 1)` for the accused `x.mean()`; None where the text does not tell which it is."""
    line = accused.line_of(evidence)
    if line is None or evidence.op.short_name != "mean":
        return None
    means = line.expressions("mean", accused.is_in_place(evidence.op))
    if _calls_a_loss(line) and accused.turn_of(evidence, means) is None:
        return None  # it may be the mean in there that has nothing to reduce, or both
    chosen = accused.accused_alone(evidence, means)
    if chosen is None or not isinstance(chosen.node, ast.Call) or chosen.named or not 1 <= len(chosen.arguments) <= 2:
        return None
    node, operand = chosen.node, chosen.arguments[0]
    text = line.source.written(operand)
    text = text if isinstance(operand, rewrite.PRIMARY) else f"({text})"
    if len(text) > LONGEST or "\n" in text:
        return None
    dim, count = "", f"{text}.numel()"
    if len(chosen.arguments) == 2:  # over one dimension
        number = source_code.plain_number(chosen.arguments[1])
        if number is None:
            return None
        dim, count = f"{number:g}", f"{text}.shape[{number:g}]"
    edit = (*line.source.span(node), f"({text}.sum({dim}) / max({count}, 1))")
    return rewrite.with_changes(line, [(chosen, operand)], lambda source, operand, expression: [edit])


def _calls_a_loss(line: source_code.LineOfCode) -> bool:
    """Whether the line calls one of PyTorch's losses, which take a mean themselves."""
    return any(name.endswith(("_loss", "kl_div")) for part, _ in line.parts for name in source_code.called(part))


def _without_correction_of_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A spread as it is, but for one element: 0."""
    output = func(*args, **kwargs)
    is_of_one = isinstance(output, Tensor) and output.numel() == args[0].numel()
    return _without_correction(func, args, kwargs) if is_of_one else output


def _without_correction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A spread over the number of its values, and not over one less: 0 for a single one."""
    if any(argument.name == "correction" for argument in compat.schema_of(func).arguments):
        return func(*args, **{**kwargs, "correction": 0})
    output = func(*args, **kwargs)
    return _left_out(output) if isinstance(output, Tensor) else output


def _left_out(result: Tensor) -> Tensor:
    """0 in place of NaN; without a derivative where nothing else is there."""
    filled = torch.nan_to_num(result, nan=0.0)
    return filled.detach() if bool(result.isnan().all()) else filled


def _as_divisor(evidence: Evidence) -> Proposal:
    """Where the spread of one element, which is 0 then, divides: with an epsilon."""
    shown = _with_correction(evidence, EPSILON) or words.code(evidence)
    advice = f"take the spread with correction=0, which is 0 for one element, and add {rewrite.literal(EPSILON)} to it"

    def above_zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = _without_correction(func, args, kwargs)
        return output + EPSILON if isinstance(output, Tensor) else output

    how = f"{advice}, or leave out what has only one: {shown}"
    return Proposal("guard-empty", words.region(evidence), how, trial=at_the_head(above_zero))


def _with_correction(evidence: Evidence, epsilon: float | None = None, of_one_alone: bool = False) -> str | None:
    """The line with `x.std(0, correction=0)` for the accused `x.std(0)`; None where the text does not tell which it is.

    `of_one_alone`: `x.std(0, correction=min(1, x.shape[0] - 1))`, which leaves the spread of several elements as it is.
    """
    line, name = accused.line_of(evidence), evidence.op.short_name
    if line is None or name not in SPREADS:
        return None
    chosen = accused.accused_alone(evidence, line.expressions(name, accused.is_in_place(evidence.op)))
    if chosen is None or not isinstance(chosen.node, ast.Call) or not chosen.arguments:
        return None
    node, source = chosen.node, line.source
    said = {k.arg: k.value for k in node.keywords}
    if (
        not set(said) <= SPREAD_OPTIONS
        or not all(_is_dimension(a) for a in chosen.arguments[1:2])
        or chosen.arguments[2:]
    ):
        return None  # (the second argument may be `unbiased`)
    correction = _smallest_correction(source, chosen) if of_one_alone else "0"
    if correction is None or (of_one_alone and said.keys() - {"keepdim"}):
        return None
    number = next((said[option] for option in ("correction", "unbiased") if option in said), None)
    if number is not None:
        edit = (*source.span(number), "0" if "correction" in said else "False")
    else:
        end = source.span(node)[1] - 1
        is_first = source.text[:end].rstrip()[-1:] in (b"(", b",")
        edit = (end, end, f"{'' if is_first else ', '}correction={correction}")
    edits = [edit]
    if epsilon is not None:
        start, end = source.span(node)
        edits = [(start, start, "("), edit, (end, end, f" + {rewrite.literal(epsilon)})")]
    return rewrite.with_changes(line, [(chosen, chosen.arguments[0])], lambda source, operand, expression: edits)


def _smallest_correction(source: source_code.Source, spread: source_code.Expression) -> str | None:
    """1, or 0 where there is but one element, of what is reduced whole or over one dimension."""
    operand = spread.arguments[0]
    text = source.written(operand)
    if len(text) > LONGEST or "\n" in text or not isinstance(operand, rewrite.PRIMARY):
        return None
    dim = source_code.plain_number(spread.arguments[1]) if spread.arguments[1:] else None
    if dim is None and spread.arguments[1:]:
        return None
    return f"min(1, {text}.{'numel()' if dim is None else f'shape[{dim:g}]'} - 1)"


def _is_dimension(argument: ast.expr) -> bool:
    """`0`, `-1`, `(2, 3)`: not `True`, and no name, which may stand for either."""
    parts = argument.elts if isinstance(argument, (ast.Tuple, ast.List)) else [argument]
    return all(source_code.plain_number(part) is not None for part in parts)
