"""no-gradients: an optimizer is stepped and none of its parameters has a gradient.

What happens   every parameter is frozen; or the loss was computed from a detached tensor; or zero_grad was called between
               backward and step; or the backward pass belonged to another optimizer's parameters.
Why it hurts   with a GradScaler: AssertionError "No inf checks were recorded for this optimizer." Without one nothing is
               said, and nothing ever learns.
Instead        let the loss reach the parameters, and step an optimizer only after its own backward pass.
Not this       the optimizer holds other tensors than the model: see stale-parameters. A few parameters without a
               gradient among others that have one: see unused-parameters.
"""

from __future__ import annotations

from ampguard.diagnose.locate.cuts import DETACH, DISCRETE, NO_GRAD, Cut, in_words
from ampguard.diagnose.protocol.scene import Scene, at, listed
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("no-gradients")
def no_gradients(scene: Scene) -> Telling:
    why = scene.facts.get("why")
    name = scene.optimizer
    explain = {"cleared": _cleared, "frozen": _frozen, "no-backward": _no_backward}.get(str(why), _not_reached)
    text, how = explain(scene)
    refused = scene.facts.get("refused")
    said = ' PyTorch says "No inf checks were recorded".' if refused else " Without a scaler no error comes of it."
    count = scene.facts.get("of")
    head = f"No parameter of `{name}` has a gradient" + (f" ({count} parameters): " if count else ": ")
    if scene.facts.get("zeros"):
        head = f"All gradients of `{name}` are 0 when it steps, in each of the first {scene.facts['steps']} steps: "
        said = " No error comes of it." if scene.breach.scaler is not None else said
    alone = bool(refused) or bool(scene.facts.get("alone")) or bool(scene.facts.get("zeros"))
    return Telling(
        head + text + said,
        scene.again,
        (order(scene, how),),
        severity="error" if alone else "warning",
        evidence={"why": why, "steps": scene.facts.get("steps")},
        module=scene.module,
    )


def _cleared(scene: Scene) -> tuple[str, str]:
    backward = at(scene.facts.get("backward"))
    place = f"at {at(scene.first)}" if scene.first is not None else "by hand"
    text = f"backward at {backward} made them, and they were cleared {place} before the step."
    how = f"clear the gradients before backward or after the step, never between: {_right_order(scene)}"
    return text, how


def _frozen(scene: Scene) -> tuple[str, str]:
    text = f"all have requires_grad=False, as {listed(scene.parameters)}."
    if scene.facts.get("in_vain"):
        text += f" They were trained before. The loss differentiated at {at(scene.first)} moves nothing now."
        return (
            text,
            f"unfreeze them before that loss is computed: p.requires_grad_(True) for all that {scene.optimizer} holds",
        )
    return text, (
        f"unfreeze what is to be trained, or build {scene.optimizer} from the parameters that want a gradient: "
        f"[p for p in model.parameters() if p.requires_grad]"
    )


def _no_backward(scene: Scene) -> tuple[str, str]:
    return "no backward pass came before the step.", f"differentiate the loss first: {_right_order(scene)}"


def _not_reached(scene: Scene) -> tuple[str, str]:
    others = scene.others(watch for watch in scene.facts.get("reached", ()) if watch is not scene.breach.optimizer)
    backward = at(scene.first)
    places = scene.cuts()
    if others:
        text = f"the last backward, {backward}, reached only the parameters of `{others}`"
        how = f"step `{scene.optimizer}` only after the backward pass of its own loss: {_right_order(scene)}"
        if places:
            return (
                f"{text}: on the way to those of `{scene.optimizer}`, {in_words(places)}.",
                f"{how}. Or {_without(places)}",
            )
        called = scene.holder()
        if called is not None:
            return (
                f"{text}. The loss was computed at {at(called)} with a module that holds those of `{scene.optimizer}` too: its "
                f"forward pass uses them under `no_grad`, detaches what comes of them, or does not use them for this loss.",
                f"if this loss is to train them, let gradients through in the forward pass of {_owners(scene)}; else {how}",
            )
        return f"{text}: it is not this optimizer's turn.", how
    whose = f" (they are {listed(scene.parameters)})" if scene.parameters else ""
    if places:
        text = f"the loss differentiated at {backward} was computed from them{whose}, but {in_words(places)}."
        return text, f"let gradients pass there: {_without(places)}"
    called = scene.holder()
    if called is not None:
        return (
            f"the loss differentiated at {backward} was computed at {at(called)} with a module that holds them{whose}: its "
            f"forward pass uses them under `no_grad`, detaches what comes of them, or does not use them for this loss.",
            f"let gradients through in the forward pass of {_owners(scene)}",
        )
    text = (
        f"the loss differentiated at {backward} does not depend on them{whose}. It was detached on the way "
        f"(.detach(), .data, .item(), no_grad, argmax), or computed without them."
    )
    return (
        text,
        "compute the loss from the outputs themselves, without detach, .data or no_grad between them and the loss",
    )


def _owners(scene: Scene) -> str:
    return f"`{scene.module}`" if scene.module else "the module that holds them"


def _without(places: list[Cut]) -> str:
    ways = {
        NO_GRAD: "compute what the loss needs outside `no_grad`",
        DETACH: "use the tensor itself, without .detach() or .data",
        DISCRETE: "put a function with a derivative in its place",
    }
    return "; ".join(ways[how] for how in dict.fromkeys(place.how for place in places))


def _right_order(scene: Scene) -> str:
    if scene.breach.scaler is None:
        return f"{scene.optimizer}.zero_grad(); loss.backward(); {scene.optimizer}.step()"
    return (
        f"{scene.optimizer}.zero_grad(); {scene.scaler}.scale(loss).backward(); {scene.scaler}.step({scene.optimizer}); "
        f"{scene.scaler}.update()"
    )
