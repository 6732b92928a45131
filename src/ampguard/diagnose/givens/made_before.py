"""Bad values that the script computed before its first step, or wrote to a buffer in this one: the call that made them, why,
and what repairs it there.

A class weight of `1 / count` where a class has no samples, a feature that is constant and was standardised, a node without
neighbours in a normalised graph: the step only reads what came of it. The calls that made it were kept, and are run again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.record import BadResult, GlueOp, Ref, StepRecord
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, find_cause
from ampguard.diagnose.fixes.trying import OTHER_PRECISION
from ampguard.diagnose.locate.locating import locate
from ampguard.errors import ReplayError
from ampguard.incident import Location
from ampguard.replay.rebuild import Replayer
from ampguard.replay.variants import Variant

MAX_ELEMENTS = 1 << 25
"""Elements of a data set that is searched for a sample."""


class MadeBefore:
    """The call from which the bad values of a tensor come, run again."""

    def __init__(
        self,
        evidence: Evidence | None,
        finding: Finding | None,
        event: GlueOp,
        rows: Tensor | None,
        result: Replayer | None = None,
    ) -> None:
        self._evidence = evidence
        self._result = result
        """Runs the calls up to what the step was given, where that is another value, computed from the bad one."""
        self._finding = finding
        self._event = event
        self._rows = rows
        """Where the tensor's samples stand in what was made; None where it is that itself."""

    @property
    def location(self) -> Location | None:
        line = self._evidence.op.line if self._evidence is not None else self._event.line
        return line.location() if line is not None else None

    def as_dict(self) -> dict[str, object]:
        """For the report."""
        line = self.location
        facts: dict[str, object] = {"cause": self._finding.cause} if self._finding is not None else {}
        facts["op"] = self._evidence.op.name if self._evidence is not None else str(self._event.func)
        return facts | ({"file": line.file, "line": line.line, "code": line.code} if line is not None else {})

    def in_words(self, what: str = "The script made them so before its first step") -> str:
        """A sentence for the explanation."""
        line = self.location
        at = f", at {words.place_of(line)} (`{line.code}`)" if line is not None else ""
        why = f": {self._finding.explanation}" if self._finding is not None else "."
        return f" {what}{at}{why}"

    def as_finding(self, name: str, role: str, reader: str, others: tuple[Proposal, ...]) -> Finding:
        """Why that call failed, as the cause of the step's failure. `others`: fixes beside those that repair the call."""
        assert self._finding is not None
        assert self._evidence is not None
        text = (
            f"{self._finding.explanation} The script writes it to the {role} `{name}`, and {reader} reads it from there in "
            f"the same step."
        )
        return replace(
            self._finding,
            explanation=text,
            evidence={**self._evidence.numbers(), **self._finding.evidence, "written_to": name},
            proposals=others,
            line=self._finding.line or self._evidence.op.line,
            op=self._finding.op or self._evidence.op,
            dtype=self._finding.dtype or self._evidence.precision or self._evidence.result_dtype,
            phase=self._finding.phase or "forward",
        )

    def proposals(self, target: str, given: Tensor, key: int | Ref) -> tuple[Proposal, ...]:
        """What repairs the call, tried by what comes of it in the step. `given`: the values that the step read."""
        if self._finding is None or self._evidence is None:
            return ()
        line = self.location
        at = f" (at {words.place_of(line)})" if line is not None else ""
        in_float32 = Proposal(
            "force-fp32", target, "compute it in float32, and cast what is kept", trial=lambda e: e.all_in_float32
        )
        proposals = self._finding.proposals
        if self._evidence.ran_in_low_precision:
            proposals = (*proposals, in_float32)
        return tuple(
            Proposal(p.action, target, f"where it is made{at}: {p.how}", trial=partial(self._with, p, given, key))
            for p in proposals
            if p is in_float32 or (p.trial is not None and p.action not in OTHER_PRECISION)
        )

    def _with(self, proposal: Proposal, given: Tensor, key: int | Ref, _: Evidence) -> Variant:
        """The step with what the repaired call gives in the place of what it was given."""
        evidence = self._evidence
        assert evidence is not None
        assert evidence.replayer is not None
        assert proposal.trial is not None
        replayer = self._result or evidence.replayer
        ((_name, made),) = replayer.run(proposal.trial(evidence), traced=False).targets
        made = made.detach() if self._rows is None else made.detach()[self._rows]
        if made.shape != given.shape:
            raise ReplayError("what the call gives has another shape than what the step was given")
        return Variant(tensors={key: made.to(given.dtype)})


