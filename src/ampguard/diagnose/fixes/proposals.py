"""Fixes that several causes share, and how each is tried on the failing step.

A fix that is verified must be the fix that is printed. So a change of an operand is printed as a changed line only where
the text tells which expression of the line ran the accused operator, and is tried on the runs of that expression. Where
the text cannot tell, the fix is put in words, and tried on the runs that need it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat, numerics
from ampguard.capture.record import RootCall
from ampguard.diagnose import words
from ampguard.diagnose.code import accused, rewrite
from ampguard.diagnose.code import source as source_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal, Trial
from ampguard.diagnose.fixes.low_weights import beside_autocast, low_models, weights_in
from ampguard.diagnose.fixes.standing_casts import standing_casts
from ampguard.replay.operators import flat_scalars, flat_tensors
from ampguard.replay.variants import CodePlace, Intervention, Variant

SPELLED = {"nan": "NaN", "inf": "+Inf", "+inf": "+Inf", "-inf": "-Inf"}


def spelled(kind: str | float | None) -> str:
    """NaN, +Inf and -Inf as every text of ours writes them.

    >>> spelled("+inf"), spelled(float("nan")), spelled(2.5)
    ('+Inf', 'NaN', '2.5')
    """
    text = words.number(kind) if isinstance(kind, (int, float)) or kind is None else kind
    return SPELLED.get(text, text)


# --- another precision ------------------------------------------------------------------------------------------------


def precision_fixes(evidence: Evidence) -> tuple[Proposal, ...]:
    """Float32 for the smallest region that needs it, bfloat16 for the run, no low precision at all."""
    setting = _setting(evidence)
    device = evidence.op.device
    replayer = evidence.replayer
    standing = standing_casts(evidence, everywhere=setting == "weights") if setting in ("weights", "autocast") else ()
    has_scaler = evidence.bad.mode == "train" and (replayer is None or replayer.loss_scale is not None)
    with_bf16, with_fp32 = beside_autocast(evidence, standing) if setting == "autocast" else ("", "")
    bf16, fp32 = {
        "autocast": (
            f'torch.autocast("{device}", dtype=torch.bfloat16)'
            + (", without GradScaler" if has_scaler else "")
            + with_bf16,
            f'torch.autocast("{device}", enabled=False)'
            + (" and GradScaler(enabled=False)" if has_scaler else "")
            + with_fp32,
        ),
        "weights": weights_in(evidence, standing) if setting == "weights" else ("", ""),
        "casts": (
            ".to(torch.bfloat16) in place of the casts to float16",
            f"leave out the casts to {words.precision(evidence)}",
        ),
        "autocast or casts": (
            f'torch.autocast("{device}", dtype=torch.bfloat16), and .to(torch.bfloat16) where the script casts to float16 itself',
            f'leave autocast there (torch.autocast("{device}", enabled=False)), and out the casts to {words.precision(evidence)}'
            f" of the script's own",
        ),
    }[setting]
    is_all_low = (setting == "weights" and evidence.op.root is not None) or (
        setting == "casts" and not any(isinstance(e, RootCall) for e in evidence.events())
    )
    fixes = [] if is_all_low else [Proposal("force-fp32", words.region(evidence), "", search=True)]
    if evidence.low_precision_in_use == torch.float16:
        fixes.append(
            Proposal(
                "use-bf16",
                None,
                f"use bfloat16, which has float32's range: {bf16}",
                trial=lambda e: Variant(convert=torch.bfloat16),
                is_of_autocast=setting == "autocast",
                standing=standing,
            )
        )
    how = f"compute in float32: {fp32}"
    fixes.append(
        Proposal(
            "disable-amp",
            None,
            how,
            trial=lambda e: e.all_in_float32,
            is_of_autocast=setting == "autocast",
            standing=standing,
        )
    )
    return tuple(fixes)


def _setting(evidence: Evidence) -> str:
    """Where the low precision comes from: "autocast", the model's own "weights", the script's "casts", or one of two."""
    roots = [e for e in evidence.events() if isinstance(e, RootCall)]
    if any(root.modes.autocast_dtype is not None for root in roots) or _casts_weights(evidence, roots):
        return "autocast"
    if low_models(evidence):
        return "weights"
    givens = [held.value for _, _, held in evidence.held()]
    if any(numerics.is_low_precision(t.dtype) for t in givens):
        return "casts"
    # operators outside modules: nothing says whether they ran under autocast
    if not (evidence.replayer is None or evidence.replayer.is_autocast_used):
        return "casts"
    return "autocast or casts" if roots else "autocast"


def _casts_weights(evidence: Evidence, roots: list[RootCall]) -> bool:
    """Whether one of PyTorch's own modules, with float32 weights, worked in low precision: within a `forward` of its own
    the script entered autocast."""
    own = {
        id(module)
        for root in roots
        for module in compat.all_modules(root.module)
        if type(module).__module__.startswith("torch.nn.")
        and any(p.dtype == torch.float32 for p in compat.own_parameters(module))
    }
    return any(
        op.owner in own
        and op.short_name != "_to_copy"
        and op.outputs
        and numerics.is_low_precision(op.outputs[0].dtype)
        for op in evidence.trace.ops
        if not op.in_backward
    )


# --- a changed operand or result --------------------------------------------------------------------------------------


def changed_operand(position: int, change: Callable[[Tensor], Tensor]) -> Trial:
    """Replay with one tensor operand of the accused operator changed, wherever the accused line runs it."""
    return lambda evidence: Variant(
        at_places={evidence.op.place: _changing(_argument_of(evidence, position), position, change)}
    )


def changed_result(change: Callable[[Tensor], Tensor]) -> Trial:
    """Replay with the accused operator's result changed."""

    def intervention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            new = change(output)
            return output.copy_(new) if any(output is a for a in args) else new
        return type(output)([change(output[0]), *output[1:]])

    return at_the_head(intervention)


