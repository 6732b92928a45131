"""needless-scaler: gradient scaling with bfloat16 or float32, where it does nothing useful.

What happens   a GradScaler stays on although no forward pass runs in float16: bfloat16 autocast, or autocast switched off.
Why it hurts   results are the same; every step pays for scaling, unscaling and a look at found_inf that waits for the
               device, and at a large scale a healthy step may be skipped.
Instead        no scaler, or GradScaler(enabled=use_float16).
"""

from __future__ import annotations

from typing import Any

from ampguard.diagnose.protocol.scene import Scene, number, statement
from ampguard.diagnose.protocol.telling import Telling, breach, order

OFF = "{} = torch.amp.GradScaler(enabled=False)"


@breach("needless-scaler")
def needless_scaler(scene: Scene) -> Telling:
    facts, scaler = scene.facts, scene.scaler
    dtype = facts["dtype"]
    if facts.get("idle"):
        return _idle(scene)
    why = "with float32's range gradients" if dtype == "bfloat16" else "there gradients"
    text = (
        f"`{scaler}` scales the loss although nothing is computed in float16: every forward pass of {facts['steps']} "
        f"steps ran in {dtype} ({_computed(facts)}), and {why} do not underflow. {_scale(facts)} Scaling costs a pass over "
        f"the gradients and a wait for the device."
    )
    fix = order(
        scene,
        f"leave it out, or switch it off: {switched_off(statement(scene.again)) or OFF.format(scaler)}",
        "remove-scaler",
        scaler,
    )
    keys = ("steps", "skipped", "first_scale", "scale", "parameter_dtypes")
    evidence = {**{key: facts[key] for key in keys}, "autocast_regions": facts["regions"], "float16_regions": 0}
    return Telling(text, scene.again, (fix,), severity="warning", dtype=dtype, evidence=evidence)


def _idle(scene: Scene) -> Telling:
    """It was needed at first."""
    facts, scaler, dtype = scene.facts, scene.scaler, scene.facts["dtype"]
    text = (
        f"`{scaler}` goes on scaling the loss although nothing is computed in float16 any more: since step {facts['since']} at "
        f"the latest every region of autocast is of {dtype}, whose gradients do not underflow. Scaling costs a pass over the "
        f"gradients and a wait for the device."
    )
    how = f"leave it out where autocast changes to {dtype}: {OFF.format(scaler)}"
    evidence = {"scale": facts["scale"], "since_step": facts["since"], "is_needed_before": True}
    fix = order(scene, how, "remove-scaler", scaler)
    return Telling(text, scene.again, (fix,), severity="warning", dtype=dtype, evidence=evidence)


def switched_off(code: str) -> str | None:
    """The statement that makes the scaler, with `enabled=False`; None where it is not written as such.

    >>> switched_off('scaler = GradScaler("cpu", init_scale=2.0 ** int(n))')
    'scaler = GradScaler("cpu", init_scale=2.0 ** int(n), enabled=False)'
    """
    head, call, rest = code.partition("GradScaler(")
    depth, end = 1, 0
    while call and depth and end < len(rest):
        depth += (rest[end] in "([{") - (rest[end] in ")]}")
        end += 1
    given = rest[: end - 1]
    if not call or depth or "enabled" in given or head.startswith(("class ", "def ", "if ", "with ", "for ")):
        return None
    return f"{head}{call}{given}{', ' if given.strip() else ''}enabled=False){rest[end:]}"


def _computed(facts: dict[str, Any]) -> str:
    """Which types were met, counted: "autocast was entered 12 times, always in bfloat16; 4 parameters are float32"."""
    regions: dict[str, int] = facts["regions"]
    entered = ", ".join(f"{n} times in {kind}" for kind, n in regions.items())
    held = ", ".join(f"{n} in {kind}" for kind, n in facts["parameter_dtypes"].items())
    autocast = f"autocast was entered {entered}, never in float16" if regions else "no region of autocast was entered"
    return f"{autocast}; parameters: {held}"


def _scale(facts: dict[str, Any]) -> str:
    """What the scale did meanwhile."""
    first, now, skipped = facts["first_scale"], facts["scale"], facts["skipped"]
    if first is None or first == now:
        moved = f"The scale stayed at {number(now)}"
    else:
        moved = f"The scale went from {number(first)} to {number(now)}"
    cost = f"and {skipped} {'step was' if skipped == 1 else 'steps were'} skipped" if skipped else "without effect"
    return f"{moved}, {cost}."
