"""The smallest set of modules (and lines outside modules) that cures the step when they leave autocast.

Grown first: the module where the chain begins, then, while the replay is still bad, the module where the new chain
begins. Then every member that is not needed is taken out again (delta debugging: Zeller and Hildebrandt, "Simplifying
and Isolating Failure-Inducing Input", IEEE TSE 2002).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from ampguard import compat
from ampguard.capture.record import Line, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.attempts import attempt
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.fixes.float_code import in_float32
from ampguard.diagnose.fixes.low_weights import widened_weights
from ampguard.diagnose.fixes.region_code import ONE_CALL, call_outside_autocast, forward_outside_autocast
from ampguard.diagnose.fixes.script_casts import casts, casts_behind, made_from, sorted_casts
from ampguard.diagnose.gradients import GradientEvidence, locate_gradient
from ampguard.diagnose.locate.locating import chain_of
from ampguard.numerics import is_low_precision
from ampguard.replay.differentiated import has_finite_gradients, with_backward
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import Trace, TracedOp
from ampguard.replay.variables import attribute_path
from ampguard.replay.variants import Variant

if TYPE_CHECKING:
    from ampguard.diagnose.budget import Budget

MAX_REGIONS = 24

MAX_UPSTREAM = 4
"""Lines and modules that are added because they made what the accused operator was given."""

Region: TypeAlias = tuple[str, int | tuple[str, int]]
"""("module", id of the module) or ("line", (file, line number))."""


_PLACED = re.compile(r"  # \S+:\d+$")

Place: TypeAlias = tuple[TracedOp, str, int | None]
"""An operator, the name of the region that it stands for, and the module that this is, if it is one."""


def smallest_float32_region(evidence: Evidence, budget: Budget) -> tuple[str, str, Variant, Outcome] | None:
    """(target, how, the variant, its outcome) of the smallest region in float32 that cures the step; None if none does."""
    replayer = evidence.replayer
    if replayer is None:
        return None
    members: dict[Region, TracedOp] = {}
    op = evidence.op
    outcome: Outcome | None = None
    upstream = 0
    while len(members) < MAX_REGIONS and not budget.is_spent:
        region = region_of(op)
        if region is None or region in members:
            region = _wider(op, members, replayer.names, evidence.trace)
            if region is None and upstream < MAX_UPSTREAM:
                upstream += 1
                op, region = _upstream(evidence, members)
            if region is None:
                return None
        members[region] = op
        outcome = attempt(evidence.bad, replayer, _variant(members))
        if not outcome.is_bad:
            break
        outcome = replayer.run(_variant(members))
        chain = chain_of(outcome)
        if chain is None:
            return None
        op = chain.head.op
    if outcome is None or outcome.is_bad:
        return None
    for region in list(members)[:-1]:
        if len(members) < 2 or budget.is_spent:
            break
        fewer = {r: o for r, o in members.items() if r != region}
        smaller = attempt(evidence.bad, replayer, _variant(fewer))
        if not smaller.is_bad:
            members, outcome = fewer, smaller
    with contextlib.suppress(Exception):  # what cannot be differentiated is as good as it is
        if _with_finite_gradients(members, replayer, budget, evidence.trace):
            members = _without_inner(members, replayer.names)
            outcome = attempt(evidence.bad, replayer, _variant(members))
            members, outcome = _with_none_to_spare(evidence, members, outcome, budget)
    names = [_name(region, replayer.names) for region in members]
    owners = [place if isinstance(place, int) else None for _, place in members]
    how = advice(evidence, list(members.values()), names, owners)
    widened = widened_weights(evidence, {place for _, place in members if isinstance(place, int)})
    how += f"\nand make float32 of its weights as well: {widened}" if widened else ""
    variant = _variant(members)
    own_casts = outcome.own_casts
    if own_casts and not budget.is_spent:
        as_written = dataclasses.replace(variant, keeps_own_casts=True)
        with contextlib.suppress(Exception):  # two types that do not go together
            again = attempt(evidence.bad, replayer, as_written)
            if not again.is_bad:
                variant, outcome, own_casts = as_written, again, ()
    own_casts += tuple(line for line in _casts_without_operator(evidence, members) if line not in own_casts)
    if own_casts:
        evidence.own_casts = own_casts
        by_text, by_region = sorted_casts(own_casts)
        how += f"\nand leave out the cast to {words.precision(evidence)} in: {by_text}" if by_text else ""
        how += f"\nand write enabled=False in: {by_region}" if by_region else ""
    return target_of(names), how, variant, outcome


def _casts_without_operator(evidence: Evidence, members: dict[Region, TracedOp]) -> tuple[Line, ...]:
    """Casts of what was low already: they ran no operator, and will undo a fix that lets modules give float32."""
    if not any(kind == "module" for kind, _ in members):
        return ()
    ran = {op.line for op in evidence.trace.ops if op.short_name == "_to_copy"}
    return tuple(line for line in casts_behind(evidence) if line not in ran)


def _without_inner(members: dict[Region, TracedOp], names: dict[int, str]) -> dict[Region, TracedOp]:
    """The regions that lie in no other one: a module leaves autocast with all that it calls."""
    outer = [names[place] for _, place in members if isinstance(place, int) and place in names]

    def is_inner(region: Region) -> bool:
        name = names.get(region[1]) if isinstance(region[1], int) else None
        return bool(name) and any(o != name and (not o or f"{name}.".startswith(f"{o}.")) for o in outer)

    return {region: op for region, op in members.items() if not is_inner(region)}


def _with_finite_gradients(members: dict[Region, TracedOp], replayer: Replayer, budget: Budget, trace: Trace) -> bool:
    """Add the regions in which the gradients of a loss that is finite by now begin to be bad. Whether there were any."""
    widened = dict(members)
    while len(widened) < MAX_REGIONS and not budget.is_spent:
        again = with_backward(replayer, _variant(widened))
        if again is None or has_finite_gradients(replayer, _variant(widened)) is not False:
            is_wider = len(widened) > len(members)
            members |= widened
            return is_wider
        found = locate_gradient(again.bad, again, budget.deadline)
        op = found.forward.op if isinstance(found, GradientEvidence) else found.op
        region = region_of(op)
        if region is None or region in widened:
            region = _wider(op, widened, replayer.names, trace)
        if region is None:
            break
        widened[region] = op
    return False  # not enough: the forward pass needs none of them


def _with_none_to_spare(
    evidence: Evidence, members: dict[Region, TracedOp], outcome: Outcome, budget: Budget
) -> tuple[dict[Region, TracedOp], Outcome]:
    """Without the regions that are not needed any more once those that the gradients begin in are in float32."""
    replayer = evidence.replayer
    for region in list(members):
        if replayer is None or len(members) < 2 or budget.is_spent:
            break
        fewer = {r: o for r, o in members.items() if r != region}
        smaller = attempt(evidence.bad, replayer, _variant(fewer))
        if not smaller.is_bad and has_finite_gradients(replayer, _variant(fewer)):
            members, outcome = fewer, smaller
    return members, outcome


def region_of(op: TracedOp) -> Region | None:
    if op.owner is not None:
        return ("module", op.owner)
    if op.line is not None and op.root is None:
        return ("line", (op.line.code.co_filename, op.line.number))
    return None


def _wider(op: TracedOp, members: dict[Region, TracedOp], names: dict[int, str], trace: Trace) -> Region | None:
    """The nearest module around the operator's that is not yet in float32. A container that nobody calls is none."""
    name = op.module
    while name:
        name = name.rpartition(".")[0]
        identity = next((i for i, n in names.items() if n == name), None)
        if identity in trace.calls and ("module", identity) not in members:
            return ("module", identity)
    return None


