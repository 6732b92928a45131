"""double-unscale: gradients are unscaled twice between updates.

What happens   scaler.unscale_(optimizer) is called twice, or after scaler.step(optimizer), which unscales by itself; or the
               script divides the gradients by the scale and the scaler divides them again; or two optimizers hold the same
               parameters, and the scaler unscales both.
Why it hurts   RuntimeError "unscale_() has already been called on this optimizer since the last update()." By hand nothing
               is said, and the gradients are 65536 times too small.
Instead        call it once, right before clipping; scaler.step() sees that it was done.
               Give each parameter to one optimizer: a scaler unscales by optimizer, so what two of them hold is divided twice.
               With two backward passes an iteration (SAM): unscale the second only, or update() between the two.
               Give unscale_() and step() the same object: a scaler takes a wrapper for another optimizer than the one inside.
Not this       the second call comes in the next iteration, because update() was left out: see missing-update. It comes in
               the same accumulation window: see accumulation-broken.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene, at, is_one_line, listed, statement
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("double-unscale")
def double_unscale(scene: Scene) -> Telling:
    name, scaler = scene.optimizer, scene.scaler
    head, where = f"The gradients of `{name}` are unscaled twice: ", scene.again
    if scene.facts.get("shared_with") is not None:
        return _shared(scene)
    if scene.facts.get("by_hand"):
        divided = scene.facts.get("divided_at") or scene.facts.get("read_at")
        where = divided if divided is not None else where
        by = f"at {at(divided)}" if divided is not None else f"after {at(scene.first)}"
        text = f"by the script itself {by}, and by the scaler at {at(scene.again)}. They are {scene.factor}."
        how = f"let the scaler divide, once: {scaler}.unscale_({name}) in place of the division by hand"
        if scene.facts.get("explicit"):
            how = f"leave out the division by hand, and read true gradients after {at(scene.again)}, which divides them"
        if scene.facts.get("again_by_hand"):
            by = f" at {at(divided)}" if divided is not None else f", before {at(scene.again)}"
            text = f"by the scaler at {at(scene.first)}, and then by the script itself{by}. They are {scene.factor}."
            how = f"leave out the division by hand: behind {at(scene.first)} the gradients are true ones"
    elif scene.facts.get("through_wrapper"):
        text, how = _through_wrapper(scene)
    elif scene.facts.get("second_pass"):
        text, how = _second_pass(scene)
    elif scene.facts.get("after_step"):
        text = f"by the step at {at(scene.first)}, and again at {at(scene.again)}. PyTorch refuses that."
        call = statement(scene.again) or f"{scaler}.unscale_({name})"
        how = (
            f"unscale before the step: {call} in front of {at(scene.first)}, which sees that they are unscaled already"
        )
    else:
        refused = " PyTorch refuses that." if scene.facts.get("refused") else f" They are {scene.factor}."
        text = f"first at {at(scene.first)}, again at {at(scene.again)}, with no backward pass between.{refused}"
        how = f"delete the second call, {at(scene.again)}: {scaler}.step({name}) sees that they are unscaled already"
        paths = scene.paths_of_optimizer() if is_one_line(scene) else []
        if len(paths) > 1:
            names = " and ".join(f"`{path}`" for path in paths)
            text = f"{at(scene.again)} comes to it twice, because {names} are one and the same optimizer.{refused}"
            how = f"name each optimizer once: {names} are the same object"
    evidence = {key: scene.facts.get(key) for key in ("refused", "second_pass", "through_wrapper")}
    return Telling(head + text, where, (order(scene, how),), evidence=evidence)


def _shared(scene: Scene) -> Telling:
    """Two optimizers hold the same parameters."""
    name, other = scene.optimizer, scene.name_of(scene.facts["shared_with"]) or "another optimizer"
    text = (
        f"The gradients of {listed(scene.parameters)} are unscaled twice, because `{other}` and `{name}` both hold them: for "
        f"`{other}` at {at(scene.first)}, and for `{name}` at {at(scene.again)}. They are {scene.factor}: the scaler "
        f"unscales all that an optimizer holds."
    )
    how = (
        f"give each parameter to one optimizer only (those named here to `{other}` or to `{name}`), or put all of them into "
        f"one optimizer with a parameter group each"
    )
    evidence = {"shared_with": other, "scale": scene.facts["scale"]}
    fix = order(scene, how, "rebuild-optimizer")
    return Telling(text, scene.again, (fix,), evidence=evidence, module=scene.module)


def _through_wrapper(scene: Scene) -> tuple[str, str]:
    """The scaler was given an optimizer first and then what is wrapped around it, or the other way round."""
    stepped = scene.name_of_object(scene.facts.get("stepped")) or "what is stepped"
    inside = statement(scene.first).partition("unscale_(")[2].partition(")")[0] or scene.optimizer
    text = (
        f"at {at(scene.first)}, and by the step at {at(scene.again)}, because `{inside}` and `{stepped}` are two objects with "
        f"the same parameters, and the scaler remembers by object what it has unscaled. They are {scene.factor}."
    )
    return text, f"unscale the object that is stepped: {scene.scaler}.unscale_({stepped}) at {at(scene.first)}"


def _second_pass(scene: Scene) -> tuple[str, str]:
    """Sharpness-aware minimisation: two backward passes in one iteration, the weights moved between them."""
    name, scaler = scene.optimizer, scene.scaler
    text = (
        f"for the first backward pass of the iteration at {at(scene.first)}, and for the second one, "
        f"{at(scene.facts.get('backward'))}, again at {at(scene.again)}. The weights were moved in between and no step of "
        f"`{name}` was made (as sharpness-aware minimisation does), but the scaler unscales an optimizer once between two "
        f"updates. PyTorch refuses the second."
    )
    how = (
        f"unscale the second pass only: the first one's gradients are divided by their own norm, and the loss scale "
        f"cancels; or call {scaler}.update() after the first pass, before the second {scaler}.scale(loss).backward()"
    )
    return text, how
