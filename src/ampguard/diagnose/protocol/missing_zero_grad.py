"""missing-zero-grad: gradients of earlier iterations are never cleared and pile up.

What happens   a loop of backward and step without zero_grad.
Why it hurts   every step follows the sum of all gradients so far: the effective learning rate grows until training diverges.
               With a GradScaler the old gradients are unscaled once more in every step and hardly count; the code is as wrong.
Instead        optimizer.zero_grad() once an iteration, before backward.
Not this       gradient accumulation: several backward passes and one step, then zero_grad.
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene, at
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("missing-zero-grad")
def missing_zero_grad(scene: Scene) -> Telling:
    name, steps = scene.optimizer, scene.facts["steps"]
    scaled = bool(scene.facts.get("has_scaler"))
    text = (
        f"The gradients of `{name}` are never cleared: {steps} steps in a row held those of earlier iterations. "
        f"Each backward pass adds to what {at(scene.again)} has used already."
    )
    if scaled:
        text += (
            " The scaler divides the old ones again in every step, so they count little; without it they would pile up."
        )
    how = f"clear them once an iteration, before backward: {name}.zero_grad()"
    return Telling(
        text,
        scene.again,
        (order(scene, how),),
        severity="warning" if scaled else "error",
        evidence={"steps": steps, "has_scaler": scaled},
    )