def _upstream(evidence: Evidence, members: dict[Region, TracedOp]) -> tuple[TracedOp, Region | None]:
    """The nearest operator in low precision that made what the accused one was given, in a region not yet in float32."""
    for op in made_from(evidence.trace, evidence.op):
        if any(is_low_precision(out.dtype) for out in op.outputs) and op.short_name != "_to_copy":
            region = region_of(op)
            if region is not None and region not in members:
                return op, region
    return evidence.op, None


def _variant(members: dict[Region, TracedOp]) -> Variant:
    modules = frozenset(place for kind, place in members if kind == "module" and isinstance(place, int))
    lines = frozenset(place for kind, place in members if kind == "line" and isinstance(place, tuple))
    return Variant(force_fp32=modules, fp32_lines=lines)


def _name(region: Region, names: dict[int, str]) -> str:
    _, place = region
    if isinstance(place, tuple):
        return f"{place[0].rsplit('/', 1)[-1]}:{place[1]}"
    return names.get(place, "")


def target_of(names: list[str]) -> str:
    """Several regions by name; the root module, whose name is empty, in words where others stand beside it."""
    return ", ".join(name or words.ROOT for name in names) if len(names) > 1 else "".join(names)


def advice(
    evidence: Evidence, ops: list[TracedOp], names: list[str] | None = None, owners: list[int | None] | None = None
) -> str:
    """The lines to write: modules as the script calls them, or beside the model; else what leaves autocast of the same
    device is written under it once, each with its place."""
    roots = [event for event in evidence.events() if isinstance(event, RootCall)]
    is_used = any(root.modes.autocast_dtype is not None for root in roots)
    is_used = is_used or evidence.replayer is None or evidence.replayer.is_autocast_used
    is_alone = len({id(root.module) for root in roots}) == 1
    kinds = {root.index: "the model" if is_alone else type(root.module).__name__ for root in roots}
    places = [
        (op, names[i] if names is not None else op.module or "", owners[i] if owners is not None else op.owner)
        for i, op in enumerate(ops)
    ]
    apart = [place for place in places if not _stands_in_another(evidence, place, places)] if is_used else places
    written = _as_called(evidence, roots, apart) if is_used else None
    bodies: dict[str, dict[str, None]] = {}
    lines: dict[str, None] = {}
    for op, name, _ in apart:
        off = f'with torch.autocast("{op.device}", enabled=False): ' if is_used else ""
        root = next((r for r in roots if r.index == op.root), None) if not name else None
        if root is not None and _enters_by_itself(root):
            own = type(root.module).__name__
            body = f"all of {own}.forward  # in place of the autocast (or the casts to low precision) in it"
            if not is_used:
                body = f"all of {own}.forward in float32, without its casts to low precision"
        elif op.root is not None and written is not None:
            continue
        elif op.root is not None:
            own = kinds.get(op.root, "the model")
            call = f"{attribute_path('self', name)}(x.float())" if name else f"{own} on x.float()"
            at = root.line if root is not None else None
            place = f" at {words.line_name(at)}" if at is not None else ""
            body = f"{call}  # where {name or own} is called{place} (its results stay float32)"
        else:
            code = words.code_at(op.line) or ""
            without = (
                f", without its cast to {words.precision(evidence)}" if op.line is not None and casts(op.line) else ""
            )
            written_out = in_float32(evidence, op.line) if op.line is not None and not without else None
            body = written_out or f"{code}  # on .float() operands{without}"
        bodies.setdefault(off, {})[body] = None
        lines[off + _with_place(body, op.line)] = None
    calls = [_with_place(call.removeprefix(ONE_CALL), evidence.op.line) for call in written or ()]
    if calls and len(calls) + len(lines) > 1 and not any("\n" in call for call in calls):
        return "\n".join(["leave autocast in each of these statements:", *calls, *lines])
    others = "; ".join(f"{off}{'; '.join(parts)}" for off, parts in bodies.items())
    return "\n".join([*(written or ()), *([others] if others else [])])


