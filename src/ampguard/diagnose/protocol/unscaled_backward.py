"""unscaled-backward: the scaler is asked to unscale or step and the loss was never scaled.

What happens   loss.backward() instead of scaler.scale(loss).backward(), for the only loss or for a second one; in
               Lightning's manual optimisation loss.backward() instead of self.manual_backward(loss).
               Or the script adds to scaled gradients what was never scaled: a weight decay by hand, noise.
Why it hurts   never scaled at all: AssertionError "Attempted unscale_ but _scale is None". Scaled before: the gradients are
               divided by a scale that they do not carry, 65536 times too small, and nothing is said.
Instead        scaler.scale(loss).backward() for every loss whose optimizer the scaler steps.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.framework import scale_instead
from ampguard.diagnose.protocol.scene import Scene, at, number
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("unscaled-backward")
def unscaled_backward(scene: Scene) -> Telling:
    refused = scene.facts.get("refused")
    name, scaler = scene.optimizer, scene.scaler
    if refused is None and scene.facts.get("scaled_by_another"):
        return _by_another(scene)
    if scene.facts.get("added_by_hand"):
        return _added_by_hand(scene)
    if scene.facts.get("of_weights"):
        return _of_weights(scene)
    if refused is None:
        scale = number(float(scene.facts.get("scale", 0.0)))
        text = (
            f"A loss was not scaled, and `{scaler}` divides its gradients all the same: what `{name}` gets from "
            f"{at(scene.first)} is {scene.factor}. It was divided by {scale} at {at(scene.again)}."
        )
    elif scene.facts.get("scaled_by_another"):
        other = scene.name_of(scene.facts.get("other"))
        by = f"by `{other}`, at {at(scene.first)}" if other is not None else f"by another scaler, at {at(scene.first)}"
        text = (
            f"The loss was scaled {by}: `{scaler}` is another object, which has never scaled anything, and its `{refused}` is "
            f'called at {at(scene.again)}. PyTorch says "Attempted {refused} but _scale is None".'
        )
    elif scene.first is None:
        text = (
            f"`{scaler}.{refused}` was called and nothing had been scaled: no backward pass was seen before "
            f'{at(scene.again)}. PyTorch says "Attempted {refused} but _scale is None".'
        )
    else:
        text = (
            f"The loss was differentiated without being scaled: {at(scene.first)}. `{scaler}.{refused}` at {at(scene.again)} "
            f'has no scale to divide by. PyTorch says "Attempted {refused} but _scale is None".'
        )
    return Telling(
        text,
        scene.first if scene.first is not None else scene.again,
        (order(scene, _how(scene)),),
        evidence={"scale": scene.facts.get("scale"), "refused": refused},
    )


def _of_weights(scene: Scene) -> Telling:
    """What stands in `.grad` was computed of weights; no loss was differentiated for it."""
    name, scaler, scale = scene.optimizer, scene.scaler, number(float(scene.facts["scale"]))
    text = (
        f"The script makes the gradients of `{name}` of weights alone, at {at(scene.first)}: no loss scale is in them, and "
        f"`{scaler}` divides them by {scale} all the same, at {at(scene.again)}. What `{name}` gets is {scene.factor}."
    )
    how = f"step past the scaler, for nothing is scaled here: {name}.step()"
    evidence = {"scale": scene.facts["scale"], "of_weights": True}
    return Telling(text, scene.again, (order(scene, how),), evidence=evidence)


def _added_by_hand(scene: Scene) -> Telling:
    """A weight decay, a pull to other weights, noise: computed without a loss, and added before the scaler divides."""
    name, scaler, scale = scene.optimizer, scene.scaler, number(float(scene.facts["scale"]))
    text = (
        f"Something that carries no loss scale is added to gradients of `{name}` that do, at {at(scene.first)}: `{scaler}` "
        f"divides all of it by {scale}, and what was added becomes {scene.factor}."
    )
    how = f"unscale first: {scaler}.unscale_({name}); then add to the gradients as here"
    if scene.facts.get("in_hook"):
        how = (
            f"multiply what the hook adds by {scaler}.get_scale(); or add it behind the backward pass, after "
            f"{scaler}.unscale_({name})"
        )
    return Telling(
        text, scene.first, (order(scene, how),), evidence={"scale": scene.facts["scale"], "added_by_hand": True}
    )


def _by_another(scene: Scene) -> Telling:
    """One scaler has scaled the loss, another divides its gradients."""
    facts, name, scaler = scene.facts, scene.optimizer, scene.scaler
    other = scene.name_of(facts.get("other")) or "another scaler"
    carried = ", ".join(number(s) for s in facts["scales"])
    text = (
        f"The loss was scaled by one scaler and its gradients are divided by another: `{other}` has multiplied it by {carried} "
        f"at {at(scene.first)}, `{scaler}` divides by {number(facts['divided_by'])} at {at(scene.again)}. What `{name}` gets "
        f"is {scene.factor}."
    )
    evidence = {"scale": facts["divided_by"], "scales": facts["scales"], "scaled_by": other}
    if facts.get("is_mixed"):  # its own scaler has scaled the rest: the odd loss has to change
        text = text.replace("The loss was", "One of the losses was", 1)
        how = f"scale it by the scaler that steps `{name}`: {scaler}.scale({_loss(scene)}).backward()"
        return Telling(text, scene.first, (order(scene, how),), evidence=evidence)
    how = f"step with the scaler that scaled the loss: {other}.step({name}); {other}.update()"
    return Telling(text, scene.again, (order(scene, how),), evidence=evidence)


def _loss(scene: Scene) -> str:
    """What stands inside `scale(...)` at the line, where it is a name."""
    code = scene.first.location().code if scene.first is not None else ""
    return _named(code.partition(".scale(")[2].partition(")")[0])


def _named(expression: str) -> str:
    return expression if expression.replace(".", "").replace("_", "").isalnum() else "loss"


def _how(scene: Scene) -> str:
    code = scene.first.location().code if scene.first is not None else ""
    if scene.facts.get("refused") and scene.facts.get("scaled_by_another"):
        return (
            f"scale and step with one and the same scaler: {scene.scaler}.scale({_loss(scene)}).backward() at {at(scene.first)}, "
            f"or step with the one that scales there"
        )
    if scene.facts.get("added") is not None:
        loss = _named(code.partition("grad(")[2].partition(",")[0].strip())
        return f"scale the loss before it is differentiated: torch.autograd.grad({scene.scaler}.scale({loss}), ...)"
    loss = _named(code.split(".backward(")[0].split(";")[-1].strip() if ".backward(" in code else "loss")
    return (
        scale_instead(scene, loss)
        or f"scale the loss before it is differentiated: {scene.scaler}.scale({loss}).backward()"
    )