def at_the_head(intervention: Intervention) -> Trial:
    """Replay with an intervention wherever the accused line runs the accused operator, as a change of the line would."""
    return lambda evidence: Variant(at_places={evidence.op.place: intervention})


def _changing(
    argument: int | None,
    position: int,
    change: Callable[[Tensor], Tensor],
    needs: Callable[[Tensor], bool] = lambda tensor: True,
) -> Intervention:
    """An operator with one argument changed: that of number `argument`, or its tensor operand number `position`.

    Runs whose argument is a plain number, or does not need the change, stay as they are.
    """

    def intervention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if argument is None:
            tensors = flat_tensors(args, kwargs)
            target = tensors[position] if position < len(tensors) and needs(tensors[position]) else None
            new_args = tuple([_swap(i, target, change) for i in a] if isinstance(a, list) else _swap(a, target, change)
                             for a in args)  # fmt: skip
            return func(*new_args, **{k: _swap(v, target, change) for k, v in kwargs.items()})
        old = args[argument] if argument < len(args) else None
        if not isinstance(old, Tensor) or not needs(old):
            return func(*args, **kwargs)
        new = change(old)
        output = func(*args[:argument], new, *args[argument + 1 :], **kwargs)
        return old.copy_(output) if output is new else output  # an in-place operator writes to what it was called on

    return intervention


def _swap(value: Any, target: Tensor | None, change: Callable[[Tensor], Tensor]) -> Any:
    return change(value) if value is target and isinstance(value, Tensor) else value


def _argument_of(evidence: Evidence, position: int) -> int | None:
    """The argument that is the tensor operand number `position`; None where it stands in a list or by keyword."""
    call = evidence.call
    if call is None:
        return position
    tensors = [i for i, a in enumerate(call.args) if isinstance(a, Tensor)]
    if any(isinstance(a, (list, tuple)) and any(isinstance(t, Tensor) for t in a) for a in call.args):
        return None
    return tensors[position] if position < len(tensors) else None


# --- a changed line ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OperandFix:
    """A change of one operand of the accused operator: as text, as it is tried, and which operands need it."""

    action: str
    position: int
    written: rewrite.Change
    tried: Callable[[Tensor], Tensor]
    needs: Callable[[Tensor], bool]
    in_words: str
    every_use: bool = False
    """Whether the words mean every argument that is the same tensor (`x * x`)."""

    def proposal(self, evidence: Evidence) -> Proposal:
        """Printed as a line of code where the text tells which expression failed, else in words."""
        found = self.changed_line(evidence)
        if found is not None:
            every = _every_one_changed(evidence, self)
            region = words.region(evidence)
            more = Proposal(self.action, region, every[0], trial=every[1]) if every is not None else None
            return Proposal(self.action, region, found[0], trial=found[1], otherwise=more)
        argument = None if self.every_use else _argument_of(evidence, self.position)
        where = _places(evidence, _changing(argument, self.position, self.tried, self.needs))
        code = accused.statement(evidence)
        return Proposal(
            self.action, words.region(evidence), f"{self.in_words} in: {code}" if code else self.in_words, trial=where
        )

    def changed_line(self, evidence: Evidence) -> tuple[str, Trial] | None:
        """(the changed line, its trial) where the text tells which expressions ran the accused operator."""
        line = accused.line_of(evidence)
        argument = _argument_of(evidence, self.position)
        if line is None or argument is None:
            return None
        op = evidence.op
        expressions = line.expressions(op.short_name, accused.is_in_place(op))
        alone = accused.accused_alone(evidence, expressions)
        if alone is None:
            return _all_changed(evidence, line, expressions, self, argument)
        operand = alone.operand(op.short_name, argument, accused.argument_name(op, argument))
        if operand is None or source_code.plain_number(operand) is not None:
            return None
        trial = _runs(evidence, expressions, alone, _changing(argument, self.position, self.tried))
        return rewrite.with_changes(line, [(alone, operand)], self.written), trial


