"""scaler-not-saved: a checkpoint carries the model and the optimizer and not the scaler.

What happens   torch.save({"model": ..., "optimizer": ...}) in a run that uses a GradScaler, in one file or in several;
               or a run that loads such a checkpoint and begins with a fresh scaler.
Why it hurts   after resuming, the scale starts at 65536 again: the first steps are skipped while it settles, each taking an
               update, and a schedule moves on without them. A run that had settled at a low scale may lose many.
Instead        "scaler": scaler.state_dict() in the checkpoint, scaler.load_state_dict(checkpoint["scaler"]) on resuming.
Not this       a file with weights only.
"""

from __future__ import annotations

from ampguard.capture.protocol.habits import UNNAMED
from ampguard.diagnose.protocol.framework import save_instead
from ampguard.diagnose.protocol.scene import Scene, at, number
from ampguard.diagnose.protocol.telling import Telling, breach, order


def _path(scene: Scene) -> str:
    path = scene.facts["path"]
    return "" if path == UNNAMED else f": {path}"


def _held(scene: Scene) -> str:
    return "the model and the optimizer" if scene.facts["has_model"] else "the optimizer's state"


@breach("scaler-not-saved")
def scaler_not_saved(scene: Scene) -> Telling:
    scaler, scale = scene.scaler, number(scene.facts["scale"])
    if scene.facts.get("resumed"):
        text = (
            f"The run was resumed without the state of its scaler: `{scaler}` begins anew at {scale}. `{scene.optimizer}` took "
            f"over its state at {at(scene.again)}. The steps in which the scale settles again are skipped."
        )
    else:
        lost = (
            f"the scale was {scale}; a resumed run begins at its initial scale and skips steps until it settles."
            if scene.facts.get("has_moved", True)
            else f"the scale was its initial one still, {scale}. From where it has settled later on, a resumed run goes back to "
            f"that, and skips steps until it settles again."
        )
        text = (
            f"The checkpoint holds {_held(scene)} and not the scaler{_path(scene)}. It was saved at {at(scene.again)} while "
            f"{lost}"
        )
    how = save_instead(scene) or (
        f'save it with the rest: "scaler": {scaler}.state_dict(); and on resuming '
        f'{scaler}.load_state_dict(checkpoint["scaler"])'
    )
    evidence = {
        "scale": scene.facts["scale"],
        "path": scene.facts.get("path"),
        "resumed": scene.facts.get("resumed", False),
    }
    fix = order(scene, how, "save-scaler-state", scaler)
    return Telling(text, scene.again, (fix,), severity="warning", evidence=evidence)
