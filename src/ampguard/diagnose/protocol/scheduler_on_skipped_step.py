"""scheduler-on-skipped-step: a learning-rate scheduler moves on although the optimizer's step was skipped.

What happens   the scaler found Inf in the gradients and skipped the step; scheduler.step() is called all the same.
Why it hurts   that part of the schedule is used up without an update: a warm-up gets shorter, the first rate is never used.
               A few lost moves while the scale settles are nothing (info). Where they are a material part of the schedule (of its
               length, of its warm-up, of a run whose schedule has no length) or where steps go on being skipped, it runs
               ahead (warning).
Instead        step the scheduler only where the scale did not fall:
               scale = scaler.get_scale(); scaler.step(opt); scaler.update(); if scaler.get_scale() >= scale: scheduler.step()
Not this       a scheduler that is stepped once an epoch.
"""

from __future__ import annotations

import re
from typing import Any

from ampguard.diagnose.protocol.framework import gate_instead
from ampguard.diagnose.protocol.scene import Scene, at, is_one_line, statement
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("scheduler-on-skipped-step")
def scheduler_on_skipped_step(scene: Scene) -> Telling:
    facts, name, scaler = scene.facts, scene.optimizer, scene.scaler
    lost, moves = facts["lost"], facts["moves"]
    settling = facts["settling"]
    rates = facts.get("rates") or []
    rate = f" It stands at a learning rate of {rates[0]:.3g}." if rates else ""
    text = (
        f"The learning-rate scheduler moved on without the optimizer: {lost} of its {moves} moves at {at(scene.again)} followed "
        f"a skipped step of `{name}`{_stepped(scene)}.{rate}"
    )
    text += _part_of_schedule(facts)
    if settling:
        text += " So few are normal while the loss scale settles."
    gate = (
        f"scale = {scaler}.get_scale(); {scaler}.step({_given(scene)}); {scaler}.update(); "
        f"if {scaler}.get_scale() >= scale: {_move(scene)}"
    )
    how = gate_instead(scene) or f"step the scheduler only after a step that was not skipped: {gate}"
    fix = order(scene, how, "gate-scheduler")
    fixes = (fix, order(scene, "or leave it: the scale settles in a few steps", "wait")) if settling else (fix,)
    evidence: dict[str, Any] = {"lost_moves": lost, "moves": moves, "scheduler": type(facts["scheduler"]).__name__}
    if facts["length"] is not None:
        evidence["schedule_moves"] = facts["length"]
    return Telling(text, scene.again, fixes, severity="info" if settling else "warning", evidence=evidence)


def _part_of_schedule(facts: dict[str, Any]) -> str:
    """How much of the schedule the optimizer has not seen."""
    lost, length, warm_up = facts["lost"], facts["length"], facts["warm_up"]
    if length is None:
        return ""
    text = f" That is {100 * lost / length:.2g}% of the {length:g} moves of its schedule"
    if warm_up is not None and 0 < warm_up < length:
        text += f", whose first part has {warm_up:.4g}"
    return text + "."


def _stepped(scene: Scene) -> str:
    """Where, unless one line of the script (a framework's `fit`) does both."""
    return "" if is_one_line(scene) or scene.first is None else f", at {at(scene.first)}"


def _given(scene: Scene) -> str:
    """What the script gives the scaler to step: perhaps a wrapper (Lookahead) around the optimizer that the scheduler moves."""
    code = statement(scene.first)
    given = re.search(rf"{re.escape(scene.scaler)}\.step\(([\w.]+(?:\[[^\[\]]*\])?)\)", code)
    return given[1] if given is not None else scene.optimizer


def _move(scene: Scene) -> str:
    """The call that moves the scheduler, as the script has it."""
    code = statement(scene.again)
    is_call = (
        ".step(" in code and code.endswith(")") and not code.startswith(("for ", "if ", "with ", "while ", "return"))
    )
    return code if is_call else "scheduler.step()"