def made_before(evidence: Evidence, held: Tensor, values: Tensor) -> MadeBefore | None:
    """Where the bad values come from that the step was given in `held`; None where no such call is known."""
    replayer = evidence.replayer
    if replayer is None:
        return None
    rows: Tensor | None = None
    found = replayer.before_training.maker_of(held)
    if found is None:
        for whole in replayer.before_training.bad_tensors():
            rows = rows_of(values, whole)
            if rows is not None:
                found = replayer.before_training.maker_of(whole)
                break
    if found is None:
        return None
    record, ref = found
    event = record.event(ref.event)
    if not isinstance(event, GlueOp):
        return None
    behind = explained_before(evidence, record, ref)
    finding = find_cause(behind) if behind is not None and behind.given is None else None
    return MadeBefore(behind if finding is not None else None, finding, event, rows)


def made_in_step(evidence: Evidence, write: GlueOp | None) -> MadeBefore | None:
    """The same of what the script has computed in this step and then copied to a parameter or a buffer, before it was read
    there: class centres, a table, weights put in the place of others."""
    if evidence.replayer is None or write is None or write.func.__name__.partition(".")[0] != "copy_":
        return None
    source = write.args[1] if len(write.args) > 1 else None
    event = evidence.bad.record.event(source.event) if isinstance(source, Ref) else None
    if not isinstance(source, Ref) or not isinstance(event, GlueOp):
        return None
    behind = explained_before(evidence, evidence.bad.record, source)
    finding = find_cause(behind) if behind is not None and behind.given is None else None
    return MadeBefore(behind, finding, event, None) if finding is not None else None


def explained_before(evidence: Evidence, record: StepRecord, ref: Ref) -> Evidence | None:
    """The call that made a bad value, run again; None where its operands are not what they were."""
    assert evidence.replayer is not None
    bad = BadResult("output", "train", evidence.bad.step, record, (ref,))
    try:
        return locate(bad, evidence.replayer.beside(bad))
    except Exception:  # its operands were overwritten since, or it was not kept
        return None


def rows_of(values: Tensor, whole: Tensor) -> Tensor | None:
    """Where the rows of `values` stand in `whole`, bad ones and good ones; None where they are not all there."""
    is_alike = values.dim() > 1 and whole.dim() == values.dim() and whole.shape[1:] == values.shape[1:]
    if not is_alike or not whole.numel() <= MAX_ELEMENTS or not whole.is_cpu or not compat.is_dense(values):
        return None
    samples = values.detach().to(whole.device, whole.dtype).flatten(1)
    known = whole.detach().flatten(1)
    found = []
    for sample in samples:
        same = _first_place(known, sample)
        if same is None:
            return None
        found.append(same)
    return torch.tensor(found)


def _first_place(known: Tensor, sample: Tensor) -> int | None:
    """The first row that is this sample: the same numbers, and NaN where it is NaN."""
    candidates = torch.arange(len(known))
    finite = torch.isfinite(sample).nonzero().reshape(-1)
    for column in (finite[:1].tolist() or [0]) + [None]:  # one number tells most rows apart
        part = known[candidates] if column is None else known[candidates, column]
        wanted = sample if column is None else sample[column]
        same = (part == wanted) | (torch.isnan(part) & torch.isnan(wanted))
        candidates = candidates[same.all(1) if column is None else same]
        if not len(candidates):
            return None
    return int(candidates[0])
