"""fp16-parameters: the scaler meets float16 gradients because the parameters themselves are float16.

What happens   model.half(), or weights loaded as float16 (torch_dtype=torch.float16), together with a GradScaler.
Why it hurts   ValueError "Attempting to unscale FP16 gradients.": unscaling in float16 would flush small gradients to zero.
Instead        keep the parameters in float32 and let autocast compute in float16.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene, at, listed
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("fp16-parameters")
def fp16_parameters(scene: Scene) -> Telling:
    name, count, total = scene.optimizer, len(scene.parameters), scene.facts.get("of", 0)
    text = (
        f"`{scene.scaler}` cannot unscale gradients in float16: {count} of the {total} trained parameters of `{name}` are "
        f"float16. They are {listed(scene.parameters)}. "
        f'PyTorch refuses at {at(scene.again)}: "Attempting to unscale FP16 gradients."'
    )
    how = "keep the trained parameters in float32 and compute in float16 under autocast: for p in model.parameters(): "
    if scene.facts.get("has_frozen"):
        text += " Those that are frozen may stay so: they have no gradient."
        how += "p.data = p.data.float() if p.requires_grad else p.data, before the optimizer is built"
    else:
        how += "p.data = p.data.float(), before the optimizer is built (or load the model with dtype float32)"
    fixes = (
        order(scene, how, "fp32-parameters", scene.module),
        order(scene, "or train in bfloat16, which needs no scaler", "use-bf16", scene.module),
    )
    return Telling(text, scene.again, fixes, module=scene.module, dtype="float16")
