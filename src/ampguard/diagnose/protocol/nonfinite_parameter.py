"""nonfinite-parameter, seen as a checkpoint is written: the weights that `torch.save` is given are not finite.

What happens   the run has broken, and goes on saving checkpoints.
Why it hurts   the file overwrites a healthy one, or is resumed from.
Instead        go back to a file from before the step that is named here.
"""

from __future__ import annotations

from torch import Tensor

from ampguard.diagnose.protocol.owners import common_module
from ampguard.diagnose.protocol.scene import Scene, at, listed, number
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("nonfinite-parameter")
def nonfinite_parameter(scene: Scene) -> Telling:
    names, facts = scene.facts["names"], scene.facts
    values: list[Tensor] = facts["values"]
    bad = sum(int((~t.detach().isfinite()).sum()) for t in values)
    since, largest = facts.get("last_good_step"), facts.get("largest")
    when = f" The loss of step {since} was still finite: a later update has spoiled them." if since is not None else ""
    how = "delete this file and go back to a checkpoint from before that step; find what made the update bad"
    if largest is not None:
        dtype = str(values[0].dtype).removeprefix("torch.")
        when = f" In the running model they are finite, up to {number(largest)}: the cast to {dtype} for the file overflowed."
        how = f"save what does not fit {dtype} in float32: do not cast the buffers, or leave out .half()"
    text = (
        f"Weights that are not finite were saved: {facts['path']} holds {bad} values of NaN or Inf. They are in {len(names)} of "
        f"{facts['of']} tensors, as {listed(names)}; it was written at {at(scene.again)}.{when}"
    )
    fix = order(scene, how, "load-weights" if largest is None else "force-fp32", facts["path"])
    evidence = {"path": facts["path"], "names": names[:12], "bad_values": bad, "since_step": since}
    return Telling(text, scene.again, (fix,), evidence=evidence, phase="parameters", module=common_module(names))
