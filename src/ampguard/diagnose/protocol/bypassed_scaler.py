"""bypassed-scaler: an optimizer is stepped directly on gradients that are still scaled.

What happens   scaler.scale(loss).backward(), then optimizer.step() instead of scaler.step(optimizer); or an update of the
               script's own, p -= lr * p.grad, with such gradients or with a momentum that is made of them.
Why it hurts   the gradients are 65536 times too large; Adam hides it until weight decay, clipping or its eps matter. An
               overflow is not noticed, and the step makes the weights NaN. Later scaler.update() may say "No inf checks were
               recorded prior to update."
               So does a second optimizer.step() behind scaler.step(optimizer): the same gradients move the weights twice,
               and those for which the scaler had skipped its step make them NaN.
               A loss that is scaled twice (in a helper and by its caller) leaves one scale in them: the scaler divides once.
               A closure given to scaler.step(optimizer, closure) is called after the scaler has unscaled, and the gradients that
               it makes are used still scaled. (PyTorch refuses it only as a keyword.)
               Without a scaler: (loss * 2.0**16).backward() in float16, and nothing divides the gradients by that again.
Instead        scaler.step(optimizer); scaler.update().
Not this       an optimizer whose loss was never scaled, or whose gradients the script divides by the scale itself.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from ampguard.capture.protocol.script_source import function_of
from ampguard.capture.record import Line
from ampguard.diagnose.protocol.framework import step_instead
from ampguard.diagnose.protocol.scene import Scene, at, listed, number
from ampguard.diagnose.protocol.telling import Telling, breach, order
from ampguard.incident import Severity


def _called(scene: Scene) -> str:
    """The optimizer as the line calls it: in a wrapper (SAM, Lookahead) the inner one, which the scaler has to step."""
    code = scene.again.location().code if scene.again is not None else ""
    called = re.findall(r"([\w.]+(?:\[[^\[\]]*\])?)\.step\(", code)
    return next((name for name in called if name != scene.scaler), scene.optimizer)


@breach("bypassed-scaler")
def bypassed_scaler(scene: Scene) -> Telling:
    name = _called(scene)
    scaler = scene.scaler
    if scene.facts.get("closure_refused"):
        return _closure_refused(scene)
    if scene.facts.get("own_update"):
        return _own_update(scene)
    if scene.facts.get("scaled_twice"):
        return _scaled_twice(scene)
    if scene.facts.get("own_scale"):
        return _own_scale(scene)
    if scene.facts.get("old_scale"):
        return _old_scale(scene)
    if scene.facts.get("was_skipped"):
        text = (
            f"`{name}` was stepped once more at {at(scene.again)}, with the very gradients, Inf or NaN among them, for which "
            f"the scaler had skipped its step at {at(scene.first)}: they are in the weights now."
        )
    elif scene.facts.get("repeats"):
        text = (
            f"`{name}` steps twice with the same gradients: {scaler}.step({name}) at {at(scene.first)}, then by itself at "
            f"{at(scene.again)}, with no backward pass in between. Nothing skips the second one where they are Inf or NaN."
        )
    elif scene.facts.get("found_inf"):
        text = (
            f"`{name}` was stepped past the scaler on gradients with Inf or NaN: the scaler had found them at "
            f"{at(scene.first)}, and only {scaler}.step({name}) skips such a step. It was made at {at(scene.again)}."
        )
    elif scene.facts.get("by_closure"):
        text = (
            f"{scaler}.step({name}, closure) unscales first and calls the closure then: the gradients that the closure makes at "
            f"{at(scene.first)} are used still scaled, {scene.factor}. Their overflow is not noticed either."
        )
    else:
        text = (
            f"`{name}` was stepped past the scaler on gradients that are still scaled: those from {at(scene.first)} are "
            f"{scene.factor} at {at(scene.again)}. An overflow is not noticed either."
        )
    if scene.facts.get("clipped_by"):
        less, scale = number(1.0 / scene.facts["clipped_by"]), number(scene.facts["scale"])
        text += f" They were clipped in between, {less} times smaller, with the loss scale {scale} in them."
    how = step_instead(scene) or _let_it_step(scene, name)
    updated = scene.facts.get("updated_before")
    if updated is not None and scene.framework is None:
        how = f"let the scaler step, and before the iteration's update, {at(updated)}: {scaler}.step({name})"
    clipped_at = scene.facts.get("clipped_at")
    if clipped_at is not None:
        text += f" They were clipped while still scaled, at {at(clipped_at)}: the limit is met by gradients of another size."
        how = f"unscale before they are clipped, {scaler}.unscale_({name}) in front of {at(clipped_at)}, and {how}"
    if scene.facts.get("was_skipped") or scene.facts.get("repeats"):
        how = f"delete this step (or make it only where no scaler is in use): {scaler}.step({name}) is the iteration's"
    if scene.facts.get("in_backward"):
        how = f"in the hook {scaler}.step({name}) in place of {name}.step(), and {scaler}.update() once, behind the backward pass"
    if scene.facts.get("by_closure"):
        how = _without_closure(scaler, name)
    evidence = {key: scene.facts.get(key) for key in ("scale", "found_inf", "repeats", "by_closure")}
    return Telling(text, scene.again, (order(scene, how, target=name),), evidence=evidence)


def _let_it_step(scene: Scene, name: str) -> str:
    """The step by the scaler, and its update where the code around the backward pass has none."""
    scaler, backward, again = scene.scaler, scene.first, scene.again
    is_elsewhere = backward is not None and again is not None and backward.code is not again.code
    updated = _update_behind(backward if is_elsewhere else again, scaler)
    how = f"let the scaler step: {scaler}.step({name})"
    how += f"; {scaler}.update()" if updated is None else f", before the {scaler}.update() at {at(updated)}"
    if is_elsewhere and scaler.partition(".")[0] not in _names_in(again):
        how += f". Hand {scaler} to what steps at {at(again)}"
    return how


def _update_behind(line: Line | None, scaler: str) -> Line | None:
    """Where the function of this line calls the scaler's update behind it."""
    function = function_of(line.code) if line is not None else None
    for node in ast.walk(function) if function is not None else ():
        if line is None or not isinstance(node, ast.Call) or node.lineno < line.number:
            continue
        if ast.unparse(node.func) == f"{scaler}.update":
            return Line(line.code, node.lineno)
    return None


