"""missing-zero-grad: gradients of earlier iterations are never cleared and pile up.

What happens   a loop of backward and step without zero_grad, or with one in some iterations only.
               Or an iteration with bad gradients is left by a `continue` that jumps over zero_grad: NaN plus anything is NaN,
               and no iteration after it comes to its step.
               Or a script adds the model's gradients to those of its float32 masters, and clears the model's only.
               Or layers join an optimizer late, with gradients of all iterations till then: nobody had cleared those.
Why it hurts   every step follows the sum of all gradients so far: the effective learning rate grows until training diverges.
               With a GradScaler the old gradients are unscaled once more in every step and hardly count; the code is as wrong.
Instead        optimizer.zero_grad() once an iteration, before backward.
Not this       gradient accumulation: several backward passes and one step, then zero_grad.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.owners import variable_name
from ampguard.diagnose.protocol.scene import Scene, at, is_one_line, listed
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("missing-zero-grad")
def missing_zero_grad(scene: Scene) -> Telling:
    name, steps = scene.optimizer, scene.facts["steps"]
    if scene.facts.get("by_hand"):
        return _by_hand(scene)
    if scene.facts.get("in_masters"):
        return _in_masters(scene)
    if scene.facts.get("is_stuck"):
        return _stuck(scene)
    if scene.facts.get("joined"):
        return _joined(scene)
    if scene.facts.get("is_reused"):
        return _reused(scene)
    scaled = bool(scene.facts.get("has_scaler"))
    how_often, of_steps = f"{steps} steps in a row", scene.facts.get("of_steps")
    if of_steps is not None:
        how_often = f"{scene.facts['in_all']} of {of_steps} steps"
    of_parameters, some = scene.facts.get("of_parameters"), scene.parameters
    whose = (
        f"`{name}`"
        if of_parameters is None
        else f"{len(some)} of {of_parameters} parameters of `{name}` ({listed(scene.owners())})"
    )
    text = (
        f"The gradients of {whose} are not cleared between iterations: {how_often} held those of earlier iterations"
        f"{'' if of_parameters is None else ', and only those of the others are cleared'}. "
        f"Each backward pass adds to what {at(scene.again)} has used already."
    )
    if scaled:
        text += (
            " The scaler divides the old ones again in every step, so they count little; without it they would pile up."
        )
    how = f"clear them once an iteration, before backward: {name}.zero_grad()"
    return Telling(
        text,
        scene.again,
        (order(scene, how),),
        module=None if of_parameters is None else scene.module,
        severity="warning" if scaled else "error",
        evidence={
            "steps": steps if of_steps is None else scene.facts["in_all"],
            "has_scaler": scaled,
            **({} if of_parameters is None else {"parameters": list(some), "of_parameters": of_parameters}),
        },
    )


def _by_hand(scene: Scene) -> Telling:
    """The script moves its weights itself, and never clears what backward has left."""
    steps, weights = scene.facts["steps"], scene.facts["parameters"]
    names = [variable_name(w) or name for w, name in zip(weights, scene.parameters, strict=True)]
    if scene.facts.get("in_replicas"):
        text = (
            f"No optimizer holds {', '.join(names)}, and nobody clears their gradients: {steps} times in a row their weights had "
            f"been set anew and those of before were still there when backward at {at(scene.first)} added to them. What the "
            f"script makes of them for its optimizer is a sum over all rounds."
        )
        fix = order(scene, "clear them before each backward pass: zero_grad() of the module that is called there")
        return Telling(text, scene.first, (fix,), evidence={"steps": steps, "by_hand": True, "in_replicas": True})
    user = "an update" if is_one_line(scene) else at(scene.again)
    text = (
        f"The script updates its weights itself and never clears their gradients: {steps} times in a row those that {user} had "
        f"used were still there when backward at {at(scene.first)} added to them ({', '.join(names)})."
    )
    one = names[0] if not names[0].startswith("a tensor") else "p"
    how = f"clear each gradient after the update has used it: {one}.grad = None (or {one}.grad.zero_())"
    fix = order(scene, how, target=one)
    return Telling(text, scene.again, (fix,), evidence={"steps": steps, "by_hand": True})


def _in_masters(scene: Scene) -> Telling:
    """The model's gradients are added to those of its masters, which nobody clears."""
    name, steps = scene.optimizer, scene.facts["steps"]
    text = (
        f"The gradients that `{name}` holds are never cleared: the script adds to them those that backward at "
        f"{at(scene.first)} gives the model, and {steps} times in a row what {at(scene.again)} had used already was still in "
        f"them. The model's own gradients are cleared, and they are others."
    )
    how = f"clear them once an iteration: {name}.zero_grad(); or put the model's gradients in their place and do not add them"
    fix = order(scene, how)
    return Telling(text, scene.again, (fix,), evidence={"steps": steps, "in_masters": True})


def _joined(scene: Scene) -> Telling:
    """Gradients had piled up before any optimizer held their parameters."""
    name, count = scene.optimizer, scene.facts["joined"]
    shown = f"{listed(scene.parameters)}{' and others' if count > len(scene.parameters) else ''}"
    text = (
        f"Parameters came to `{name}` with gradients of earlier iterations: {shown}, at {at(scene.first)}. No optimizer held "
        f"them till then, so no zero_grad cleared them: backward at {at(scene.again)} adds to them, and the next step "
        f"follows the sum."
    )
    how = (
        f"clear them where they join: {name}.zero_grad() behind that line; or give what is not trained yet no gradients: "
        f"requires_grad_(False), and True when it joins"
    )
    evidence = {"joined": count, "parameters": list(scene.parameters)}
    return Telling(text, scene.first or scene.again, (order(scene, how),), evidence=evidence)


def _reused(scene: Scene) -> Telling:
    """No backward pass reaches the optimizer any more, and it goes on stepping with what an earlier one has left."""
    name, steps = scene.optimizer, scene.facts["steps"]
    text = (
        f"`{name}` steps on old gradients: {steps} times in a row at {at(scene.again)} no backward pass had reached it since "
        f"its step before, and what {at(scene.first)} left was never cleared. The scaler divides it once more each time."
    )
    how = f"step `{name}` only after a backward pass of its own loss, and clear after it: {name}.zero_grad()"
    evidence = {"steps": steps, "has_scaler": True, "is_reused": True}
    return Telling(text, scene.again, (order(scene, how),), severity="warning", evidence=evidence)


def _stuck(scene: Scene) -> Telling:
    """Bad gradients were left where they are, and every backward pass since has added to them."""
    name, steps, since = scene.optimizer, scene.facts["steps"], scene.facts["since_step"]
    text = (
        f"The gradients of `{name}` that were not finite in step {since} were never cleared: the script left that iteration "
        f"without a step and without zero_grad, and backward at {at(scene.again)} adds to them. {steps} iterations in a row "
        f"were given up for them; none after it will come to its step."
    )
    how = f"clear them before the iteration is left: {name}.zero_grad(); continue (or clear before every backward)"
    evidence = {"steps": steps, "is_stuck": True, "since_step": since}
    return Telling(text, scene.again, (order(scene, how),), evidence=evidence)
