"""Takes breaches as they happen: known ones are counted, new ones become incidents at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ampguard.capture.protocol.models import Models
from ampguard.diagnose import protocol
from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.cases.casebook import Casebook
from ampguard.diagnose.protocol.scene import MAX_NAMES, Scene, listed
from ampguard.diagnose.protocol.telling import BREACH_RULES, incident_of
from ampguard.incident import Incident
from ampguard.protocol.events import Breach

POISONS = "optimizer-underflow"
"""What makes weights non-finite: failures after it are its doing."""

MOST_NAMED = 3
"""Other optimizers that a sentence names."""

MAX_CASES = 24
"""Different breaches told in full; what comes after them is most likely their doing."""


class ProtocolDesk:
    """Between the probes and the casebook."""

    def __init__(
        self,
        casebook: Casebook,
        rank: int,
        on_told: Callable[[Incident], None] = lambda incident: None,
        on_taken_back: Callable[[Incident], None] = lambda incident: None,
        is_own_doing: Callable[[Breach], bool] = lambda breach: False,
    ) -> None:
        """`is_own_doing`: whether the script does only what was made of it from outside, by a fix that was applied say."""
        self._casebook = casebook
        self._is_own_doing = is_own_doing
        self._on_told = on_told
        self._on_taken_back = on_taken_back
        self._rank = rank
        self._cases: dict[tuple[Any, ...], Case] = {}
        self._alike: dict[tuple[Any, ...], Alike] = {}
        """By cause and line: what several optimizers of one loop share is one failure."""
        self._suspicions: dict[tuple[Any, ...], tuple[tuple[Any, ...], Incident]] = {}
        self._early: dict[tuple[Any, ...], tuple[tuple[Any, ...], Incident, int]] = {}
        """Suspicions that were told before the end: as which case, in which words, of how many parameters."""
        self._models: Models | None = None

    def attach(self, models: Models) -> None:
        """The modules whose parameters are to be named."""
        self._models = models

    def on_breach(self, breach: Breach, step: int) -> None:
        """A breach happened; look at it in full only the first time."""
        key = _key(breach)
        known = self._cases.get(key)
        if known is not None:
            if breach.facts.get("limit") is not None:
                self._does_harm(known, breach)
                return
            known.occurrences += 1
            known.last_step = step
        elif len(self._cases) < MAX_CASES:
            incident = self._incident(breach, step)
            if incident is not None:
                self._open(key, incident, getattr(breach.optimizer, "ref", None))

    def _does_harm(self, known: Case, breach: Breach) -> None:
        """What was told of turns out to be worse than it seemed."""
        incident = self._incident(breach, known.incident.step)
        if incident is not None:
            self._casebook.retell(known, incident)

    def on_suspicion(self, key: tuple[Any, ...], breach: Breach | None, step: int) -> None:
        """What may yet turn out to be nothing is written down with the names that can be found now."""
        if key in self._early:
            self._retell(key, breach, step)
        elif breach is None:
            self._suspicions.pop(key, None)
        elif _key(breach) not in self._cases and not self._is_own_doing(breach):
            known = self._suspicions.get(key)
            since = known[1].step if known is not None else step
            incident = self._incident(breach, since)
            if incident is not None:
                self._suspicions[key] = (_key(breach), incident)

    def on_told_early(self, key: tuple[Any, ...], breach: Breach, step: int) -> None:
        """A suspicion has lasted long enough to be told. It may still turn out to be nothing, or less."""
        _, incident = self._suspicions.get(key, (None, None))
        self.on_confirmed(key, breach, step)
        if incident is not None and _key(breach) in self._cases:
            self._early[key] = _key(breach), incident, len(breach.facts["parameters"])

    def _retell(self, key: tuple[Any, ...], breach: Breach | None, step: int) -> None:
        """What was told early is less by now: the report says what is left of it, and nothing where nothing is."""
        name, told, count = self._early[key]
        if breach is not None and len(breach.facts["parameters"]) == count:
            return
        incident = self._incident(breach, step) if breach is not None else None
        alike = self._alike.get((name[0], name[2]))
        case = self._cases[name]
        if alike is not None and alike.case is case:
            case.incident = alike.retold(told, incident) or told
            is_left = alike.is_left
        else:
            case.incident, is_left = incident or told, incident is not None
        if incident is not None and breach is not None:
            self._early[key] = name, incident, len(breach.facts["parameters"])
            return
        del self._early[key]
        if not is_left and case in self._casebook.cases:
            self._casebook.cases.remove(case)
            self._alike = {place: other for place, other in self._alike.items() if other.case is not case}
            self._cases = {other: kept for other, kept in self._cases.items() if kept is not case}
            self._on_taken_back(told)

    def on_confirmed(self, key: tuple[Any, ...], breach: Breach, step: int) -> None:
        """A suspicion was right: it is told in the words that were found for it."""
        name, incident = self._suspicions.pop(key, (None, None))
        if incident is None or name in self._cases or len(self._cases) >= MAX_CASES:
            self.on_breach(breach, step)
        else:
            self._open(_key(breach), incident, getattr(breach.optimizer, "ref", None))

    def close(self) -> None:
        """The run ends: what was not withdrawn is so."""
        suspicions, self._suspicions = self._suspicions, {}
        for key, incident in suspicions.values():
            if key not in self._cases:
                self._open(key, incident)

    def _open(self, key: tuple[Any, ...], incident: Incident, optimizer: Any = None) -> None:
        cause, _, spot = key
        alike = self._alike.get((cause, spot))
        if alike is not None:
            alike.join(incident)
            self._cases[key] = alike.case
            return
        self._cases[key] = Case(incident, ("", None, None, None), last_step=incident.step)
        known = next((c for c in self._casebook.cases if is_told_as(c.incident, incident)), None)
        if known is not None:  # a look at the weights has seen it as well
            self._cases[key] = known
            return
        if incident.phase == "optimizer" and incident.cause == "overflow":  # of a norm: perhaps how a divergence ends
            opinion = self._casebook.second_opinion(incident)
            if isinstance(opinion, Case):
                self._cases[key] = opinion
                return
            incident = _without_clipping(opinion) if opinion.cause == "divergence" else opinion
        self._on_told(incident)
        facts = incident.evidence
        poisons = incident.cause == POISONS or bool(facts.get("found_inf") or facts.get("makes_nan"))
        self._cases[key] = case = self._casebook.add(incident, poisons, optimizer)
        if incident.evidence.get("renewed") or incident.evidence.get("passed_over"):
            overflow = self._casebook.latest("loss-scale-overflow")
            if overflow is not None:
                self._casebook.merge(overflow, case, overflow.incident.cause)
        if spot is not None and incident.evidence.get("optimizer") is not None:
            self._alike[cause, spot] = Alike(case)

    def _incident(self, breach: Breach, step: int) -> Incident | None:
        protocol.load()
        assert self._models is not None
        scene = Scene(breach, self._models, self._casebook.trained, self._casebook.poison.made_by, self._told)
        told = BREACH_RULES[breach.cause](scene)
        return incident_of(scene, told, step, self._rank) if told is not None else None

    def _told(self, cause: str) -> Incident | None:
        case = self._casebook.latest(cause)
        return case.incident if case is not None else None


def _without_clipping(divergence: Incident) -> Incident:
    """The script clips already, to no avail."""
    fixes = tuple(fix for fix in divergence.fixes if fix.action != "clip-gradients" or fix.verified)
    return msgspec.structs.replace(divergence, fixes=fixes)


class Alike:
    """A case, and what several optimizers that meet the same failure at the same line have to do with it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._incidents = [case.incident]

    @property
    def is_left(self) -> bool:
        """Whether there is any of them that it still holds for."""
        return bool(self._incidents)

    def join(self, incident: Incident) -> None:
        """The same of one more optimizer: named in the incident, and counted."""
        self._incidents.append(incident)
        self.case.occurrences += 1
        self.case.last_step = incident.step
        self.case.incident = self._together()

    def retold(self, told: Incident, incident: Incident | None) -> Incident | None:
        """The case's words once this one of them reads otherwise, or (None) was none. None where none is left."""
        now = [incident] if incident is not None else []
        self._incidents = [one for known in self._incidents for one in (now if known is told else [known])]
        self.case.occurrences = max(1, len(self._incidents))
        return self._together() if self._incidents else None

    def _together(self) -> Incident:
        first, *others = self._incidents
        if not others:
            return first
        return msgspec.structs.replace(
            first,
            severity="error" if any(i.severity == "error" for i in self._incidents) else first.severity,
            explanation=f"{first.explanation} {in_words(others)}",
            evidence={**first.evidence, **merged(self._incidents)},
        )