def _names_in(line: Line | None) -> tuple[str, ...]:
    code = line.code if line is not None else None
    return (*code.co_varnames, *code.co_freevars, *code.co_names) if code is not None else ()


def _without_closure(scaler: str, name: str) -> str:
    return (
        f"GradScaler works with no closure: call backward outside and {scaler}.step({name}); where the optimizer needs its "
        f"closure (LBFGS), leave the scaler out and train in float32 or bfloat16: {name}.step(closure)"
    )


def _closure_refused(scene: Scene) -> Telling:
    """PyTorch saw the closure by its name. (Given by its place it is called, with what comes of that.)"""
    name, scaler = scene.optimizer, scene.scaler
    text = (
        f'`{scaler}` refuses to step with a closure: PyTorch says "Closure use is not currently supported" at '
        f"{at(scene.again)}. A scaler unscales first and calls the closure then, so that the gradients which the closure makes "
        f"would be used still scaled, and their overflow not be noticed. `{name}` was not stepped."
    )
    fix = order(scene, _without_closure(scaler, name), target=name)
    return Telling(text, scene.again, (fix,), evidence={"refused": "step", "by_closure": True})


def _scaled_twice(scene: Scene) -> Telling:
    """One loss scale is divided out, the other one stays in the gradients."""
    scaler, scale = scene.scaler, number(float(scene.facts["scale"]))
    backward = scene.facts["backward"]
    text = (
        f"A loss was scaled twice: what is differentiated at {at(backward)} carried the loss scale already when `{scaler}` "
        f"multiplied it by {scale} (again). One scale is divided out at {at(scene.again)}, the other one is still in the "
        f"gradients with which `{scene.optimizer}` steps: they are {scene.factor}."
    )
    how = (
        f"scale each loss once: leave out the second {scaler}.scale(...). A loss made of gradients that an earlier scaled "
        f"backward pass has left (cached representations) carries the scale already: loss.backward()"
    )
    evidence = {"scale": scene.facts["scale"], "scaled_twice": True}
    return Telling(text, backward, (order(scene, how),), evidence=evidence)


