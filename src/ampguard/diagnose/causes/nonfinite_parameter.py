"""nonfinite-parameter: a parameter or buffer was NaN or Inf before the step.

What happens   memory that was never initialised (torch.empty), a checkpoint saved after the run had broken, an update
               made from a NaN gradient, or a running statistic that took in a bad batch.
Why it hurts   everything that touches it is NaN from now on. A poisoned running statistic shows only in evaluation.
Instead        initialise it, load an older checkpoint, and repair what poisoned it.
"""

from __future__ import annotations

from typing import Any

import torch

from ampguard import compat
from ampguard.capture.events.operands import held_in
from ampguard.capture.record import GlueOp, Ref, RootCall, StepRecord
from ampguard.compat import version_of
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.givens.held_low import HeldLow, held_low
from ampguard.diagnose.givens.made_before import made_before, made_in_step
from ampguard.diagnose.givens.naming import NamedTensor, describe_state, nonfinite_state, repaired_state
from ampguard.incident import Location
from ampguard.numerics import dtype_name, stats
from ampguard.replay.variants import Variant

OVERWRITES = frozenset({"copy_", "fill_", "_foreach_copy_"})
"""Operators that leave nothing of what was there before."""
QUOTED = 40
"""Of code that the explanation has quoted, what is short enough to be quoted in each fix."""
SHOWN = 3
"""Places named, where there are no more than these."""


@cause("nonfinite-parameter", phases=("forward", "backward"))
def nonfinite_parameter(evidence: Evidence) -> Finding | None:
    state = describe_state(evidence)
    if state is None:
        return None
    facts = stats(state.tensor)
    bad = state.tensor.numel() - round(facts.finite_share * state.tensor.numel())
    write = _last_write(evidence, state.held)
    last = write.line.location() if write is not None and write.line is not None else None
    loaded = evidence.replayer.loaded_at(state.held) if evidence.replayer is not None else None
    load = loaded.location() if loaded is not None else None
    at = last if load is None and write is not None and write.func.__name__.partition(".")[0] in OVERWRITES else None
    low = held_low(state.tensor.detach()) if load is not None else None
    others = sum(key != id(state.held) for key in nonfinite_state(evidence))
    before = made_before(evidence, state.held, state.tensor)
    within = made_in_step(evidence, write) if before is None else None
    if within is not None:
        reader = f"{words.operator(evidence)} {words.place(evidence)}"
        fixes = within.proposals(state.name, state.tensor, id(state.held))
        return within.as_finding(state.name, state.role, reader, (*fixes, _initialise(state.name, at, memory=None)))
    memory = _uninitialised_at(evidence, state.held)
    places = (~torch.isfinite(state.tensor.detach())).nonzero().tolist() if bad <= SHOWN else []
    return Finding(
        "nonfinite-parameter",
        f"The {state.role} `{state.name}` was not finite before the step began: {bad} of {state.tensor.numel()} "
        f"values{_where(places)}{_and_others(others)}. The computation only passed them on, first in {words.operator(evidence)}."
        f"{before.in_words() if before is not None else ''}",
        weight=100,
        evidence={
            "name": state.name,
            "role": state.role,
            "values": facts.as_dict(),
            "at": places,
            "others": others,
            "is_trained": state.held.requires_grad,
            "is_only_evaluated": _is_only_evaluated(evidence, state.held),
            "times_written": version_of(state.held),
            "batches_tracked": _batches_tracked(evidence, state.held),
            "gradients_were_looked_at": state.held.requires_grad and state.held.is_cpu,
            "written_at": {"file": at.file, "line": at.line, "code": at.code} if at is not None else None,
            "last_written_at": {"file": last.file, "line": last.line, "code": last.code} if last is not None else None,
            "loaded_at": {"file": load.file, "line": load.line, "code": load.code} if load is not None else None,
            "held_in": {"key": low.key, "dtype": dtype_name(low.dtype), "reaches": low.reaches}
            if low is not None
            else None,
        }
        | ({"made_before": before.as_dict()} if before is not None else {})
        | (
            {"uninitialised_at": {"file": memory.file, "line": memory.line, "code": memory.code}}
            if memory is not None
            else {}
        ),
        proposals=_after_load(evidence, state, load, low)
        if load is not None
        else (
            *(before.proposals(state.name, state.tensor, id(state.held)) if before is not None else ()),
            _initialise(state.name, at, memory, is_known=before is not None),
            *(
                ()
                if before is not None or memory is not None
                else (Proposal("load-weights", state.name, "load a checkpoint from before the first bad step"),)
            ),
        ),
        phase="parameters",
    )


def _batches_tracked(evidence: Evidence, state: torch.Tensor) -> int | None:
    """In how many batches a normalisation has updated this running statistic: writes of which PyTorch counts none."""
    modules = (m for e in evidence.events() if isinstance(e, RootCall) for m in compat.all_modules(e.module))
    owner = next((m for m in modules if any(b is state for b in compat.buffers_of(m).values())), None)
    count = compat.buffers_of(owner).get("num_batches_tracked") if owner is not None else None
    return int(count) if count is not None and count is not state and count.numel() == 1 else None


