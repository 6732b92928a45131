"""nonfinite-parameter, seen as a checkpoint is written: the weights that `torch.save` is given are not finite.

What happens   the run has broken, and goes on saving checkpoints.
Why it hurts   the file overwrites a healthy one, or is resumed from.
Instead        go back to a file from before the step that is named here.
Not this       a number beside the weights (the best loss so far), which may be NaN without harm to them.
"""

from __future__ import annotations

from ampguard.diagnose.cases.bad_since import spoiled
from ampguard.diagnose.protocol.owners import common_module
from ampguard.diagnose.protocol.scene import Scene, at, listed, number
from ampguard.diagnose.protocol.telling import Telling, breach, order


@breach("nonfinite-parameter")
def nonfinite_parameter(scene: Scene) -> Telling | None:
    facts = scene.facts
    found = [
        (name, value, scene.in_model(name, value)) for name, value in zip(facts["names"], facts["values"], strict=True)
    ]
    found = [(name, value, known) for name, value, known in found if known is not None or value.numel() > 1]
    if not found:
        return None
    names, values = [name for name, *_ in found], [value for _, value, _ in found]
    bad = sum(int((~t.detach().isfinite()).sum()) for t in values)
    since, largest = facts.get("last_good_step"), facts.get("largest")
    is_state = all(known is not None and not scene.is_trained(known) for *_, known in found)
    when = f" The loss of step {since} was still finite: a later update has spoiled them." if since is not None else ""
    if since is not None and facts.get("bad_since") == since:
        when = f" Another loss of step {since} was not finite: its update has spoiled them."
    how = "delete this file and go back to a checkpoint from before that step; find what made the update bad"
    if is_state:
        since = None  # batch statistics hide a bad running statistic from the losses of training
        when = (
            " No optimizer trains them: they are buffers, or frozen. A forward pass has spoiled them (a running statistic "
            "that took in a bad batch), a write of the script's, or they were so from the beginning."
        )
        how = "delete this file and go back to a checkpoint from before; find what wrote to them, or reset them"
    evidence = {"path": facts["path"], "names": names[:12], "bad_values": bad, "since_step": since}
    first = scene.spoiled_by(names[0] if is_state else None)
    if first is not None and (since is None or first.step >= since):
        when = f" They were {spoiled(first, evidence)}"
        how = f"delete this file and go back to a checkpoint from before step {first.step}; repair the {first.cause} of that step"
    if largest is not None:
        dtype = str(values[0].dtype).removeprefix("torch.")
        when = f" In the running model they are finite, up to {number(largest)}: the cast to {dtype} for the file overflowed."
        how = f"save what does not fit {dtype} in float32: do not cast the buffers, or leave out .half()"
    text = (
        f"Weights that are not finite were saved: {facts['path']} holds {bad} values of NaN or Inf. They are in {len(names)} of "
        f"{facts['of']} tensors, as {listed(names)}; it was written at {at(scene.again)}.{when}"
    )
    fix = order(scene, how, "load-weights" if largest is None else "force-fp32", facts["path"])
    return Telling(
        text,
        scene.again,
        (fix,),
        evidence=evidence,
        phase="parameters",
        module=common_module([_of_user(n) for n in names]),
    )


def _of_user(name: str) -> str:
    """A name in a file without the prefixes of wrappers.

    >>> _of_user("module._orig_mod.head.weight")
    'head.weight'
    """
    for prefix in ("module.", "_orig_mod."):
        if name.startswith(prefix):
            return _of_user(name.removeprefix(prefix))
    return name