def _own_scale(scene: Scene) -> Telling:
    """No scaler: the script multiplies and divides itself, and leaves the division out."""
    scale = number(float(scene.facts["scale"]))
    text = (
        f"`{scene.optimizer}` steps with gradients that still carry the script's own loss scale {scale}, from "
        f"{at(scene.first)}: they are {scene.factor} at {at(scene.again)}. "
    )
    severity: Severity = "error"
    if scene.facts.get("never_divided"):
        severity = "warning" if _divides_by_its_squares(scene) else "error"
        text += "Nothing divides them by it, in this step or before. "
        text += (
            "The optimizer divides by the root of their squares, where the scale cancels; what is added to them or compared with "
            "them (its eps, a limit on their norm) counts for that many times less, and an overflow is not noticed."
            if severity == "warning"
            else "So is the update, and an overflow is not noticed."
        )
        how = f"divide the gradients by the loss scale {scale} before this step, and leave out steps in which they are not finite"
    elif scene.facts.get("divided_elsewhere"):
        text += "Those of the same loss that another optimizer holds were divided first."
        how = f"divide these gradients by the loss scale {scale} too before this step, as those of the other optimizer"
    else:
        text += "In the steps before it they were divided first."
        how = f"divide the gradients by the loss scale {scale} before this step, as in the steps before"
    evidence = {"scale": scene.facts["scale"], "own_scale": True}
    return Telling(text, scene.again, (order(scene, how),), severity=severity, evidence=evidence)


def _divides_by_its_squares(scene: Scene) -> bool:
    """Whether the optimizer is one of Adam's kind: only they have an eps, for what they divide by."""
    subject = getattr(scene.breach.optimizer, "ref", lambda: None)()
    return "eps" in getattr(subject, "defaults", ())


def _old_scale(scene: Scene) -> Telling:
    """The script divides by a number that it has read before the scale changed."""
    scaler, scale, old = (
        scene.scaler,
        number(float(scene.facts["scale"])),
        number(float(scene.facts["old_scale"])),
    )
    text = (
        f"`{scene.optimizer}` steps with gradients that were divided by {old}, the loss scale of an earlier iteration: those "
        f"from {at(scene.first)} carry {scale}, and are {scene.factor} at {at(scene.again)}."
    )
    how = (
        f"divide by the scale that the gradients carry, {scaler}.get_scale() read anew in each iteration; or leave it to the "
        f"scaler: {scaler}.unscale_({scene.optimizer}) there and {scaler}.step({scene.optimizer}) here"
    )
    evidence = {"scale": scene.facts["scale"], "divided_by": scene.facts["old_scale"]}
    return Telling(text, scene.again, (order(scene, how),), evidence=evidence)


def _own_update(scene: Scene) -> Telling:
    """No optimizer: the script moves weights along their gradients itself, or by a sum of them."""
    scaler, scale = scene.scaler, number(float(scene.facts["scale"]))
    evidence: dict[str, Any] = {"scale": scale}
    if scene.facts.get("made_of_them"):
        text = (
            f"The script itself moves {listed(scene.parameters)} by something made of gradients that are still scaled, those "
            f"from {at(scene.first)}: what is added at {at(scene.again)} is {scene.factor}. An overflow is not noticed either."
        )
    else:
        rate = evidence["rate"] = number(float(f"{scene.facts['rate']:.3g}"))
        where = f", at {at(scene.again)}" if scene.again is not None else ""
        text = (
            f"The script itself moves {listed(scene.parameters)} along gradients that are still scaled: by {rate} times those "
            f"from {at(scene.first)}, which are {scene.factor}{where}. An overflow is not noticed either."
        )
    how = (
        f"give them to an optimizer and let {scaler}.step(...) make the update; or divide by {scaler}.get_scale() first, "
        f"and leave the update out where the gradients are not finite"
    )
    fix = order(scene, how, target=scene.module)
    line = scene.again if scene.again is not None else scene.first
    return Telling(text, line, (fix,), evidence=evidence, module=scene.module)