def _uninitialised_at(evidence: Evidence, state: torch.Tensor) -> Location | None:
    """Where the script asked for memory as it is, and has written nothing to it since."""
    line = evidence.replayer.before_training.uninitialised_at(state) if evidence.replayer is not None else None
    return line.location() if line is not None else None


def _initialise(name: str, at: Location | None, memory: Location | None, is_known: bool = False) -> Proposal:
    how = _initialised(name, at, memory, is_known)
    return Proposal("initialise-parameter", name, how, trial=lambda e: Variant(tensors=repaired_state(e)))


def _initialised(name: str, at: Location | None, memory: Location | None, is_known: bool) -> str:
    """How to give it other values.

    `at`: where the script wrote the bad ones; `memory`: where it asked for uninitialised memory; `is_known`: it is told what
    made them.
    """
    if memory is not None:
        return f"initialise {name} behind {words.place_of(memory)} (nn.init, or torch.zeros in place of torch.empty)"
    if at is not None:
        return f"write finite values to {name} in: {at.code}"
    if is_known:
        return f"give {name} finite values before training"
    return (
        f"initialise {name} before training (or reset it): its values come from uninitialised memory, a bad checkpoint or an "
        f"earlier poisoned update"
    )


def _after_load(evidence: Evidence, state: NamedTensor, line: Location, low: HeldLow | None) -> tuple[Proposal, ...]:
    """Where `load_state_dict` gave it these values: they are to be repaired there, or behind it."""
    at = words.place_of(line)
    if len(line.code) <= QUOTED:
        at = f"`{line.code}` ({at})"
    reset = Proposal(
        "initialise-parameter",
        state.name,
        f"reset {state.name} behind {at}, or give that finite weights",
        trial=lambda e: Variant(tensors=repaired_state(e)),
    )
    if low is None:
        how = (
            f"load weights that are finite in {at}: an average of weights is none before its first update, and a checkpoint "
            f"may have been saved after its run had broken"
        )
        return reset, Proposal("load-weights", state.name, how)
    how = (
        f"keep the weights that are loaded in {at} in float32 (or bfloat16, which has its range), where the script casts them "
        f"to {dtype_name(low.dtype)}"
    )
    wider = _wider_state(evidence)
    trial = (lambda _: Variant(tensors=wider)) if wider else None
    return Proposal("force-fp32", state.name, how, trial=trial), reset


def _wider_state(evidence: Evidence) -> dict[int | Ref, torch.Tensor]:
    """Every parameter and buffer that is not finite, as the script holds it in float32; none where one is not so held."""
    wider: dict[int | Ref, torch.Tensor] = {}
    for key, tensor in nonfinite_state(evidence).items():
        low = held_low(tensor)
        if low is None or low.wider is None:
            return {}
        wider[key] = low.wider.to(tensor.dtype)
    return wider


def _last_write(evidence: Evidence, state: torch.Tensor) -> GlueOp | None:
    """Where the script itself last wrote to it in this step, before it was read (weights swapped for averaged ones)."""
    memory = compat.storage_key(state)

    def is_written_by(event: GlueOp) -> bool:
        written = [event.args[position] for position in compat.positions_written(event.func) & {0}]
        targets = held_in([_viewed(target, evidence.bad.record) for target in written])
        return any(h.tensor is state or compat.storage_key(h.tensor) == memory != 0 for h in targets)

    before = (e for e in evidence.bad.record.events if isinstance(e, GlueOp) and e.index < evidence.op.event and e.args)
    return next(reversed([event for event in before if is_written_by(event)]), None)


def _viewed(target: Any, record: StepRecord) -> Any:
    """What a view is a view of: `w[2] = 0.0` and `w.data` write to w."""
    while isinstance(target, Ref):
        event = record.event(target.event)
        if not isinstance(event, GlueOp) or not event.args or not compat.is_view(event.func):
            break
        target = event.args[0]
    return target


def _is_only_evaluated(evidence: Evidence, state: torch.Tensor) -> bool:
    """Whether it belongs to a model of which nothing is trained: averaged weights, a frozen copy."""
    roots = (event for event in evidence.events() if isinstance(event, RootCall))
    models = [root.module for root in roots if any(p is state for p in compat.all_parameters(root.module))]
    return bool(models) and not any(p.requires_grad for model in models for p in compat.all_parameters(model))


def _and_others(count: int) -> str:
    return f", and {count} more parameter{'s' * (count > 1)} or buffer{'s' * (count > 1)}" if count else ""


def _where(places: list[list[int]]) -> str:
    """ ", at [19]": which entry of a table it is says more than how many there are."""
    return ", at " + ", ".join(map(str, places)) if places and places[0] else ""
