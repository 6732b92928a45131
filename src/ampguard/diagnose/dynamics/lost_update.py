"""lost-update: updates are below the spacing of the weights' own low precision.

What happens   a bfloat16 number near 1 has neighbours 0.004 and 0.008 away. weight - 1e-3 is rounded back to weight, in
               every step: the weight has a gradient and never moves. Weight decay (lr * wd * weight) is lost first.
Why it hurts   nothing fails. The loss stops too early, and a smaller learning rate makes it worse.
Instead        float32 weights under autocast, or float32 master weights in the optimizer; stochastic rounding or Kahan
               summation where memory forbids that.
Not this       gradients that are 0 already: see gradient-underflow. An optimizer that rounds at random, keeps float32 copies
               in its state, or carries along what was rounded away: its weights move later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard.capture.record import Line
from ampguard.capture.sampling.hand_updates import HandUpdate
from ampguard.capture.sampling.rates import rate_of_group
from ampguard.capture.sampling.weights import LayerSample, watchable
from ampguard.diagnose.dynamics.alone import Update, update_alone
from ampguard.diagnose.dynamics.by_hand import again_in_float32
from ampguard.diagnose.dynamics.finding import Situation, cause
from ampguard.diagnose.protocol.owners import tensor_called
from ampguard.incident import Fix, Incident
from ampguard.numerics import dtype_name, is_low_precision
from ampguard.replay.names import module_of_parameter

MIN_STEPS = 16
MIN_LOOKS = 4
LOST_SHARE = 0.5
ELEMENTS = 1024
MOVES_IN_FLOAT32 = 0.9
SHOWN = 8
TRIES = 8
"""How often each element is updated again: what is rounded at random moves in one of many."""
KEPT_SHARE = 0.5
CARRIED_WITHIN = 0.25
CARRIED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Lost:
    """A layer most of whose weights have had gradients since `since` and have never moved."""

    name: str
    share: float
    in_float32: float
    step_size: float
    spacing: float
    layer: LayerSample
    parameter: Tensor
    line: Line | None = None
    """Of an update that the script makes by itself."""


@cause("lost-update", asked=("look", "end"))
def lost_update(situation: Situation) -> Incident | None:
    looks = situation.trajectory.looks
    update = situation.by_hand
    if len(looks) < MIN_LOOKS or situation.step < MIN_STEPS or (update is None and usual_rate(situation) == 0):
        return None
    layers = {id(p): layer for layer in looks[-1].layers if (p := layer.parameter()) is not None}
    candidates = [layer for layer in layers.values() if is_stuck(layer, situation.step)]
    if not candidates:
        return None
    seen = [layer for layer in situation.trajectory.layers.values() if layer.active]
    stuck, active = sum(layer.stuck for layer in seen), sum(layer.active for layer in seen)
    if stuck < LOST_SHARE * active:
        return None
    lost = [found for o in situation.optimizers for found in lost_layers(o, candidates, situation)]
    lost += lost_by_hand(update, candidates, situation) if update is not None else []
    if not lost:
        return None
    return told(lost, stuck / active, situation)


def is_stuck(layer: LayerSample, step: int) -> bool:
    """Whether most of its sampled weights stand where they stood long ago, in spite of their gradients."""
    return (
        layer.active >= 0.1 * layer.elements
        and layer.stuck > LOST_SHARE * layer.active
        and layer.stuck_now > LOST_SHARE * layer.active_now
        and step - layer.since >= MIN_STEPS
    )


def lost_layers(optimizer: Optimizer, candidates: list[LayerSample], situation: Situation) -> list[Lost]:
    """Those of the candidates whose weights do move if the same update is computed in float32."""
    own = {id(p) for p in watchable(optimizer) if is_low_precision(p.dtype)}
    found = []
    for layer in candidates:
        parameter = layer.parameter()
        if parameter is None or id(parameter) not in own:
            continue
        elements = elements_with_gradient(parameter)
        wide = update_alone(
            optimizer, parameter, elements, torch.float32, **rate_of_step(parameter, optimizer, situation)
        )
        if wide is None or not elements.numel() or float(wide.moved.float().mean()) < MOVES_IN_FLOAT32:
            continue
        size = float((wide.after - wide.before).abs().median())
        spacing = float(spacing_of(wide.before, parameter.dtype).median())
        if size < spacing and not is_kept(optimizer, parameter, elements, situation):
            name = situation.name_of(parameter) or tensor_called(parameter, "parameter")
            share = layer.stuck / layer.active
            found.append(Lost(name, share, float(wide.moved.float().mean()), size, spacing, layer, parameter))
    return sorted(found, key=lambda lost: -lost.share * lost.parameter.numel())


def is_kept(optimizer: Optimizer, parameter: Tensor, elements: Tensor, situation: Situation) -> bool:
    """Whether what the weights' precision rounds away is not lost: the optimizer rounds at random, or carries the rest along.

    Of rounding at random the mean is the update itself. What is carried along stands in one of the optimizer's own tensors:
    the rest alone (Kahan summation), or added to the weight (a float32 copy).
    """
    rate = rate_of_step(parameter, optimizer, situation)
    again = elements.repeat(TRIES)
    wide = update_alone(optimizer, parameter, again, torch.float32, **rate)
    own = update_alone(optimizer, parameter, again, parameter.dtype, **rate)
    if wide is None or own is None:
        return False
    update = wide.after - wide.before
    is_small = (update != 0) & (update.abs() < spacing_of(wide.before, parameter.dtype) / 2)
    if not bool(is_small.any()):
        return False
    update, moved = update[is_small], (own.after.float() - wide.before)[is_small]
    if float((moved * update.sign()).sum() / update.abs().sum()) > KEPT_SHARE:
        return True
    rest = update - moved
    carried = [
        (of_own[is_small], of_wide[is_small]) for of_own, of_wide in zip(carry_of(own), carry_of(wide), strict=False)
    ]
    return any(is_alike(kept, rest) and is_alike(rest + left, rest) for kept, left in carried)


def carry_of(update: Update) -> list[Tensor]:
    """What each of the optimizer's tensors may carry to the next update; nothing where the weights have taken all of it."""
    states = [state.float() for state in update.state]
    return [rest for state in states for rest in (state, -state, state - update.after.float())]


