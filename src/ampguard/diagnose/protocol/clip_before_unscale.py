"""clip-before-unscale: gradients are clipped, or their norm is read, while still scaled.

What happens   clip_grad_norm_ between scaler.scale(loss).backward() and scaler.step(optimizer), and no unscale_ before it.
Why it hurts   the norm is 65536 times too large, so every step is clipped, and after unscaling the gradients are 65536 times
               smaller than the limit asks for: training nearly stands still. A norm that is only logged is wrong by as much.
Instead        scaler.unscale_(optimizer) first; scaler.step() sees that it was done.
Not this       a limit that the script multiplies by scaler.get_scale() itself.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene, at, number
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("clip-before-unscale")
def clip_before_unscale(scene: Scene) -> Telling:
    name, scaler = scene.optimizer, scene.scaler
    scale = number(float(scene.facts.get("scale") or 0.0))
    clips = bool(scene.facts.get("clips"))
    done = "clipped" if clips else "measured"
    text = (
        f"The gradients of `{name}` were {done} while still scaled: the norm at {at(scene.again)} is {scene.factor}. They "
        f"carry the loss scale from {at(scene.first)}."
    )
    if clips:
        text += f" Once unscaled, the clipped gradients are up to {scale} times smaller than the limit asks for."
    code = scene.again.location().code if scene.again is not None else ""
    how = f"unscale first: {scaler}.unscale_({name}); {code or 'then clip'}"
    return Telling(
        text,
        scene.again,
        (order(scene, how),),
        severity="error" if clips else "warning",
        evidence={"scale": scene.facts.get("scale"), "clips": clips},
    )