def clamp_fix(
    evidence: Evidence, position: int, low: float | None, high: float | None, every_use: bool = False
) -> Proposal:
    """Keep an operand inside the function's domain."""
    bounds = ", ".join(f"{n}={rewrite.literal(b)}" for n, b in (("min", low), ("max", high)) if b is not None)

    def outside(tensor: Tensor) -> bool:
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
            return False  # PyTorch compares no float8
        below = low is not None and bool((tensor < low).any())
        return below or (high is not None and bool((tensor > high).any()))

    return OperandFix(
        "clamp",
        position,
        rewrite.clamped(low, high),
        lambda t: t.clamp(min=low, max=high),
        outside,
        f"clamp({bounds}) the operand of {words.operator(evidence)}",
        every_use,
    ).proposal(evidence)


def epsilon_fix(evidence: Evidence, position: int, epsilon: float) -> Proposal:
    """Keep a divisor, or what is put under a root, away from zero."""
    dtype = evidence.operands[position].values.dtype if position < len(evidence.operands) else torch.float32

    def is_lost(value: float) -> bool:
        return 0 < value < epsilon and float(torch.tensor(value, dtype=torch.float64).to(dtype)) == 0

    return OperandFix(
        "add-epsilon",
        position,
        rewrite.plus(epsilon, is_lost),
        lambda t: t + epsilon,
        lambda t: bool((t == 0).any()),
        f"add {rewrite.literal(epsilon)} to the operand of {words.operator(evidence)} that is 0",
    ).proposal(evidence)


def smallest_epsilon(evidence: Evidence) -> float:
    """An epsilon that survives in the precision in use, with room for a reciprocal of it."""
    return 1e-3 if evidence.precision == torch.float16 else 1e-6


def or_larger(proposal: Proposal, with_epsilon: Callable[[float], Proposal | None], evidence: Evidence) -> Proposal:
    """The same fix with room for the square of the reciprocal, where a derivative (that of `x / d` by d) has need of it."""
    if evidence.precision != torch.float16 or evidence.bad.mode != "train" or proposal.otherwise is not None:
        return proposal
    return dataclasses.replace(proposal, otherwise=with_epsilon(1e-2))


def _every_one_changed(evidence: Evidence, fix: OperandFix) -> tuple[str, Trial] | None:
    """Where an expression was told from others of the line (by its turn, a power by its exponent): all of them, should the
    others fail as well."""
    line, argument = accused.line_of(evidence), _argument_of(evidence, fix.position)
    if line is None or argument is None:
        return None
    expressions = line.expressions(evidence.op.short_name, accused.is_in_place(evidence.op))
    return _all_changed(evidence, line, expressions, fix, argument)


def _all_changed(
    evidence: Evidence,
    line: source_code.LineOfCode,
    expressions: list[source_code.Expression],
    fix: OperandFix,
    argument: int,
) -> tuple[str, Trial] | None:
    """Every expression of the line that runs the operator, where each run of it has a tensor to change."""
    op = evidence.op
    changes = [
        (e, operand)
        for e in expressions
        if (operand := e.operand(op.short_name, argument, accused.argument_name(op, argument))) is not None
        and source_code.plain_number(operand) is None
    ]
    runs = [run for group in accused.runs_of_the_line(evidence) for run in group]
    one_operator = {r.name for r in runs} == {op.name}
    if len(changes) < 2 or not one_operator or any(r.tensors != len(op.inputs) for r in runs):
        return None
    if len(changes) < len(expressions) or len(runs) % len(expressions):
        return None
    return rewrite.with_changes(line, changes, fix.written), _places(
        evidence, _changing(argument, fix.position, fix.tried)
    )


def _runs(
    evidence: Evidence, expressions: list[source_code.Expression], chosen: source_code.Expression, change: Intervention
) -> Trial:
    """Try a change wherever the chosen expression runs."""
    if any(accused.has_another_number(e, evidence.op) for e in expressions):
        change = _with_number(evidence.op.scalars, change)
    if accused.turn_of(evidence, expressions) is None or len(expressions) == 1:
        return _places(evidence, change)
    turn = expressions.index(chosen)
    runs = [group[turn] for group in accused.runs_of_the_line(evidence) if len(group) == len(expressions)]
    indices = [run.index for run in runs if run.index is not None and run.name == evidence.op.name]
    return lambda e: Variant(interventions=dict.fromkeys(map(e.trace.run_key, [e.op.index, *indices]), change))


def _with_number(numbers: list[float], change: Intervention) -> Intervention:
    """The change, in the runs that were given this plain number (`x ** 0.5`, and not `y ** 2` on the same line)."""

    def intervention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(func, args, kwargs) if flat_scalars(args, kwargs) == numbers else func(*args, **kwargs)

    return intervention


def _places(evidence: Evidence, change: Intervention) -> Trial:
    place: CodePlace = evidence.op.place
    return lambda e: Variant(at_places={place: change})
