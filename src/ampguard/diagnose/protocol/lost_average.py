"""lost-update, of an average of the weights that the script keeps by itself in low precision.

What happens   `mean.mul_(0.999).add_(weight, alpha=0.001)` in bfloat16: what is added is less than half of the distance to the
               next number, and is rounded away. The average stays what it was when it was copied.
Why it hurts   nothing fails. The teacher, or the model that is evaluated, is the untrained one.
Instead        keep the average in float32 (and cast a copy of it where it is used).
"""

from __future__ import annotations

import dataclasses

from ampguard.capture.protocol.averages import Lost
from ampguard.capture.protocol.hidden_averages import StandsStill
from ampguard.diagnose.protocol.scene import Scene, at, listed
from ampguard.diagnose.protocol.telling import Telling, breach
from ampguard.incident import Fix
from ampguard.numerics import dtype_name
from ampguard.replay.names import module_of_parameter


@breach("lost-update")
def lost_average(scene: Scene) -> Telling:
    if scene.facts.get("hidden") is not None:
        return _hidden(scene)
    lost: list[Lost] = scene.facts["lost"]
    worst, dtype = lost[0], dtype_name(lost[0].dtype)
    name = scene.parameters[0]
    of = bool(scene.facts.get("is_of_weight"))
    what = f"makes that of {listed(scene.parameters)} anew" if of else f"writes to {listed(scene.parameters)}"
    text = (
        f"An average of the weights does not move: {at(scene.again)} {what} in every step, and "
        f"{worst.share:.0%} of {'that of ' if of else ''}{name} stand where they stood at step {worst.since}. The lines move "
        f"them by {worst.step_size:.2g}, {dtype}'s spacing there is {worst.spacing:.2g}: it is rounded away. In float32 "
        f"they move {worst.in_float32:.0%}."
    )
    how = "keep the average in float32: copy.deepcopy(model).float(), and add weight.float()"
    if of:
        how = "keep the average in float32: weight.detach().float().clone() to begin with, and add weight.float()"
    outcome = f"the same lines in float32 move {worst.in_float32:.0%} of it"
    fixes = (
        Fix("fp32-parameters", None, how, True, outcome),
        Fix("stochastic-rounding", None, "round what is written up or down at random, in proportion"),
    )
    telling = _telling(scene, worst, text, fixes)
    telling.evidence["moves_in_float32"] = worst.in_float32
    return dataclasses.replace(telling, op=str(worst.last.func), dtype=dtype)


def _hidden(scene: Scene) -> Telling:
    """An average that a module writes in its own forward pass: by which lines was not recorded."""
    still: StandsStill = scene.facts["hidden"]
    name, dtype = scene.parameters[0], dtype_name(still.parameter.dtype)
    text = (
        f"An average of the weights hardly moves: {listed(scene.parameters)} {'is' if len(scene.parameters) == 1 else 'are'} "
        f"written in each call at {at(scene.again)}, and {still.share:.0%} of {name} stand where they stood at step "
        f"{still.since}, though the trained weights have gone further away. Only elements that are far from those have moved, "
        f"and towards them: what is added to the others, about {still.step_size:.2g}, is less than half of {dtype}'s spacing "
        f"there, {still.spacing:.2g}, and is rounded away."
    )
    how = "keep the average in float32 (the momentum encoder's weights), and add the trained weights' .float()"
    fixes = (
        Fix("fp32-parameters", None, how),
        Fix("stochastic-rounding", None, "round what is written up or down at random, in proportion"),
    )
    return _telling(scene, still, text, fixes)


def _telling(scene: Scene, of: Lost | StandsStill, text: str, fixes: tuple[Fix, ...]) -> Telling:
    name = scene.parameters[0]
    evidence = {
        "stuck_share": of.share,
        "since_step": of.since,
        "noticed_at_step": scene.facts["noticed"],
        "layers": list(scene.parameters),
        "update": of.step_size,
        "spacing": of.spacing,
    }
    return Telling(
        text,
        scene.again,
        fixes,
        severity="warning",
        evidence=evidence,
        module=module_of_parameter(name) if scene.hangs_in_module(name) else None,
        dtype=dtype_name(of.parameter.dtype),
        phase="optimizer",
    )
