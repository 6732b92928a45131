"""stale-parameters: the tensors that an optimizer holds are not those that receive gradients.

What happens   a layer was replaced, parametrized (weight_norm) or wrapped in an adapter (LoRA), weights were loaded with
               assign=True, or the model copied, re-created or moved, after the optimizer was built; or an optimizer holds
               flat buffers of which the parameters are views, and zero_grad(set_to_none=True), PyTorch's default, drops
               their gradients: backward then gives each parameter a gradient of its own.
Why it hurts   the optimizer updates tensors that nobody uses. With a GradScaler and no gradient at all PyTorch says "No inf
               checks were recorded for this optimizer."; otherwise nothing is said, and those layers never learn.
               Layers that were frozen, and so left out of the optimizer, and that are unfrozen later, and layers that are
               added later: they never learn. Nor do a learned temperature or the weights of a loss that nobody gave to an
               optimizer, nor layers in a plain Python list, which parameters() does not see (nn.ModuleList).
               The line that is named is the one that put the layer in, where it was seen.
Instead        build the optimizer last, from the model that is trained; with flat buffers zero_grad(set_to_none=False).
Not this       flat buffers whose gradients are views of one buffer as well: they are healthy.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.framework import build_instead
from ampguard.diagnose.protocol.scene import Scene, at, listed, place_of
from ampguard.diagnose.protocol.telling import Telling, breach, order


def _how_it_came(scene: Scene) -> str:
    """What was done to the model after the optimizer was built, as far as the tensors show it."""
    if any(".parametrizations." in name for name in scene.parameters):
        return (
            "A parametrization (weight_norm, spectral_norm) was registered after the optimizer was built: it has put new "
            "parameters in the place of the weights."
        )
    if scene.facts.get("same_memory"):
        return (
            "They have the same memory: the weights were wrapped in new parameters (weight_norm, prune, nn.Parameter(p.data)) "
            "after the optimizer was built."
        )
    if scene.facts.get("copied"):
        return (
            "The forward pass goes through a copy of the model (copy.deepcopy, AveragedModel): that one is trained now."
        )
    put = scene.facts.get("put_at")
    if put is not None:
        return f"{listed(scene.owners())} came into the model here, after the optimizer was built."
    if scene.facts.get("plain"):
        return "These weights were made anew, copied or moved after the optimizer was built."
    return (
        "A layer was replaced, its weights assigned anew, or the model copied or moved, after the optimizer was built."
    )


@breach("stale-parameters")
def stale_parameters(scene: Scene) -> Telling:
    lost = scene.facts.get("lost", [])
    flat = bool(scene.facts.get("flat_buffers"))
    name = scene.optimizer
    built = f" (now at {at(scene.first)})" if scene.first is not None else ""
    what = f"{len(lost)} of its {scene.facts.get('of', len(lost))} tensors"
    if scene.facts.get("unfrozen"):
        return _unfrozen(scene)
    if scene.facts.get("never_held"):
        return _never_held(scene)
    if scene.facts.get("moved_out"):
        why = (
            f"{listed(scene.parameters)} no longer lie in its flat buffer, and others of the model still do. They were moved or "
            f"converted (.to(...), another memory format, weights assigned anew) after the buffer was made: they get gradients, "
            f"and are never updated."
        )
        how = f"move and convert the model first, and then make the flat buffers and {name}{built}"
        fix = order(scene, how, "rebuild-optimizer")
    elif flat:
        why = (
            f"it holds {what} as flat buffers that share their memory with {listed(scene.parameters)}. "
            f"zero_grad(set_to_none=True) has dropped the buffers' gradients, and backward now fills the parameters' own."
        )
        how = f"{name}.zero_grad(set_to_none=False)"
        fix = order(scene, f"keep the flat gradient buffers: {how}", "keep-grad-buffers")
    elif scene.facts.get("wrapped"):
        alone = len(scene.parameters) == 1
        why = (
            f"{listed(scene.parameters)} {'gets a gradient and belongs' if alone else 'get gradients and belong'} to no "
            f"optimizer, while {what} lie frozen inside the same modules. Layers were wrapped in new ones (LoRA, an "
            f"adapter) after the optimizer was built: what was added never learns."
        )
        how = f"build {name} after the layers have been wrapped{built}, from the parameters that want a gradient then"
        fix = order(scene, how, "rebuild-optimizer")
    else:
        any_more = " any more" if scene.facts.get("had_gradients") else ""
        plain = bool(scene.facts.get("plain"))
        belongs = "" if plain else f"{'belongs' if len(lost) == 1 else 'belong'} to no module that is called and "
        if scene.facts.get("copied"):
            belongs = f"{'belongs' if len(lost) == 1 else 'belong'} to a model that is not called in this step and "
        why = (
            f"{what} {belongs}{'gets' if len(lost) == 1 else 'get'} no gradient{any_more}, while {listed(scene.parameters)} "
            f"{'gets one and belongs' if len(scene.parameters) == 1 else 'get one and belong'} to no optimizer. "
            f"{_how_it_came(scene)}"
        )
        how = f"build {name} after the model is complete and on its device{built}, from its parameters() then"
        if scene.facts.get("copied"):
            how = f"call the model whose parameters {name} holds; or build {name} anew from those of the copy that is trained now"
        if plain:
            how = f"build {name} after its tensors have got their last values and place{built}, from those"
        is_midway = bool(scene.facts.get("is_midway")) and not scene.facts.get("copied")
        if is_midway:
            put = scene.facts.get("put_at")
            there = f"behind {place_of(put)}" if put is not None else "there"
            how = (
                f"they were made anew in the middle of the run: build {name} anew {there}{built}, or write the new values "
                f"into the tensors that it holds (p.data.copy_(...))"
            )
        framework = build_instead(scene) if not is_midway else None
        fix = order(scene, f"{framework}; or {how}" if framework else how, "rebuild-optimizer")
    put, line = scene.facts.get("put_at"), scene.again if scene.again is not None else scene.first
    if put is not None and not flat:
        why += f" `{name}` steps at {at(line)}." if line is not None else ""
        line = put
    refused = ' PyTorch says "No inf checks were recorded".' if scene.facts.get("refused") else " No error comes of it."
    shapes = [list(shape) for shape in lost[:8]]
    return Telling(
        f"The optimizer `{name}` does not hold the tensors that are trained: {why}{refused}",
        line,
        (fix,),
        evidence={"flat_buffers": flat, "lost_shapes": shapes, "lost_count": len(lost)},
        module=scene.module,
    )


def _unfrozen(scene: Scene) -> Telling:
    """Layers that were frozen, or not there, as the optimizer was built, and so left out of it."""
    name, alone = scene.optimizer, len(scene.parameters) == 1
    added, early = bool(scene.facts.get("added")), bool(scene.facts.get("early"))
    was = ("was" if alone else "were") + (" not there" if added else " frozen")
    when = (
        f"`{name}` was built{f' at {at(scene.first)}' if scene.first is not None else ''}"
        if early
        else "training began"
    )
    then = "before the first step" if early else "in the middle of the run"
    text = (
        f"{listed(scene.parameters)} {was} when {when} and "
        f"{'gets a gradient and belongs' if alone else 'get gradients and belong'} to no optimizer now: "
        f"{'added' if added else 'unfrozen'} {then}, and never updated. Nobody clears those gradients, so "
        f"they pile up{', and count where the norm of all is taken' if added else ''}. No error comes of it."
    )
    owners = scene.owners()
    group = f"{owners[0]}.parameters()" if len(owners) == 1 and scene.module is not None else "..."
    done = "added" if added else "unfrozen"
    are = f"{listed(owners)} {'is' if len(owners) == 1 else 'are'} {done}"
    how = f'where {are}: {name}.add_param_group({{"params": {group}}})'
    put = scene.facts.get("put_at")
    if put is not None:
        stepped = scene.again if scene.again is not None else scene.first
        text += f" `{name}` steps at {at(stepped)}." if stepped is not None else ""
    if early:
        how = f"build {name} after {are}, from the parameters that want a gradient then"
    fix = order(scene, how, "rebuild-optimizer")
    evidence = {"flat_buffers": False, "lost_shapes": [], "lost_count": 0, "unfrozen": True}
    line = put if put is not None else scene.again if scene.again is not None else scene.first
    return Telling(text, line, (fix,), severity="warning", evidence=evidence, module=scene.module)


def _never_held(scene: Scene) -> Telling:
    """Forgotten when the optimizer was built, or hidden from `parameters()`."""
    name, alone, hidden = scene.optimizer, len(scene.parameters) == 1, scene.facts["hidden_in"]
    what = listed(scene.parameters)
    if hidden:
        what = f"{len(scene.parameters)} parameters of the layers in {listed(hidden)}"
    text = (
        f"{what} {'gets a gradient and belongs' if alone else 'get gradients and belong'} to no optimizer: after "
        f"{scene.facts['steps']} steps of `{name}` {'it has' if alone else 'they have'} the values that training began with. "
    )
    if hidden:
        text += "A plain list or dictionary of layers is not registered: parameters() and to() do not see them. "
        how = f"make {listed(hidden)} an nn.ModuleList (nn.ModuleDict), before {name} is built"
    else:
        called = [p for p in scene.parameters if p.isidentifier() and not scene.hangs_in_module(p)]
        params = ", ".join(called) if called == scene.parameters[:4] else "..."
        how = f'{name}.add_param_group({{"params": [{params}]}}); or, if never to be trained: requires_grad_(False)'
    text += "No error comes of it."
    evidence = {"flat_buffers": False, "lost_shapes": [], "lost_count": 0, "never_held": True, "hidden_in": hidden}
    line = scene.again if scene.again is not None else scene.first
    fix = order(scene, how, "rebuild-optimizer")
    return Telling(text, line, (fix,), severity="warning", evidence=evidence, module=scene.module)
