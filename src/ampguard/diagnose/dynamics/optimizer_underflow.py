"""optimizer-underflow: gradients are finite and the optimizer's own arithmetic is not.

What happens   Adam divides by sqrt(exp_avg_sq) + eps. With float16 weights its state is float16 too: eps = 1e-8 is 0
               there, and the square of a gradient below 2.4e-4 as well. The update is 0/0 or x/0.
Why it hurts   the weights are NaN after a step whose loss and gradients were fine; every later step fails.
Instead        keep the weights in float32 and use autocast (or float32 master weights); at the very least an eps that
               the precision has, such as 1e-4.
               An optimizer of your own: its divisors need an epsilon; the line of its step is named.
Not this       gradients that are not finite: see gradient-overflow. Updates too small to count: see lost-update.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.capture.frames import is_user_code
from ampguard.capture.sampling.weights import watchable
from ampguard.diagnose.dynamics.alone import Update, update_alone
from ampguard.diagnose.dynamics.finding import Situation, cause
from ampguard.diagnose.protocol.owners import tensor_called
from ampguard.diagnose.words import number
from ampguard.incident import Fix, Incident
from ampguard.numerics import dtype_name, is_finite, is_low_precision
from ampguard.replay.names import module_of_parameter

ELEMENTS = 512
SAFE_EPS = 1e-4
WIDER = {
    "fp32-parameters": "keep the model in float32 (no .half()) and run it under torch.autocast",
    "master-weights": "let the optimizer update float32 copies of the weights, and copy them back",
}


@dataclass(frozen=True, slots=True)
class Poisoned:
    """A parameter that its optimizer made non-finite, and where."""

    optimizer: Optimizer
    parameter: Tensor
    group: dict[str, Any]
    bad: Tensor
    update: Update


@cause("optimizer-underflow", asked=("look", "failure"))
def optimizer_underflow(situation: Situation) -> Incident | None:
    incident = situation.failure
    if incident is None:
        sample = situation.trajectory.looks[-1] if situation.trajectory.looks else None
        if sample is None or sample.weight_norm is None or is_finite(torch.tensor(sample.weight_norm)):
            return None
    elif incident.cause != "nonfinite-parameter":
        return None
    asked = [o for o in situation.optimizers if incident is not None or not is_of_the_script(o)]
    is_behind = incident is not None
    found = next((p for o in asked if (p := poisoned(o, is_behind)) is not None), None)
    if found is not None:
        return told(found, situation)
    starved = next((s for o in asked if is_behind and (s := starved_state(o)) is not None), None)
    return None if starved is None else told_of_state(starved, situation)


def is_of_the_script(optimizer: Optimizer) -> bool:
    """Whether its `step` is the script's own: that one is run again operator by operator, which tells the line."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    return code is not None and is_user_code(code)


def poisoned(optimizer: Optimizer, is_behind: bool) -> Poisoned | None:
    """The first parameter that only its own precision, or an eps of 0, made non-finite: the same update is finite otherwise.

    `is_behind`: a loss has come of the weights, perhaps with its gradients in the place of those of the update.
    """
    for parameter in watchable(optimizer):
        if is_finite(parameter) or not optimizer.state.get(parameter):
            continue
        if not is_behind and gradient_in_place(parameter) is not None:
            continue
        bad = (~torch.isfinite(parameter.detach())).reshape(-1).nonzero().reshape(-1)
        some = bad[:ELEMENTS]
        own = update_alone(optimizer, parameter, some, gradient_of=gradient_in_place(parameter))
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        if (
            own is None
            or own.is_finite
            or not (is_finite_wide(optimizer, parameter, some) or needs_eps(optimizer, group, parameter, some))
        ):
            continue
        return Poisoned(optimizer, parameter, group, bad, own)
    return None


@dataclass(frozen=True, slots=True)
class Starved:
    """A parameter that an optimizer of the script's made non-finite exactly where a state of low precision is 0."""

    optimizer: Optimizer
    parameter: Tensor
    bad: Tensor
    key: str
    state: Tensor
    max_abs_gradient: float | None
    """None where the gradients that made it are gone."""


def starved_state(optimizer: Optimizer) -> Starved | None:
    """Where elements went bad, and hardly anywhere else, a state in low precision is 0.

    A second moment is not 0 where there was a gradient, in numbers with enough range.
    """
    if not is_of_the_script(optimizer):
        return None
    for parameter in watchable(optimizer):
        if is_finite(parameter):
            continue
        bad = (~torch.isfinite(parameter.detach())).reshape(-1).nonzero().reshape(-1)
        for key, state in optimizer.state.get(parameter, {}).items():
            if not isinstance(state, Tensor) or not is_low_precision(state.dtype) or state.shape != parameter.shape:
                continue
            zeros = int((state == 0).sum())
            if not bool(state.reshape(-1)[bad].any()) and zeros <= 2 * bad.numel() and zeros < state.numel():
                return Starved(optimizer, parameter, bad, str(key), state, _largest_gradient(parameter, bad))
    return None


def _largest_gradient(parameter: Tensor, elements: Tensor) -> float | None:
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided or not is_finite(gradient):
        return None
    return float(gradient.detach().reshape(-1)[elements].abs().max())


def told_of_state(found: Starved, situation: Situation) -> Incident:
    dtype, peak = dtype_name(found.state.dtype), found.max_abs_gradient
    least = number(float(torch.finfo(found.state.dtype).smallest_normal))
    where = f", where gradients reach {number(peak)}" if peak is not None else ""
    because = (
        f"because its state `{found.key}`, which is kept in {dtype}, is 0 in all of these{where}: it fell below what {dtype} "
        f"holds, and the update divides by it. An eps far below {least} is 0 in {dtype} as well."
    )
    facts = {"state": found.key, "state_dtype": dtype, "state_zeros": found.bad.numel(), "max_abs_gradient": peak}
    wider = Fix("fp32-parameters", None, f"keep `{found.key}` in float32, and divide in float32", None)
    eps = Fix("add-epsilon", None, f"an eps that {dtype} has, added before the division: {SAFE_EPS:g}", None)
    return _incident(found, situation, because, facts, (wider, eps), dtype, None)


