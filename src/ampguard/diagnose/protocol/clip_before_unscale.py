"""clip-before-unscale: gradients are clipped, or their norm is read, while still scaled.

What happens   clip_grad_norm_ between scaler.scale(loss).backward() and scaler.step(optimizer), and no unscale_ before it.
Why it hurts   the norm is 65536 times too large, so every step is clipped, and after unscaling the gradients are 65536 times
               smaller than the limit asks for: training nearly stands still. A norm that is only logged is wrong by as much,
               and a limit that is computed of such norms (a percentile of those so far) lets everything pass.
Instead        scaler.unscale_(optimizer) first; scaler.step() sees that it was done.
               Gradients from torch.autograd.grad(scaler.scale(loss), ..., create_graph=True) that become part of the loss, as
               in a gradient penalty, are used at that size too. So is what is made of gradients and kept for a later loss:
               squared ones, which weigh how important each parameter is, carry the square of the scale.
Not this       a limit that the script multiplies by scaler.get_scale() itself; a ratio of two norms of scaled gradients; a
               norm that is divided by the scale before it is used; importance weights that are normalised.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.framework import clip_instead
from ampguard.diagnose.protocol.scene import Scene, at, number, statement
from ampguard.diagnose.protocol.taken_gradients import division_of
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("clip-before-unscale")
def clip_before_unscale(scene: Scene) -> Telling:
    if scene.facts.get("in_loss"):
        return _in_loss(scene)
    name, scaler = scene.optimizer, scene.scaler
    scale = number(float(scene.facts.get("scale") or 0.0))
    clips = bool(scene.facts.get("clips"))
    done = "clipped" if clips else "measured"
    subject = "the values {} are" if "clip_grad_value" in statement(scene.again) else "the norm {} is"
    where = subject.format(f"at {at(scene.again)}")
    text = (
        f"The gradients of `{name}` were {done} while still scaled: {where} {scene.factor}. "
        f"They carry the loss scale from {at(scene.first)}."
    )
    limits = scene.facts.get("limit") is not None
    if scene.facts.get("by_hand"):
        text = _by_hand(scene)
    elif limits:
        text += (
            f" True gradients are clipped by such norms: the limit at {at(scene.facts['limits_at'])} is "
            f"{number(scene.facts['limit'])}, and their norm is {number(scene.facts['norm'])}, so nothing is ever clipped."
        )
    elif clips and scene.facts.get("update_too_small_by"):
        less = number(float(scene.facts["update_too_small_by"]))
        text += f" Once divided by that scale, the gradients are {less} times smaller than the limit asks for."
    elif clips:
        text += f" Once unscaled, the clipped gradients are up to {scale} times smaller than the limit asks for."
    code, then = _own_statement(scene), "clip as here" if clips else "measure"
    limit = scene.facts.get("limit_in_hook")
    if limit is not None:
        how = (
            f"clip after the backward pass instead of in a hook: {scaler}.unscale_({name}); "
            f"torch.nn.utils.clip_grad_value_(parameters, {limit:g})"
        )
        if scene.facts.get("within_graph"):
            how = f"multiply the limit by the loss scale, which these gradients carry: {limit:g} * {scaler}.get_scale()"
        elif scene.facts["limit_of"] == "norm":
            how = (
                f"clip after the backward pass instead of in a hook: {scaler}.unscale_({name}); for p in parameters: "
                f"torch.nn.utils.clip_grad_norm_(p, {limit:g})"
            )
        elif scene.facts["limit_of"] == "unit":
            how = (
                f"clip after the backward pass instead of in a hook: {scaler}.unscale_({name}); for p in parameters: "
                f"what {at(scene.again)} does"
            )
    elif scene.facts.get("taken"):
        how = (
            f"multiply the limit by {scaler}.get_scale(), which what torch.autograd.grad returns carries, and what is added to "
            f"their sum before {scaler}.step({name}) (noise) too"
        )
    elif scene.facts.get("by_hand") or scene.facts.get("norm_is_given"):
        how = (
            f"unscale right after backward, before the norm is computed: {scaler}.unscale_({name}); then {code or then}"
        )
    else:
        how = f"unscale first: {scaler}.unscale_({name}); {code or f'then {then}'}"
    if scene.facts.get("in_hook"):
        how = (
            f"divide what the hook reads by {scaler}.get_scale(); or read the gradients behind the backward pass, after "
            f"{scaler}.unscale_({name})"
        )
    if scene.facts.get("own_scale"):
        how = f"divide the gradients by the loss scale {scale} first, then clip: the division stands behind {at(scene.again)}"
    how = clip_instead(scene, clips) or how
    return Telling(
        text,
        scene.again,
        (order(scene, how),),
        severity="error" if clips or limits else "warning",
        evidence={key: scene.facts.get(key) for key in _EVIDENCE},
    )


def _in_loss(scene: Scene) -> Telling:
    if scene.facts.get("kept"):
        return _kept_in_loss(scene)
    text = (
        f"Gradients that are still scaled became part of the loss: those from {at(scene.again)} are {scene.factor}, and the "
        f"loss of {at(scene.first)} was made from them without a division by the scale. The term measures the loss scale, "
        f"and changes with it."
    )
    how = (
        f"divide what torch.autograd.grad returns before it is used: inv_scale = 1.0 / {scene.scaler}.get_scale(); "
        f"{division_of(scene.again)}"
    )
    return Telling(text, scene.again, (order(scene, how),), evidence={"scale": scene.facts["scale"], "in_loss": True})


def _kept_in_loss(scene: Scene) -> Telling:
    """Importance weights and the like."""
    power, scaler, name = float(scene.facts["power"]), scene.scaler, scene.optimizer
    scale = number(float(scene.facts["scale"]))
    carried = f"the loss scale {scale}" if power == 1 else f"the loss scale {scale} to the power of {power:g}"
    text = (
        f"Something made of gradients that are still scaled became part of a loss: what is computed at {at(scene.again)} carries "
        f"{carried} and is {scene.factor}, and the loss of {at(scene.first)} was made of it without a division by that. The "
        f"term measures the loss scale."
    )
    how = (
        f"divide the gradients before they are kept: {scaler}.unscale_({name}) behind that backward pass, or "
        f"inv_scale = 1.0 / {scaler}.get_scale() and p.grad * inv_scale in place of p.grad; or differentiate the loss there "
        f"without {scaler}.scale(...)"
    )
    evidence = {"scale": scene.facts["scale"], "power": power, "in_loss": True}
    return Telling(text, scene.again, (order(scene, how),), evidence=evidence)


def _own_statement(scene: Scene) -> str:
    """The statement that clips or measures, where the corrected order can be written around it.

    Not where a framework clips and the line only calls it, nor the inside of a function or a loop of the script's own:
    there `unscale_` would be called for each parameter.
    """
    if scene.again is None or scene.first is None or scene.again.code is not scene.first.code:
        return ""
    code = statement(scene.again)
    is_statement = not code.startswith(("for ", "if ", "with ", "while ", "return", "def "))
    is_call = any(word in code for word in ("clip_grad", "total_norm"))
    return code if is_statement and is_call else ""


_EVIDENCE = (
    "scale",
    "clips",
    "limit",
    "norm",
    "by_hand",
    "limit_in_hook",
    "multiplied_by",
    "should_be",
    "update_too_small_by",
)


def _by_hand(scene: Scene) -> str:
    facts, scale = scene.facts, number(float(scene.facts.get("scale") or 0.0))
    whose = "Gradients within the graph" if facts.get("within_graph") else f"The gradients of `{scene.optimizer}`"
    head = f"{whose} were clipped by hand while still scaled, at {at(scene.again)}: "
    carried = f" They carry the loss scale {scale} from {at(scene.first)}."
    if facts.get("multiplied_by") is None:
        of = "gradient" if facts.get("within_graph") else "parameter's gradient"
        share = f"{facts.get('limit_in_hook') or 0.0:.3g}"
        limited = {
            "norm": f"the norm of each {of}",
            "unit": f"the norm of each row of weights' gradient, {share} of theirs,",
        }
        what = limited.get(facts.get("limit_of", ""), "each value")
        if facts.get("by_comparison"):
            what = "them"
        hook = "a hook runs inside the backward pass; " if facts.get("limit_in_hook") is not None else ""
        return (
            f"{head}{hook}the limit on {what} is meant for true gradients, and is {scale} times tighter on scaled "
            f"ones.{carried}"
        )
    return (
        f"{head}they were multiplied by {number(facts['multiplied_by'])}; the same limit on true gradients asks for "
        f"{number(facts['should_be'])}, so the update is {number(facts['update_too_small_by'])} times too small.{carried}"
    )
