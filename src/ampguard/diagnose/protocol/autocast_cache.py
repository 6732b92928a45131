"""autocast-cache: the cast of a weight was cached and reused within one autocast region, where it should have been made anew.

What happens   autocast keeps the low-precision copies of the weights until the outermost region ends. In a region around the
               whole loop they are those of the first iteration: the optimizer changes the weights, the forward pass does not
               see it. In older releases of PyTorch a copy made under no_grad was reused for training, without a gradient.
Why it hurts   the loss does not move, or some weights have no gradient; nothing is said.
Instead        open the region inside the loop, around forward and loss only; or torch.clear_autocast_cache() after each
               step; or autocast(..., cache_enabled=False).
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene, at, listed
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("autocast-cache")
def autocast_cache(scene: Scene) -> Telling:
    text = (
        f"The forward pass goes on using old weights: one autocast region, {at(scene.first)}, outlasts the step at "
        f"{at(scene.again)}. Until it ends it keeps the low-precision copies of {listed(scene.parameters)}, made before the "
        f"step: the updates of `{scene.optimizer}` have no effect on the loss."
    )
    fixes = (
        order(scene, "open autocast inside the loop, around the forward pass and the loss only", "call-order"),
        order(scene, "or clear the copies after each step: torch.clear_autocast_cache()", "call-order"),
    )
    return Telling(
        text,
        scene.first if scene.first is not None else scene.again,
        fixes,
        evidence={"weights": scene.facts.get("weights")},
        module=None,
    )
