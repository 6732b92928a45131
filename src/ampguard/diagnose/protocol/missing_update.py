"""missing-update: the scaler's update is not called, or not once an iteration.

What happens   scaler.update() is left out, or jumped over by a `continue`; or it is called without a step before it; or, with
               several optimizers, it is called after each of them, as Lightning and Accelerate do. Or it is called, and the
               scaler is thrown away: a GradScaler that is made anew in each iteration begins at its first scale again. Or the
               script itself looks for gradients that are not finite, and gives the iteration up before the scaler is asked.
Why it hurts   left out: the next iteration's unscale_() or step() "has already been called since the last update()". Once too
               often: "No inf checks were recorded prior to update.", or, where an optimizer's gradients were made before and
               are unscaled after it, they are divided by another scale than theirs, or twice, and nothing is said. Thrown
               away: where the first scale is too high, every step is skipped, nothing is learned, and nothing is said. Given
               up: nothing lowers a scale that does not fit, and one iteration after another is lost.
Instead        one scaler.update() at the end of the iteration, after the last optimizer's step, also where a step is skipped.
               One GradScaler, made before the loop.
Not this       an update after each optimizer that did no harm.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.framework import is_updated_by_framework, update_instead
from ampguard.diagnose.protocol.scene import NAMELESS, Scene, at, number, statement
from ampguard.diagnose.protocol.telling import Telling, breach, order
from ampguard.incident import Incident


@breach("missing-update")
def missing_update(scene: Scene) -> Telling | None:
    facts, name, scaler = scene.facts, scene.optimizer, scene.scaler
    if facts.get("renewed"):
        return _renewed(scene)
    if facts.get("passed_over"):
        return _passed_over(scene)
    once = f"{scaler}.step({'optimizer' if name == NAMELESS else name}); {scaler}.update()"
    if facts.get("without_step"):
        since = f"since {at(scene.first)}" if facts.get("repeated") else f"before {at(scene.again)}"
        text = (
            f"`{scaler}.update()` was called without a step: no optimizer went through the scaler {since}. PyTorch says "
            f'"No inf checks were recorded prior to update."'
        )
        how = f"call update once an iteration, right after its step (in accumulation inside the same `if`): {once}"
        if facts.get("is_second"):
            text = (
                f"`{scaler}.update()` was called twice in one iteration: first at {at(scene.first)}, again at {at(scene.again)}, "
                f'with no step between. PyTorch says "No inf checks were recorded prior to update."'
            )
            how = f"call it once an iteration, after the last optimizer's step: delete the second, {at(scene.again)}"
            if at(scene.first) == at(scene.again):
                text = (
                    f"`{scaler}.update()` was called without a step: at {at(scene.again)} it came round again, and no optimizer "
                    f'went through the scaler since. PyTorch says "No inf checks were recorded prior to update."'
                )
                how = (
                    f"call it only where a step was made, right behind it (not in a `finally`, nor where a batch is passed "
                    f"over): {once}"
                )
    elif facts.get("refused"):
        text = _left_out(scene)
        how = f"call {scaler}.update() in every iteration, also where the step is skipped (before a `continue`): {once}"
        if facts.get("reason") == "stepped-before":
            how = (
                f"call {scaler}.update() behind every {scaler}.step({name}), before it comes again, also where the scaler "
                f"has skipped it: {once}"
            )
    elif facts.get("not_unscaled"):
        text = (
            f"`{scaler}.update()` was left out: since {at(scene.first)} the scaler takes the gradients of `{name}` as unscaled "
            f"already. At {at(scene.again)} they still carry the loss scale, {scene.factor}."
        )
        how = (
            f"call {scaler}.update() once the gradients that were unscaled at {at(scene.first)} have been used or dropped, "
            f"before the next backward pass (also before a `continue`, and between the two passes of SAM): "
            f"{scaler}.step({name}) unscales the new ones then"
        )
    else:
        text = _between(scene)
        how = f"one {scaler}.update() an iteration, after the last optimizer's step: here behind {at(scene.again)}"
        if facts.get("by_hand"):
            how += (
                f"; or let the scaler divide: {scaler}.unscale_({name}), {scaler}.step({name}), then {scaler}.update()"
            )
        if is_updated_by_framework(scene):
            how = update_instead(scene) or (
                f"{how} (a framework updates inside each optimizer's step: step them all by {scaler}.step(...) yourself and "
                f"update once, or put all parameters into one optimizer)"
            )
    between = None if facts.get("refused") or facts.get("twice") else facts.get("updated_between")
    line = between if between is not None else scene.again
    fixes = [order(scene, how, target=scaler)]
    if facts.get("was_kept"):
        text += " The gradients were not cleared in between either: the next backward pass has added to unscaled ones."
        ends = "only where the window ends, right before its step"
        window = f"or, if gradients are accumulated here: {scaler}.unscale_({name}) {ends}"
        fixes.append(order(scene, window, target=scaler))
    return Telling(text, line, tuple(fixes), evidence=_evidence(scene))


def _overflow_of_scale(scene: Scene) -> Incident | None:
    """What was told of gradients that overflow for the loss scale alone."""
    overflow = scene.told("loss-scale-overflow")
    return overflow if overflow is not None and overflow.severity == "info" else None


def _where_it_fits(overflow: Incident) -> str:
    fits = overflow.evidence.get("finite_at_scale")
    return f" At a loss scale of {number(fits)} the gradients are finite." if fits is not None else ""


def _renewed(scene: Scene) -> Telling | None:
    """None where it is not the scale alone that makes the steps fail: then another scaler would not help."""
    facts, overflow = scene.facts, _overflow_of_scale(scene)
    if overflow is None:
        return None
    text = (
        f"`{scene.scaler}.update()` lowers the scale in vain: the scaler is thrown away, and a new one begins at "
        f"{number(facts['scale'])} again, made at {at(scene.first)}. {facts['skipped']} steps of `{scene.optimizer}` in a row "
        f"were skipped, and none was made: nothing is learned."
    )
    text += _where_it_fits(overflow)
    made = statement(scene.first) or f"{scene.scaler} = GradScaler(...)"
    how = f"make the scaler once, before the loop, and go on with it: {made.strip()}"
    lower = [fix for fix in overflow.fixes if fix.action == "lower-loss-scale"]
    evidence = {"renewed": facts["renewed"], "skipped": facts["skipped"], "scale": facts["scale"]}
    return Telling(
        text, scene.first or scene.again, (order(scene, how, target=scene.scaler), *lower), evidence=evidence
    )


def _passed_over(scene: Scene) -> Telling | None:
    """None where it is not the scale alone that makes gradients overflow: then to give the step up is right."""
    facts, overflow = scene.facts, _overflow_of_scale(scene)
    if overflow is None:
        return None
    name, scaler = scene.optimizer, scene.scaler
    text = (
        f"`{scaler}.step({name})` and `{scaler}.update()` are passed over where gradients are not finite: the script gives such "
        f"an iteration up by itself, at {at(scene.again)}, and nothing lowers the loss scale. {facts['passed_over']} were given "
        f"up so far, at a loss scale of {number(facts['scale'])}."
    )
    text += _where_it_fits(overflow)
    how = (
        f"leave the check to the scaler, which skips such a step and lowers the scale: {scaler}.step({name}); "
        f"{scaler}.update() in every iteration, before a `continue` too"
    )
    evidence = {"passed_over": facts["passed_over"], "scale": facts["scale"]}
    return Telling(text, scene.again, (order(scene, how, target=scaler),), evidence=evidence)


def _left_out(scene: Scene) -> str:
    facts = scene.facts
    when = "after the next backward pass" if facts.get("next_iteration") else "without a backward pass between"
    jumped = (
        " The first found Inf or NaN, and the script left that iteration early." if facts.get("first_found_inf") else ""
    )
    return (
        f"`{scene.scaler}.update()` was left out: for `{scene.optimizer}` the scaler still remembers {at(scene.first)} when "
        f"{at(scene.again)} comes, {when}.{jumped} PyTorch refuses the second."
    )


def _between(scene: Scene) -> str:
    facts = scene.facts
    before = f"`{scene.scaler}.update()` came between a backward pass and the step of `{scene.optimizer}`: "
    after = f" The scale was updated at {at(facts.get('updated_between'))}. The gradients are {scene.factor}."
    if facts.get("twice"):
        done = "they had been unscaled, the update made the scaler forget it, and they were divided again at"
        return f"{before}{done} {at(scene.again)}.{after}"
    scales = ", ".join(number(s) for s in facts.get("scales", []))
    if facts.get("by_hand"):
        by = number(facts["divided_by"])
        done = f"the script has divided them itself by {by}, the scale after it, before {at(scene.again)}"
        return f"{before}they carry the scale {scales}, and {done}.{after}"
    return f"{before}they carry the scale {scales} and were divided by {number(facts['divided_by'])} at {at(scene.again)}.{after}"


def _evidence(scene: Scene) -> dict[str, object]:
    keys = ("scale", "scales", "divided_by", "twice", "refused", "first_found_inf", "next_iteration", "was_kept")
    return {key: scene.facts[key] for key in keys if scene.facts.get(key) is not None}
