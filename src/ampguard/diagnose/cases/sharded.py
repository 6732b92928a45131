"""What can be said of a step that cannot be run again because the other ranks would have to take part.

With parameters spread over ranks (FSDP, tensor parallelism) a replay on one rank would wait for the others, which are
elsewhere. A batch that holds NaN needs no replay. A forward pass under FSDP2 is run again a little later, from the weights
as they are gathered for the backward pass.
"""

from __future__ import annotations

from typing import Any

import msgspec
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.operands import leaves
from ampguard.capture.record import BadResult, GlueOp, Held, Ref, RootCall
from ampguard.incident import Fix, Incident
from ampguard.numerics import dtype_name, is_finite, stats


def may_await(bad: BadResult, holds_off: bool) -> bool:
    """Whether the other ranks are what is missing, and weights gathered later would do.

    Bad gradients are seen after the backward pass: the next forward pass gathers the weights, if no update uses these.
    `holds_off`: whether updates with such gradients are held off.
    """
    are_kept = bad.is_held_off or holds_off if bad.kind == "gradient" else not bad.is_of_gradients
    return are_kept and any(compat.needs_other_ranks(module) for module in modules_of(bad))


def with_advice(incident: Incident, bad: BadResult) -> Incident:
    """What to do about a failure of a sharded model of which nothing more could be found out."""
    if not any(compat.needs_other_ranks(module) for module in modules_of(bad)):
        return incident
    elsewhere = (
        "Gradients are averaged over ranks: where another rank's loss was bad in this step, its report says why. Else run"
        if bad.is_of_gradients
        else "Run"
    )
    is_gathered = any(compat.fsdp_states(module) for module in modules_of(bad))
    then = (
        "run again from the weights that the next one gathers"
        if is_gathered
        else "the next one like it is followed operator by operator"
    )
    text = f"{elsewhere} again with --on-nonfinite skip: bad steps are held off, and {then}."
    return msgspec.structs.replace(incident, explanation=f"{incident.explanation} {text}")


def modules_of(bad: BadResult) -> list[Any]:
    """The modules that the step called."""
    roots = [e.module for e in bad.record.events if isinstance(e, RootCall) and not e.is_function]
    return list({id(module): module for module in roots}.values())


def bad_input(bad: BadResult, reason: str, rank: int) -> Incident | None:
    """The incident of a batch that holds NaN or Inf already; None where what sharded models were given is finite.

    Where the loss is finite, a NaN of the batch did no harm to it.
    """
    roots = [event for event in bad.record.events if isinstance(event, RootCall)]
    if bad.is_of_gradients:
        return None
    for root in (root for root in roots if compat.needs_other_ranks(root.module)):
        found = bad_given(bad, root)
        if found is not None:
            return input_incident(bad, root, *found, f"The step was not run again: {reason}.", rank, reason)
    return None


def bad_given(bad: BadResult, root: RootCall) -> tuple[str, Tensor] | None:
    """What a call was given that is not finite, and under which name."""
    named = [*((f"input {i}", given) for i, given in enumerate(root.args)), *root.kwargs.items()]
    for name, value in ((name, _value(leaf, bad)) for name, given in named for leaf in leaves(given)):
        if value is not None and not is_finite(value):
            return name, value
    return None


def _value(given: Any, bad: BadResult) -> Tensor | None:
    """A tensor that the model was given and that no model made, where it is still there."""
    if isinstance(given, Held):
        return given.value if given.tensor.grad_fn is None else None
    event = bad.record.event(given.event) if isinstance(given, Ref) else None
    if not isinstance(event, GlueOp) or given.output >= len(event.outputs):
        return None
    tensor: Tensor | None = event.outputs[given.output]()
    return tensor if tensor is not None and tensor.grad_fn is None else None


def input_incident(
    bad: BadResult, root: RootCall, name: str, value: Tensor, what_else: str, rank: int, not_replayed: str | None = None
) -> Incident:
    """The incident of a call that was given non-finite values."""
    values = stats(value)
    rows = value.isfinite().flatten(1).all(1).logical_not().nonzero().flatten().tolist() if value.dim() > 1 else []
    counts = f"{values.nan} NaN, {values.pos_inf} +Inf, {values.neg_inf} -Inf of {value.numel()} values"
    plural = "samples" if len(rows) > 1 else "sample"
    which = f" ({plural} {', '.join(map(str, rows[:8]))} of the batch)" if rows else ""
    return Incident(
        step=bad.step,
        rank=rank,
        mode=bad.mode,
        phase="data",
        severity="error",
        cause="nonfinite-input",
        module=root.prefix,
        op=None,
        dtype=dtype_name(value.dtype),
        location=root.line.location() if root.line is not None else None,
        explanation=f"What the model was given as {name} holds non-finite values already: {counts}{which}. {what_else}",
        evidence={
            "name": name,
            "role": "input",
            "samples": rows[:64],
            "values": values.as_dict(),
            **({} if not_replayed is None else {"rung": "none", "not_replayed_because": not_replayed}),
        },
        fixes=(
            Fix("filter-sample", name, "drop the samples that are not finite before the model is called"),
            Fix("fix-data", name, "clean the data: torch.nan_to_num, or repair it where it is made"),
        ),
    )