def is_alike(values: Tensor, others: Tensor) -> bool:
    """Whether nearly all of them are the same numbers, but for the rounding of a low precision."""
    return float(((values - others).abs() <= CARRIED_WITHIN * others.abs()).float().mean()) > CARRIED_SHARE


def lost_by_hand(update: HandUpdate, candidates: list[LayerSample], situation: Situation) -> list[Lost]:
    """The same of weights that the script updates by itself: the operators of its update are run once more."""
    found = []
    for layer in candidates:
        parameter = layer.parameter()
        values = update.values_of(parameter) if parameter is not None else None
        if parameter is None or values is None:
            continue
        elements = values[-1].reshape(-1).nonzero().reshape(-1)[:ELEMENTS]
        wide = again_in_float32(update, parameter, elements)
        if wide is None or not elements.numel():
            continue
        moves = float((wide.after != wide.before).float().mean())
        size = float((wide.after - wide.before).abs().median())
        spacing = float(spacing_of(wide.before, parameter.dtype).median())
        if moves >= MOVES_IN_FLOAT32 and size < spacing:
            name = situation.name_of(parameter) or tensor_called(parameter, "parameter")
            share = layer.stuck / layer.active
            found.append(Lost(name, share, moves, size, spacing, layer, parameter, wide.line))
    return sorted(found, key=lambda lost: -lost.share * lost.parameter.numel())


def usual_rate(situation: Situation) -> float:
    """The largest learning rate of the looks so far: at the end of a schedule it is 0."""
    return max(look.rate for look in situation.trajectory.looks)


def rate_of_step(parameter: Tensor, optimizer: Optimizer, situation: Situation) -> dict[str, float]:
    """The learning rate to try an update with, where the present one is 0."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return {"lr": usual_rate(situation)} if "lr" in group and rate_of_group(group) == 0 else {}


def elements_with_gradient(parameter: Tensor) -> Tensor:
    """Flat positions of elements with a gradient; the first ones where the gradient has been cleared."""
    gradient = parameter.grad
    if gradient is None or not bool(gradient.any()):
        return torch.arange(min(parameter.numel(), ELEMENTS), device=parameter.device)
    return gradient.reshape(-1).nonzero().reshape(-1)[:ELEMENTS]


def spacing_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each value to its neighbour in `dtype`."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(values.abs().clamp_min(float(info.tiny))))
    return torch.exp2(exponent) * info.eps


def told(lost: list[Lost], share: float, situation: Situation) -> Incident:
    worst = lost[0]
    dtype = dtype_name(worst.parameter.dtype)
    line = next((situation.lines[id(o)] for o in situation.optimizers if id(o) in situation.lines), worst.line)
    is_named = situation.name_of(worst.parameter) is not None and isinstance(worst.parameter, nn.Parameter)
    since = worst.layer.since
    names = [item.name for item in lost[:SHOWN]]
    return Incident(
        step=since,
        rank=situation.rank,
        mode="train",
        phase="optimizer",
        severity="warning",
        cause="lost-update",
        module=module_of_parameter(worst.name) if is_named else None,
        op=None,
        dtype=dtype,
        location=line.location() if line is not None else None,
        explanation=(
            f"{worst.share:.0%} of the weights of {worst.name} have not moved since step {since}, although they have "
            f"gradients: an update is {worst.step_size:.2g} and {dtype}'s spacing there {worst.spacing:.2g}, so it is "
            f"rounded away. Of all sampled {dtype} weights {share:.0%} never moved; in float32 the same update moves "
            f"{worst.in_float32:.0%}."
        ),
        evidence={
            "stuck_share": share,
            "since_step": since,
            "noticed_at_step": situation.step,
            "layers": names,
            "layer_stuck_share": worst.share,
            "update": worst.step_size,
            "spacing": worst.spacing,
            "moves_in_float32": worst.in_float32,
        },
        fixes=fixes(worst),
    )


def fixes(worst: Lost) -> tuple[Fix, ...]:
    outcome = f"the same update in float32 moves {worst.in_float32:.0%} of the weights"
    return (
        Fix(
            "fp32-parameters", None, "keep the weights in float32 and run the model under torch.autocast", True, outcome
        ),
        Fix(
            "master-weights",
            None,
            "let the optimizer update float32 copies of the weights, and copy them back",
            True,
            outcome,
        ),
        Fix("stochastic-rounding", None, "round the updated weights up or down at random, in proportion"),
    )