def is_finite_wide(optimizer: Optimizer, parameter: Tensor, elements: Tensor) -> bool:
    """Whether these elements of low-precision weights could be updated in float32."""
    if not is_low_precision(parameter.dtype):
        return False
    wide = update_alone(optimizer, parameter, elements, torch.float32, gradient_in_place(parameter))
    return wide is not None and wide.is_finite


def needs_eps(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, elements: Tensor) -> bool:
    """Whether the optimizer was given an eps of 0, and these elements could be updated with one that is not."""
    if group.get("eps") != 0:
        return False
    safe = update_alone(optimizer, parameter, elements, gradient_of=gradient_in_place(parameter), eps=SAFE_EPS)
    return safe is not None and safe.is_finite


def gradient_in_place(parameter: Tensor) -> float | None:
    """What stands for gradients that bad weights have made bad since the update; None where they are still its own.

    The state that the update has left is made of those: it is finite if they were.
    """
    return 0.0 if parameter.grad is not None and not is_finite(parameter.grad) else None


def told(found: Poisoned, situation: Situation) -> Incident:
    wider = is_finite_wide(found.optimizer, found.parameter, found.bad[:ELEMENTS])
    cure = (
        "The same update in float32 is finite." if wider else f"With an eps of {SAFE_EPS:g} the same update is finite."
    )
    zeros, facts = zeros_of(found)
    dtype = dtype_name(found.parameter.dtype)
    return _incident(
        found, situation, f"because {zeros}. {cure}", facts, fixes(found), dtype, found.update.first_bad_op
    )


def _incident(
    found: Poisoned | Starved,
    situation: Situation,
    because: str,
    facts: dict[str, Any],
    cures: tuple[Fix, ...],
    dtype: str | None,
    op: str | None,
) -> Incident:
    """A parameter that became non-finite in an update, and why."""
    parameter, failure = found.parameter, situation.failure
    name = situation.name_of(parameter) or tensor_called(parameter, "parameter")
    line = situation.lines.get(id(found.optimizer))
    count, size = found.bad.numel(), parameter.numel()
    return Incident(
        step=situation.step if failure is None else max(0, failure.step - 1),
        rank=situation.rank,
        mode="train",
        phase="optimizer",
        severity="error",
        cause="optimizer-underflow",
        module=module_of_parameter(name) if situation.name_of(parameter) is not None else None,
        op=op,
        dtype=dtype,
        location=line.location() if line is not None else None,
        explanation=(
            f"{type(found.optimizer).__name__}'s update of {name} is not finite although its gradients are: {count} of {size} "
            f"elements of it became NaN or Inf, {because}"
        ),
        evidence={"name": name, "bad_elements": count, "elements": size, **facts},
        fixes=cures,
    )


def zeros_of(found: Poisoned) -> tuple[str, dict[str, Any]]:
    """What became 0 in the weights' precision, in words and in numbers."""
    dtype = dtype_name(found.parameter.dtype)
    facts: dict[str, Any] = {}
    words = []
    eps = found.group.get("eps")
    if isinstance(eps, (int, float)):
        rounded = float(torch.tensor(float(eps), dtype=found.parameter.dtype))
        facts |= {"eps": float(eps), "eps_in_low_precision": rounded}
        if rounded == 0:
            words.append(f"eps {eps:g} is 0 in {dtype}" if eps else "eps is 0")
    state = found.optimizer.state.get(found.parameter, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == found.parameter.shape and value.dtype == found.parameter.dtype:
            there = value.reshape(-1)[found.bad]
            zeros = int((there == 0).sum())
            if zeros and "sq" in key:
                facts |= {"state": key, "state_zeros": zeros}
                words.append(f"{key} is 0 in {zeros} of these")
    gradient = found.parameter.grad
    if gradient is not None and gradient_in_place(found.parameter) is None:
        facts["max_abs_gradient"] = float(gradient.reshape(-1)[found.bad].abs().max())
    peak = facts.get("max_abs_gradient")
    size = "" if peak is None else f", where the gradient is {f'at most {number(peak)}' if peak else '0'}"
    return (" and ".join(words) or f"its arithmetic leaves {dtype}'s range") + size, facts


def fixes(found: Poisoned) -> tuple[Fix, ...]:
    """Each tried on the elements that went bad."""
    optimizer, parameter, elements = found.optimizer, found.parameter, found.bad[:ELEMENTS]
    tried: list[Fix] = []
    if is_low_precision(parameter.dtype):
        ok = is_finite_wide(optimizer, parameter, elements)
        outcome = "the same update is finite in float32" if ok else None
        for action, how in WIDER.items():
            tried.append(Fix(action, None, how, ok, outcome))
    given = gradient_in_place(parameter)
    has_eps = "eps" in found.group
    safe = update_alone(optimizer, parameter, elements, gradient_of=given, eps=SAFE_EPS) if has_eps else None
    if safe is not None:
        how = f"{type(optimizer).__name__}(..., eps={SAFE_EPS:g}): eps must not be 0 in {parameter.dtype}"
        outcome = "the same update is finite" if safe.is_finite else "it is still not finite"
        tried.append(Fix("add-epsilon", None, how, safe.is_finite, outcome))
    return tuple(tried)
