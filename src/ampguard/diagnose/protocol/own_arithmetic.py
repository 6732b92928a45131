"""optimizer-underflow, in an optimizer that is not PyTorch's: its own arithmetic makes the weights non-finite.

What happens   the gradients are finite, and the step divides by a norm or a moment that is 0, squares what is large, or
               takes a root of what rounding has made negative (the eigenvalues of a preconditioner).
Why it hurts   the weights are NaN or Inf after a step whose loss and gradients were fine; every later step fails.
Instead        an epsilon in every divisor that can be 0 (one that the weights' precision has); clip gradients before
               the step; keep the optimizer's state in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.own_steps import LoadedState
from ampguard.diagnose.code.rewrite import plus, with_changes
from ampguard.diagnose.code.source import is_python_number, line_of_code
from ampguard.diagnose.protocol.scene import Scene, at, listed
from ampguard.diagnose.protocol.telling import Telling, breach
from ampguard.diagnose.words import number
from ampguard.incident import Fix
from ampguard.numerics import dtype_name, is_low_precision
from ampguard.replay.names import module_of_parameter
from ampguard.replay.own_step import BadOperator, OwnStep, SteppedAgain

ROOTS = frozenset({"pow", "sqrt", "rsqrt", "log", "_foreach_sqrt", "_foreach_pow"})
"""Which have no value below 0."""
DIVISIONS = frozenset({"div", "addcdiv", "_foreach_div", "_foreach_addcdiv", "reciprocal", "rsqrt", "pow"})
EPSILON = {torch.float16: 1e-4, torch.bfloat16: 1e-6}
"""What is added to a divisor, where the precision has no 1e-8 or it is lost beside anything."""


@breach("optimizer-underflow")
def optimizer_underflow(scene: Scene) -> Telling:
    bad: list[Tensor] = scene.facts["parameters"]
    count = sum(int((~p.detach().isfinite()).sum()) for p in bad)
    of = sum(p.numel() for p in bad)
    evidence: dict[str, Any] = {"name": scene.parameters[0], "bad_elements": count, "elements": of}
    watch = scene.breach.optimizer
    optimizer = watch.ref() if isinstance(watch, OptimizerWatch) else None
    module = module_of_parameter(scene.parameters[0]) if scene.hangs_in_module(scene.parameters[0]) else None
    step = OwnStep.of(optimizer, scene.facts["counters"], scene.facts["arguments"]) if optimizer is not None else None
    ran = step.again() if step is not None else None
    if step is not None and ran is not None and ran.is_finite:
        step = step.with_little_gradients()
        ran = step.again()
    first = ran.first if ran is not None and not ran.is_finite else None
    kind = type(optimizer).__name__
    head = f"The step of {kind} made {listed(scene.parameters)} not finite although all its gradients are: "
    if optimizer is None or step is None or first is None:
        text = f"{head}{count} of {of} elements are NaN or Inf. Run again on copies, the step does not do it once more."
        return Telling(text, scene.again, (), evidence=evidence, phase="optimizer", module=module)
    evidence |= {"operator": first.op, "max_abs_operand": first.largest}
    text = f"{head}{first.name} at {at(first.line)} {_why(first)}. {count} of {of} elements became NaN or Inf."
    fixes = sorted(_cures(step, first, optimizer), key=lambda fix: not fix.verified)
    loaded: LoadedState | None = scene.facts["loaded"]
    if loaded is not None:
        text += _was_lowered(loaded)
        evidence |= {"lowered_state": list(loaded.names), "state_dtype": dtype_name(loaded.dtype)}
        fixes = [_kept_wide(step, loaded, scene.optimizer), *(fix for fix in fixes if fix.action != "fp32-parameters")]
    return Telling(
        text,
        first.line or scene.again,
        tuple(fixes),
        evidence=evidence,
        module=module,
        dtype=dtype_name(first.dtype),
        phase="optimizer",
        op=first.op,
    )


def _was_lowered(loaded: LoadedState) -> str:
    low = dtype_name(loaded.dtype)
    return (
        f" Its state {listed(list(loaded.names))} was in float32 in the checkpoint that was loaded at {at(loaded.where)}, and is "
        f"in {low} since: Optimizer.load_state_dict gives state the type of the parameter that it is kept for."
    )


def _kept_wide(step: OwnStep, loaded: LoadedState, name: str) -> Fix:
    """State in float32 beside weights of low precision, tried on what is left of it."""
    how = (
        f"give the state back what the checkpoint holds, behind {at(loaded.where)}, with `saved` for what is loaded there: "
        f"for s, kept in zip({name}.state.values(), saved['state'].values()): s.update(kept)"
    )
    return _fix("fp32-parameters", how, step.again(state_dtype=torch.float32))


def _is_by_zero(first: BadOperator) -> bool:
    return first.name in DIVISIONS and first.zero_at is not None


def _is_below_zero(first: BadOperator) -> bool:
    return first.name in ROOTS and first.lowest < 0 and first.gives_nan  # (a square of it overflows to an infinity)


def _why(first: BadOperator) -> str:
    if _is_below_zero(first):
        return f"was given {number(first.lowest)}, outside its domain (0 or more)"
    if _is_by_zero(first):
        return "divides by 0"
    limit = number(torch.finfo(first.dtype).max)
    return f"gives a result that is not finite from operands of up to {number(first.largest)} ({first.dtype} ends at {limit})"


def _cures(step: OwnStep, first: BadOperator, optimizer: Optimizer) -> Iterator[Fix]:
    """Each tried on the step that failed, on copies."""
    if _is_by_zero(first):
        eps = EPSILON.get(first.dtype, 1e-8)
        ran = step.again(lambda func, args: _with_epsilon(args, first.zero_at, eps), first)
        code = first.line.location().code if first.line is not None else "the division"
        yield _fix("add-epsilon", _changed_line(first, eps) or f"add {eps:g} to what is 0 there: {code}", ran)
    if _is_below_zero(first):
        least = EPSILON.get(first.dtype, 1e-8)
        ran = step.again(lambda func, args: (args[0].clamp(min=least), *args[1:]), first)
        code = first.line.location().code if first.line is not None else "the root"
        yield _fix("clamp", f"clamp(min={least:g}) what is below 0 there: {code}", ran)
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if any(is_low_precision(dtype) for dtype in dtypes):
        ran = step.again(dtype=torch.float32)
        yield _fix("fp32-parameters", "keep the model in float32 (no .half()) and run it under torch.autocast", ran)
    if not _is_by_zero(first):
        norm = _norm(optimizer)
        if norm > 1.0:
            ran = step.again(gradient_factor=1.0 / norm)
            how = "before the step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
            yield _fix("clip-gradients", f"{how}  # their norm is {number(norm)}", ran)


def _fix(action: str, how: str, ran: SteppedAgain | None) -> Fix:
    verified = None if ran is None else ran.is_finite
    outcome = {None: None, True: "the same update is finite", False: "it is still not finite"}[verified]
    return Fix(action, None, how, verified, outcome)


def _changed_line(first: BadOperator, eps: float) -> str | None:
    """The line with `eps` in the divisor that is 0; None where its text does not tell which one that is."""
    line = line_of_code(first.line) if first.line is not None else None
    if line is None or first.zero_at is None:
        return None
    operator = first.op.split(".")[1]
    expressions = line.expressions(operator.rstrip("_"), operator.endswith("_"))
    operands = [(e, e.operand(first.name, first.zero_at, None)) for e in expressions]
    changes = [(e, operand) for e, operand in operands if operand is not None and not is_python_number(operand)]

    def is_lost(value: float) -> bool:
        return 0 < value < eps and float(torch.tensor(value, dtype=first.dtype)) == 0

    return with_changes(line, changes, plus(eps, is_lost)) if len(changes) == 1 else None


def _with_epsilon(args: tuple[Any, ...], position: int | None, eps: float) -> tuple[Any, ...]:
    """The operands with `eps` added to the divisor."""
    return tuple(_plus(arg, eps) if i == position else arg for i, arg in enumerate(args))


def _plus(value: Any, eps: float) -> Any:
    return [item + eps for item in value] if isinstance(value, (list, tuple)) else value + eps


def _norm(optimizer: Optimizer) -> float:
    grads = [p.grad.double().norm() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return float(torch.stack(grads).norm()) if grads else 0.0
