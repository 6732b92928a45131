"""unused-parameters: parameters that should train never receive a gradient.

What happens   an optimizer holds them and they want a gradient, but no loss has ever depended on them: a head that forward
               does not call, a branch behind detach() or no_grad(), a layer left over from an earlier design. Or reentrant
               checkpointing is given nothing that wants a gradient (the stem is frozen), and runs its part without a graph.
Why it hurts   they stay as they were initialised. DistributedDataParallel waits for their gradients, or says that it does.
               An expert that no token is routed to, a head whose task is never drawn. Or they are frozen and meant to train:
               `module.requires_grad = True` changes no parameter, and an optimizer is given frozen ones in the middle of a run.
Instead        use them, or freeze them with requires_grad_(False) and leave them out of the optimizer.
Not this       parameters that are used in some steps only: they had a gradient at least once. Nor those whose gradient the
               script drops between backward and the optimizer's step (`p.grad = None`): frozen for a time, on purpose. A
               few small ones that a library's own model leaves unused (a pooler nobody asked for), a bias beside a
               weight that is trained, or what tied weights have taken the place of: told as info, the rest of the model trains.
               So is a norm that some blocks of a class leave out, beside their other layers and by other blocks' example.
"""

from __future__ import annotations

import sys

from ampguard.diagnose.protocol.scene import Scene, at, listed
from ampguard.diagnose.protocol.telling import Telling, breach, order

FIND_UNUSED = {
    "lightning.pytorch": 'Trainer(strategy="ddp_find_unused_parameters_true")',
    "pytorch_lightning": 'Trainer(strategy="ddp_find_unused_parameters_true")',
    "transformers.trainer": "TrainingArguments(ddp_find_unused_parameters=True)",
    "accelerate": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])",
    "torch": "DistributedDataParallel(model, find_unused_parameters=True)",
}
"""How it is asked for, by the package that wraps the model."""
HARMLESS = {
    "library": " A library's model brings them along, and this loss does not use them: harmless.",
    "sibling": " They stand beside parameters of the same module that are trained: harmless.",
    "variant": " Other modules of the same class train theirs, and those that hold these are trained without: harmless where "
    "that is meant (a block that leaves out its first norm).",
    "tying": " They belong to no module any more: weights were tied after the optimizer was built, and those that have taken "
    "their place are trained: harmless.",
}
"""What is said by who has left them unused."""


@breach("unused-parameters")
def unused_parameters(scene: Scene) -> Telling:
    facts, count = scene.facts, len(scene.parameters)
    if facts.get("is_frozen"):
        return _still_frozen(scene)
    elements, total = int(facts["elements"]), int(facts["of_elements"])
    share = elements / max(total, 1)
    text = (
        f"{count} of the {facts['of']} parameters of `{scene.optimizer}` have never had a gradient: {listed(scene.parameters)}, "
        f"in {facts['steps']} steps in which others had one. They want one (requires_grad), and stay as they were initialised."
        f" They are {share:.2%} of its elements ({elements} of {total})."
    )
    if facts.get("refused"):
        return _refused(scene)
    harmless = bool(facts.get("is_harmless"))
    if harmless:
        text += HARMLESS[facts["left_by"]]
    owners = scene.owners()
    where, them = listed(owners), "it" if len(owners) == 1 else "them"
    use = f"let the loss depend on {where}: use {them} in forward, without detach() or no_grad()"
    alike = int(facts.get("alike") or 0)
    if alike and not harmless:
        others = f"{alike} more in the same list that {'is' if alike == 1 else 'are'} built alike and trained"
        text += f" Beside {where} there {'is' if alike == 1 else 'are'} {others}."
        use = (
            f"where each batch or token chooses who computes it (experts, heads of tasks), none has chosen {where}: look at what "
            f"chooses (the router's first weights and bias, a loss that balances it, the sampling of tasks); otherwise use "
            f"{them} in forward, without detach() or no_grad()"
        )
    cut = scene.facts.get("cut_at")
    if cut is not None and not harmless:
        text += (
            f" Reentrant checkpointing at {at(cut)} is given nothing that wants a gradient (what comes before it is frozen): "
            f"what it runs has none then, whatever the weights in it want."
        )
        use = f"checkpoint(..., use_reentrant=False) at {at(cut)}"
    fixes = (
        order(scene, use, "call-order"),
        order(scene, f"or, if never to be trained: requires_grad_(False) for {where}, and leave {them} out of {scene.optimizer}",
              "rebuild-optimizer"),
    )  # fmt: skip
    if harmless:
        fixes = (order(scene, f"leave {them}: nothing is lost", "wait", where), fixes[1])
    line = scene.again if scene.again is not None else scene.first
    return Telling(
        text,
        line,
        fixes,
        severity="info" if harmless else "warning",
        evidence={**{key: facts[key] for key in ("steps", "of", "elements", "of_elements", "left_by")}, "share": share},
        module=scene.module,
    )


def _still_frozen(scene: Scene) -> Telling:
    """They were given to the optimizer to be trained, or an attribute of their module says that they are."""
    facts, owners = scene.facts, scene.owners()
    where, them = listed(owners), "it" if len(owners) == 1 else "them"
    text = (
        f"{len(scene.parameters)} of the {facts['of']} parameters of `{scene.optimizer}` want no gradient and get none: "
        f"{listed(scene.parameters)}, in {facts['steps']} steps since they were meant to train."
    )
    unfreeze = ", ".join(f"{owner}.requires_grad_(True)" for owner in owners[:3])
    how = f"unfreeze {where}: {unfreeze}"
    if facts["has_attribute"]:
        text += (
            " `requires_grad = True` on a module is an attribute like any other: no parameter hears of it. The method with the "
            "underscore, `requires_grad_(True)`, is what changes them."
        )
    else:
        text += f" The optimizer was given {them} in the middle of the run, where they were frozen."
    line = scene.again if scene.again is not None else scene.first
    evidence = {"steps": facts["steps"], "of": facts["of"], "frozen": True}
    return Telling(
        text, line, (order(scene, how, "call-order"),), severity="warning", evidence=evidence, module=scene.module
    )


def _refused(scene: Scene) -> Telling:
    """DistributedDataParallel averages gradients as they come, and waits for those that never do."""
    facts, count, where = scene.facts, len(scene.parameters), listed(scene.owners())
    text = (
        f"DistributedDataParallel waits for a gradient of each parameter, and {count} of the {facts['of']} of "
        f"`{scene.optimizer}` had none in the iteration before: {listed(scene.parameters)}. At {at(scene.again)} PyTorch says "
        f'"Expected to have finished reduction in the prior iteration".'
    )
    spelled = next((how for package, how in FIND_UNUSED.items() if package in sys.modules), FIND_UNUSED["torch"])
    fixes = (
        order(scene, f"let the loss of every iteration depend on {where}, on every rank", "call-order"),
        order(scene, f"or let DDP look for them in each iteration: {spelled}", "call-order"),
        order(
            scene,
            f"or, if never trained: requires_grad_(False) for {where} before the model is wrapped",
            "rebuild-optimizer",
        ),
    )
    evidence = {key: facts[key] for key in ("steps", "of", "elements", "of_elements", "left_by")}
    return Telling(text, scene.again, fixes, evidence={**evidence, "refused": "forward"}, module=scene.module)
