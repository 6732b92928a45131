"""accumulation-broken: within an accumulation window the scale changed, or gradients were unscaled before it was complete.

What happens   scaler.unscale_(optimizer) (often for clipping or for a norm to log), or scaler.update(), runs for every
               micro-batch instead of once in a window.
Why it hurts   RuntimeError "unscale_() has already been called"; or, silently, one micro-batch's gradients weigh 65536 times
               more or less than another's. Gradients that the script keeps over several iterations while they are scaled
               (an average that is added to later ones) are such a window too: the scale changes in it, and an overflow stays.
Instead        in the window only scaler.scale(loss / n).backward(); at its end unscale_, clip, step, update, zero_grad.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.framework import is_updated_by_framework, update_instead
from ampguard.diagnose.protocol.scene import Scene, at, number
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("accumulation-broken")
def accumulation_broken(scene: Scene) -> Telling:
    facts, name, scaler = scene.facts, scene.optimizer, scene.scaler
    if facts.get("kept"):
        return _kept(scene)
    head, where = "An accumulation window is broken: ", scene.again
    if facts.get("refused"):
        n = facts.get("backwards", 1)
        text = (
            f"the gradients of `{name}` were unscaled at {at(scene.first)}, {n} more backward "
            f"{'pass' if n == 1 else 'passes'} added scaled ones, and {at(scene.again)} unscales again. PyTorch refuses that."
        )
    elif facts.get("loaded"):
        return _loaded(scene)
    elif facts.get("scaler_replaced"):
        return _replaced(scene)
    elif facts.get("scales") and len(facts["scales"]) > 1:
        scales = _scales(scene)
        updated = facts.get("updated_between")
        inside = f" at {at(updated)}" if updated is not None else ""
        where = updated if updated is not None else where
        text = (
            f"its micro-batches carry the loss scales {scales}, because update() was called inside it{inside}, and all "
            f"are divided by {number(facts['divided_by'])} at {at(scene.again)}. Some gradients of `{name}` are {scene.factor}."
        )
    else:
        where = scene.first if scene.first is not None else where
        text = (
            f"the gradients of `{name}` were unscaled at {at(scene.first)} before it was complete; scaled ones were added after "
            f"that. At {at(scene.again)} a part of them is {scene.factor}."
        )
    how = (
        f"in the window only {scaler}.scale(loss).backward(); at its end {scaler}.unscale_({name}), clip, {scaler}.step({name}), "
        f"{scaler}.update(), {name}.zero_grad()"
    )
    if len(facts.get("scales", ())) > 1 and is_updated_by_framework(scene):
        how = update_instead(scene) or how
    elif facts.get("others") and len(facts.get("scales", ())) > 1:
        text += f" `{scene.others(facts['others'])}` steps in every micro-step, with the same scaler."
        how = (
            f"give `{name}` a GradScaler of its own, so that its scale stays as it is until its window ends: scaler_2.scale(loss)"
            f".backward() in the window; at its end scaler_2.step({name}), scaler_2.update(), {name}.zero_grad()"
        )
    return Telling(head + text, where, (order(scene, how),), evidence=_evidence(scene))


def _loaded(scene: Scene) -> Telling:
    """The scaler has got another scale from a checkpoint, between a backward pass and the division."""
    facts, name, scaler = scene.facts, scene.optimizer, scene.scaler
    loaded = facts.get("updated_between")
    scales = _scales(scene)
    text = (
        f"The loss scale was changed within an iteration: gradients of `{name}` carry {scales}, the state of `{scaler}` was "
        f"loaded at {at(loaded)}, and they are divided by {number(facts['divided_by'])} at {at(scene.again)}. They are "
        f"{scene.factor}."
    )
    how = (
        f"load {scaler}'s state between two iterations, behind {scaler}.update(); or leave the step out with which it is loaded: "
        f"{name}.zero_grad(), and go on with the next batch"
    )
    return Telling(text, loaded if loaded is not None else scene.again, (order(scene, how),), evidence=_evidence(scene))


def _replaced(scene: Scene) -> Telling:
    """A new scaler took the place of the one that had scaled the first micro-batches of a window."""
    facts, name, scaler = scene.facts, scene.optimizer, scene.scaler
    scales = _scales(scene)
    text = (
        f"An accumulation window is broken: a new scaler took the place of the one before it within the window. Its "
        f"micro-batches carry the loss scales {scales} from {at(scene.first)}, and all are divided by "
        f"{number(facts['divided_by'])} at {at(scene.again)}. Some gradients of `{name}` are {scene.factor}."
    )
    how = (
        f"make one {scaler} for the whole training, before the loop over epochs; or begin each epoch with an empty window: "
        f"{name}.zero_grad()"
    )
    return Telling(text, scene.first or scene.again, (order(scene, how),), evidence=_evidence(scene))


def _kept(scene: Scene) -> Telling:
    """A sum or an average of scaled gradients that the script keeps from one iteration to the next."""
    name, scaler, is_bad = scene.optimizer, scene.scaler, bool(scene.facts["not_finite"])
    old, new = (number(s) for s in scene.facts["scales"])
    text = (
        f"The script keeps gradients of `{name}` from one iteration to the next while they are still scaled, and adds them to "
        f"later ones at {at(scene.again)}: those of this iteration carry the loss scale {new}, those that were kept {old}. "
    )
    if is_bad:
        text += (
            "The backward pass leaves finite gradients and they are not finite behind that line: what an overflow has left in "
            "what is kept stays there, while the scaler only skips that step and lowers the scale. It will skip all that follow."
        )
    else:
        text += f"The kept ones are {scene.factor}, until they have faded."
    how = f"unscale before the gradients are kept: {scaler}.unscale_({name}) right behind the backward pass"
    if is_bad:
        how += "; and keep none that are not finite: if all(p.grad.isfinite().all() for p in parameters): ..."
    evidence = {"scales": scene.facts["scales"], "kept": True, "not_finite": is_bad}
    return Telling(
        text, scene.again, (order(scene, how),), severity="error" if is_bad else "warning", evidence=evidence
    )


def _scales(scene: Scene) -> str:
    return " and ".join(number(scale) for scale in scene.facts["scales"])


def _evidence(scene: Scene) -> dict[str, object]:
    keys = ("scale", "scales", "divided_by", "refused", "backwards", "loaded")
    return {key: scene.facts[key] for key in keys if scene.facts.get(key) is not None}