def _with_place(code: str, line: Line | None) -> str:
    """A statement with its place behind it, if it does not say one."""
    if line is None or _PLACED.search(code):
        return code
    return f"{code}{', ' if '  # ' in code else '  # '}{words.line_name(line)}"


def _stands_in_another(evidence: Evidence, place: Place, places: list[Place]) -> bool:
    """Whether a module is called, and nowhere else, in a statement that leaves autocast as a whole."""
    op, _, owner = place
    calls = evidence.trace.calls.get(owner, []) if op.root is not None and owner is not None else []
    whole = {(line.code, words.code_at(line)) for other, _, _ in places if other.root is None and (line := other.line)}
    return bool(calls) and all(call.line and (call.line.code, words.code_at(call.line)) in whole for call in calls)


def _as_called(evidence: Evidence, roots: list[RootCall], places: list[Place]) -> list[str] | None:
    """The code for the modules among these places; None where it cannot be written."""
    modules: dict[int, tuple[nn.Module, str, str]] = {}
    for op, name, owner in places:
        root = next((r for r in roots if r.index == op.root), None)
        if root is None or (not name and _enters_by_itself(root)):
            continue
        module = next((m for m in compat.all_modules(root.module) if id(m) == owner), root.module if not name else None)
        if module is None:
            return None
        modules[id(module)] = (module, name, op.device)
    calls = [call_outside_autocast(evidence, *found) for found in modules.values()]
    if not modules or all(call is not None for call in calls):
        return [call for call in calls if call is not None]
    device = next(iter(modules.values()))[2]
    lines = forward_outside_autocast(evidence, [(module, name) for module, name, _ in modules.values()], device)
    return [lines] if lines is not None else None


def _enters_by_itself(root: RootCall) -> bool:
    """Whether a model enters autocast in its own code, or casts there: to call it outside autocast changes nothing."""
    return root.modes.autocast_dtype is None and not _has_low_weights(root)


def _has_low_weights(root: RootCall) -> bool:
    return any(is_low_precision(p.dtype) for p in compat.all_parameters(root.module))