def merged(incidents: list[Incident]) -> dict[str, Any]:
    """Which optimizers it was, and the parameters of all of them."""
    evidence = [incident.evidence for incident in incidents]
    facts: dict[str, Any] = {"optimizers": [of["optimizer"] for of in evidence][:MAX_NAMES]}
    if any("parameters" in of for of in evidence):
        facts["parameters"] = [name for of in evidence for name in of.get("parameters", ())][:MAX_NAMES]
        facts["parameter_count"] = sum(of.get("parameter_count", 0) for of in evidence)
    return facts


def in_words(others: list[Incident]) -> str:
    """ "The same is true of `opt_b` (`head.weight`, `head.bias`) and 3 more optimizers." """
    shown = []
    for incident in others[:MOST_NAMED]:
        name, parameters = incident.evidence["optimizer"], incident.evidence.get("parameters")
        shown.append(f"`{name}` ({listed(parameters)})" if parameters else f"`{name}`")
    rest = len(others) - len(shown)
    more = f" and {rest} more optimizer{'s' if rest > 1 else ''}" if rest else ""
    return f"The same is true of {', '.join(shown)}{more}."


def is_told_as(known: Incident, incident: Incident) -> bool:
    """Whether this failure of an optimizer's arithmetic was told already."""
    return known.cause == incident.cause == POISONS and known.step == incident.step


def _key(breach: Breach) -> tuple[Any, ...]:
    """What makes two breaches the same: the cause, the optimizer, the line."""
    return (breach.cause, breach.optimizer, _spot(breach.again) or _spot(breach.first))


def _spot(line: Any) -> Any:
    return (id(line.code), line.number) if line is not None else None
