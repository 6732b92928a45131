"""One report from those of several ranks: which of them saw what, who saw it first, and what only followed from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ampguard.incident import WAS_SENT, Incident, Report, importance, status_of

NAMED = 64
"""Ranks that are named one by one; beyond that their number is told."""


def merge(reports: Sequence[Report], ranks: Sequence[int | None] | None = None) -> Report:
    """One report from those of all ranks: what several ranks saw in the same step is one incident.

    `ranks`: whose they are, one for each; None is the process that started the ranks. Ordered by severity, step and rank.
    `evidence["ranks"]` names the ranks that saw an incident, `evidence["reached_ranks"]` those to which it came with
    the gradients.
    """
    first = reports[0]
    world_size = max(report.environment.world_size for report in reports)
    steps = max(report.steps for report in reports)
    known = {rank: report for rank, report in zip(ranks or (), reports, strict=ranks is not None) if rank is not None}
    off = [report.off_since_step for report in reports if isinstance(report.off_since_step, int)]
    seen = _same_seen_by(incident for report in reports for incident in report.incidents)
    incidents = [_with_the_others(incident, known, world_size) for incident in _without_consequences(seen)]
    return Report(
        status="incidents" if off else status_of(tuple(incidents)),
        environment=msgspec.structs.replace(first.environment, world_size=world_size),
        steps=steps,
        incidents=tuple(sorted(incidents, key=_importance)),
        schema=first.schema,
        run=first.run,
        ranks=_who_reported(known, world_size),
        off_since_step=min(off) if off else msgspec.UNSET,
    )


def _same_seen_by(incidents: Iterable[Incident]) -> list[Incident]:
    same: dict[Any, list[Incident]] = {}
    for incident in incidents:
        key = (
            *(incident.cause, incident.module, incident.op, incident.dtype),
            *(incident.step, incident.mode, incident.phase),
            incident.location and (incident.location.file, incident.location.line),
        )
        same.setdefault(key, []).append(incident)
    merged = [_of_all_ranks(sorted(group, key=lambda i: (_importance(i), i.rank))) for group in same.values()]
    return sorted(merged, key=_importance)


def _of_all_ranks(group: list[Incident]) -> Incident:
    ranks = sorted({rank for incident in group for rank in incident.evidence.get("ranks", [incident.rank])})
    if len(ranks) == 1:
        return group[0]
    return msgspec.structs.replace(
        group[0],
        rank=ranks[0],
        evidence={**group[0].evidence, "ranks": ranks},
        occurrences=max(incident.occurrences for incident in group),
    )


def _without_consequences(incidents: list[Incident]) -> list[Incident]:
    """What reached a rank with the gradients of another is told there, where it began."""
    kept: list[Incident] = []
    reached: dict[int, set[int]] = {}
    for incident in incidents:
        origin = next((other for other in incidents if _began_in(other, incident)), None)
        if origin is None:
            kept.append(incident)
        else:
            reached.setdefault(id(origin), set()).update(_ranks_of(incident))
    return [_reaching(incident, sorted(reached.get(id(incident), set()))) for incident in kept]


def _began_in(origin: Incident, later: Incident) -> bool:
    """Whether `later` is what another rank's failure did to this one: bad gradients, or the weights that they poisoned."""
    if origin.severity != "error" or origin.phase == "protocol":
        return False
    if origin.cause == "rank-divergence" or set(_ranks_of(origin)) & set(_ranks_of(later)):
        return False
    if WAS_SENT in str(later.evidence.get("not_replayed_because")):
        return origin.cause != "unexplained" and (origin.step, origin.mode) == (later.step, later.mode)
    if (
        later.evidence.get("sent_by") is not None
    ):  # by a rank that failed in this step, or whose weights are poisoned since
        is_next = origin.mode == "train" and later.step == origin.step + 1
        is_reached = (origin.step, origin.mode) == (later.step, later.mode) or is_next
        return is_reached and origin.cause != "unexplained" and origin.evidence.get("sent_by") is None
    if origin.mode != "train":
        return False
    if origin.cause == "unexplained" and (origin.phase == "backward" or later.phase != "backward"):
        return False
    if later.cause == "nonfinite-parameter":
        return bool(later.evidence.get("gradients_changed_in_step") == origin.step)
    is_unknown = later.cause == "unexplained" and later.mode == "train"
    return is_unknown and (later.step == origin.step or (later.step == origin.step + 1 and later.phase != "backward"))


def _reaching(incident: Incident, ranks: list[int]) -> Incident:
    if not ranks:
        return incident
    way = "With the gradients" if incident.mode == "train" else "With what was sent"
    text = f"{incident.explanation} {way} it reached {in_words(ranks)}."
    return msgspec.structs.replace(incident, explanation=text, evidence={**incident.evidence, "reached_ranks": ranks})


def _with_the_others(incident: Incident, known: Mapping[int, Report], world_size: int) -> Incident:
    """Say so where one rank alone saw a failure of a step that the others made as well."""
    others = [rank for rank, report in known.items() if rank != incident.rank and report.steps > incident.step]
    alone = world_size > 1 and _ranks_of(incident) == [incident.rank] and incident.cause != "rank-divergence"
    is_numbers = incident.mode == "train" and incident.severity == "error" and incident.phase != "protocol"
    if not alone or not others or not is_numbers:
        return _odd_one(incident, world_size)
    text = f"{incident.explanation} Of {world_size} ranks only rank {incident.rank} saw it: look at the batch of this rank."
    return msgspec.structs.replace(incident, explanation=text, evidence={**incident.evidence, "ranks": [incident.rank]})


def _odd_one(incident: Incident, world_size: int) -> Incident:
    """Where all others differ from the rank that they were compared with, and not from each other, it is the odd one."""
    other = incident.evidence.get("compared_with_rank")
    each_its_own = "averaged_count" in incident.evidence
    if (
        incident.cause != "rank-divergence"
        or world_size < 3
        or len(_ranks_of(incident)) != world_size - 1
        or each_its_own
    ):
        return incident
    text = (
        f"{incident.explanation} All other ranks differ from rank {other} in the same step: look at rank {other} first."
    )
    return msgspec.structs.replace(incident, explanation=text)


def _who_reported(known: Mapping[int, Report], world_size: int) -> dict[str, Any] | msgspec.UnsetType:
    if world_size == 1 or not known:
        return msgspec.UNSET
    missing = [rank for rank in range(world_size) if rank not in known]
    return {"reported": len(known), "missing": missing[:NAMED], "missing_count": len(missing)}


def in_words(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 3", "ranks 0 to 63"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"ranks {', '.join(shown)} and {len(ranks) - 8} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _ranks_of(incident: Incident) -> list[int]:
    return list(incident.evidence.get("ranks", [incident.rank]))


def _importance(incident: Incident) -> tuple[Any, ...]:
    return *importance(incident), incident.rank
