"""needless-scaler: gradient scaling with bfloat16 or float32, where it does nothing useful.

What happens   a GradScaler stays on although no forward pass runs in float16: bfloat16 autocast, or autocast switched off.
Why it hurts   results are the same; every step pays for scaling, unscaling and a look at found_inf that waits for the
               device, and at a large scale a healthy step may be skipped.
Instead        no scaler, or GradScaler(enabled=use_float16).
"""

from __future__ import annotations

from ampguard.diagnose.protocol.scene import Scene
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("needless-scaler")
def needless_scaler(scene: Scene) -> Telling:
    dtype, scaler = scene.facts["dtype"], scene.scaler
    why = "with float32's range gradients" if dtype == "bfloat16" else "there gradients"
    text = (
        f"`{scaler}` scales the loss although nothing is computed in float16: every forward pass of {scene.facts['steps']} "
        f"steps ran in {dtype}, and {why} do not underflow. Scaling costs a pass over the gradients and a wait for the device."
    )
    fix = order(
        scene,
        f"leave it out, or switch it off: {scaler} = torch.amp.GradScaler(enabled=False)",
        "remove-scaler",
        scaler,
    )
    return Telling(text, scene.again, (fix,), severity="warning", dtype=dtype)
