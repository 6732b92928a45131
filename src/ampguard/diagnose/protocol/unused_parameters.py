"""unused-parameters: parameters that should train never receive a gradient.

What happens   an optimizer holds them and they want a gradient, but no loss has ever depended on them: a head that forward
               does not call, a branch behind detach() or no_grad(), a layer left over from an earlier design.
Why it hurts   they stay as they were initialised. DistributedDataParallel waits for their gradients, or says that it does.
Instead        use them, or freeze them with requires_grad_(False) and leave them out of the optimizer.
Not this       parameters that are used in some steps only: they had a gradient at least once. Nor those whose gradient the
               script drops between backward and the optimizer's step (`p.grad = None`): frozen for a time, on purpose. A
               few small ones that a library's own model leaves unused (a pooler nobody asked for), or a bias beside a
               weight that is trained: told as info, the rest of the model trains.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene, listed
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("unused-parameters")
def unused_parameters(scene: Scene) -> Telling:
    facts, count = scene.facts, len(scene.parameters)
    elements, total = int(facts["elements"]), int(facts["of_elements"])
    share = elements / max(total, 1)
    text = (
        f"{count} of the {facts['of']} parameters of `{scene.optimizer}` have never had a gradient: {listed(scene.parameters)}, "
        f"in {facts['steps']} steps in which others had one. They want one (requires_grad), and stay as they were initialised."
        f" They are {share:.2%} of its elements ({elements} of {total})."
    )
    harmless = bool(facts.get("is_harmless"))
    if harmless:
        text += (
            " A library's model brings them along, and this loss does not use them: harmless."
            if facts["left_by"] == "library"
            else " They stand beside parameters of the same module that are trained: harmless."
        )
    where = f"`{scene.module}`" if scene.module else "these parameters"
    fixes = (
        order(scene, f"let the loss depend on {where}: call it in forward, without detach() or no_grad()", "call-order"),
        order(scene, f"or, if it is not to be trained: requires_grad_(False) for {where}, and leave it out of {scene.optimizer}",
              "rebuild-optimizer"),
    )  # fmt: skip
    if harmless:
        fixes = (order(scene, "leave it: nothing is lost by it", "wait", where), fixes[1])
    line = scene.again if scene.again is not None else scene.first
    return Telling(
        text,
        line,
        fixes,
        severity="info" if harmless else "warning",
        evidence={**{key: facts[key] for key in ("steps", "of", "elements", "of_elements", "left_by")}, "share": share},
        module=scene.module,
    )
