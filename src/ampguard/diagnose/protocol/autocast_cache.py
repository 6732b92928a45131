"""autocast-cache: the cast of a weight was cached and reused within one autocast region, where it should have been made anew.

What happens   autocast keeps the low-precision copies of the weights until the outermost region ends. In a region around the
               whole loop they are those of the first iteration: the optimizer changes the weights, the forward pass does not
               see it. In older releases of PyTorch a copy made under no_grad was reused for training, without a gradient.
Why it hurts   the loss does not move, or some weights have no gradient; nothing is said.
Instead        open the region inside the loop, around forward and loss only; or torch.clear_autocast_cache() after each
               step; or autocast(..., cache_enabled=False).
Not this       a region that ends in the same iteration, after several optimizers have stepped in it: only the passes
               after a step use its old weights (a warning).
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene, at, listed
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("autocast-cache")
def autocast_cache(scene: Scene) -> Telling:
    if scene.facts.get("within_iteration"):
        return _within_iteration(scene)
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


def _within_iteration(scene: Scene) -> Telling:
    """The region ends before the optimizer steps again: one forward pass behind its step saw old weights."""
    text = (
        f"A forward pass uses old weights: `{scene.optimizer}` steps at {at(scene.again)} inside a region of autocast, "
        f"{at(scene.first)}, and what is computed after that step in the same region still uses the low-precision copies of "
        f"{listed(scene.parameters)} from before it. A later loss of the iteration is that of weights one step old."
    )
    how = "end the region before the optimizer steps: autocast around each forward pass and its loss, backward and step outside"
    fixes = (order(scene, how), order(scene, "or clear the copies after each step: torch.clear_autocast_cache()"))
    evidence = {"weights": scene.facts.get("weights")}
    return Telling(text, scene.first or scene.again, fixes, severity="warning", evidence=evidence)
