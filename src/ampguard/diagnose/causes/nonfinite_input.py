"""nonfinite-input: the batch (inputs or targets) already holds NaN or Inf.

What happens   the data has a hole: a missing value, a division in preprocessing, the log of an empty frame.
Why it hurts   no change of precision or learning rate helps.
Instead        clean or filter the sample named here; assert torch.isfinite(batch).all() in the Dataset.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.record import GlueOp, Ref
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes import data_code
from ampguard.diagnose.givens.kept_over_steps import times_written_over_steps
from ampguard.diagnose.givens.listed import Listed, listed
from ampguard.diagnose.givens.loaded_data import made_by_loader
from ampguard.diagnose.givens.made_before import made_before
from ampguard.diagnose.givens.masked_data import masked_before, meeting_of
from ampguard.diagnose.givens.naming import CONSTANT, NamedTensor, describe_input, sent_by
from ampguard.diagnose.givens.outside import Outside, made_outside
from ampguard.diagnose.givens.places import place_of
from ampguard.diagnose.givens.tied_rows import are_tied
from ampguard.numerics import cleaned, stats
from ampguard.replay.constants import Replaced
from ampguard.replay.variants import CodePlace, Intervention, Variant

ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "pow", "lerp"})
"""What a script does with a number of its own; others are handed NaN by PyTorch itself (`logdet` of what is negative)."""


@cause("nonfinite-input", phases=("forward", "backward"))
def nonfinite_input(evidence: Evidence) -> Finding | None:
    if evidence.given is None and evidence.op.short_name in ARITHMETIC:
        if any(map(_is_nan, evidence.op.scalars)):
            return _number(evidence, "NaN")
        is_zeros_doing = evidence.kind == "nan"  # 0 * Inf: a mask, times what is meant to hide the rest
        if evidence.op.short_name == "mul" and any(map(math.isinf, evidence.op.scalars)) and not is_zeros_doing:
            return _number(evidence, "infinite")
    given = describe_input(evidence)
    if given is None:
        return None
    facts = stats(given.tensor)
    in_list = listed(evidence, given.held) if given.role in ("input", "target") else None
    samples = given.samples if in_list is None else in_list.bad
    is_tied = in_list is None and (given.is_batch or given.role == "target") and are_tied(evidence, given)
    is_batch = (given.is_batch or in_list is not None) and not is_tied
    reader = evidence.chain.head.op
    share = f"{facts.nan} NaN, {facts.pos_inf} +Inf, {facts.neg_inf} -Inf of {given.tensor.numel()} values"
    which = _which(samples, is_batch)
    column = _column(given.tensor) if in_list is None else None
    if column is not None:
        every = "sample" if is_batch else "row"
        which = f" (of every {every}, index {column[1]} of dimension {column[0]}: a feature that was made so)"
    others = _others_with_nan(evidence, given)
    counted = sum(value.numel() > 1 for value in others.values())  # a single number was written into what is named
    too = f" (and the same for {counted} more tensors with NaN that the step was given)" if counted else ""
    written = _nan_written(evidence)
    bad: dict[int | Ref, Tensor] = {given.key: given.tensor, **others}
    place = in_list.place if in_list is not None else None
    place = place or (place_of(given.held) if given.role in ("input", "target") else None)
    filtering = Proposal(
        "filter-sample",
        given.name,
        f"drop the samples that are not finite: {data_code.kept_samples(evidence, given, place)}{too}",
        trial=lambda e: _with(given, {key: _without_bad_samples(value) for key, value in bad.items()}, written),
    )
    if in_list is not None:
        filtering = _of_a_list(in_list, given)
    outside = made_outside(given.held, given.tensor)
    made_at = f" ({words.place_of(outside.made_at)})" if outside is not None and outside.made_at is not None else ""
    infinite = "".join(f", {name}=0.0" for name in _infinities(bad.values()))
    repair = data_code.cleaned_data(evidence, given, place, infinite)
    cleaning = Proposal(
        "fix-data",
        given.name,
        f"clean the data: {repair}, or repair it where it is made{made_at}{too}",
        trial=lambda e: _with(given, {key: cleaned(value) for key, value in bad.items()}, written),
    )
    proposals = (filtering, cleaning)
    if not (_has_good_sample(given.tensor) if in_list is None else in_list.has_good_sample):  # none would be left
        skipping = Proposal("filter-sample", given.name, "leave this batch out: no sample of it is finite")
        proposals = (cleaning, skipping)
    sender = sent_by(evidence, given.tensor)
    facts_of_input: dict[str, Any] = {
        "name": given.name,
        "role": given.role,
        "samples": samples,
        "values": facts.as_dict(),
    }
    if sender is not None:
        facts_of_input["sent_by"] = sender
    if column is not None:
        facts_of_input["column"] = {"dimension": column[0], "index": column[1]}
    if outside is not None:
        facts_of_input["made_outside"] = outside.as_dict()
    sent = f" Another rank sent it ({sender}): look there first." if sender is not None else ""
    before = made_before(evidence, given.held, given.tensor) if outside is None else None
    if before is not None:
        facts_of_input["made_before"] = before.as_dict()
    made = before.in_words() if before is not None else ""
    loaded = made_by_loader(evidence, given.held) if outside is None and before is None else ""
    is_name = given.is_batch or in_list is not None or given.short_name == given.name
    what = f"{given.role} `{given.name}` of the step" if is_name else f"{given.role} that `{given.name}` read"
    if given.role == CONSTANT:
        what = f"tensor `{given.name}`, which is neither an argument of the model nor a part of its state,"
    is_made = given.made_by is not None
    times_written = 0 if is_made else times_written_over_steps(given.held, evidence.bad.step, evidence.replayer)
    kept = ""
    if times_written:
        facts_of_input["times_written"] = times_written
        kept = (
            f" It is no data of this step: the script keeps it over the steps, and has written to it {times_written} times. Look "
            f"at where it is written to."
        )
        if given.held.dtype == torch.float16:
            kept += " In float16 all beyond 65504 becomes Inf, and all below 6e-8 becomes 0: keep it in float32."
    has_samples = (is_batch or (given.role == "target" and not is_tied)) and not times_written
    fixes: tuple[Proposal, ...] = proposals if has_samples else (cleaning,)
    if before is not None:
        fixes = (*before.proposals(given.name, given.tensor, given.key), *fixes)
    meeting = meeting_of(evidence)
    hidden = ""
    if meeting is not None:
        fixes = (masked_before(meeting), *fixes)
        hidden = (
            f" The loss masks them, but only behind `{meeting.code}`: it does not see them, and its derivative, 0 times a value "
            f"that is not finite, does."
        )
    return Finding(
        "nonfinite-input",
        f"The {what} already holds non-finite values: {share}{which}. The computation only "
        f"passed them on, first in {words.name(reader)}.{sent}{_from_outside(outside)}{made}{loaded}{kept}{hidden}",
        weight=100,
        evidence=facts_of_input,
        proposals=fixes,
        phase="data",
        op=reader if meeting is None else meeting.op,
    )


def _of_a_list(batch: Listed, given: NamedTensor) -> Proposal:
    """The fix where each sample is an entry of a list: in the replay a good one takes the place of each bad one."""

    def trial(evidence: Evidence) -> Variant:
        values = {id(held.tensor): held.value for _, _, held in evidence.held()}
        good: dict[int | Ref, Tensor] = dict(batch.without_bad_samples(values).items())
        good[given.key] = good.get(id(given.held), given.tensor)
        return _with(given, good, {})

    return Proposal(
        "filter-sample", given.name, f"drop the samples that are not finite: {batch.in_code()}", trial=trial
    )


def _from_outside(outside: Outside | None) -> str:
    if outside is None:
        return ""
    line = outside.made_at
    made = f", which was last assigned at {words.place_of(line)} (`{line.code}`)" if line is not None else ""
    return f" It was made outside PyTorch: the numbers are those of the {outside.kind} `{outside.name}`{made}."


def _infinities(tensors: Iterable[Tensor]) -> list[str]:
    """Which arguments `torch.nan_to_num` needs: by default it puts the largest number in the place of an infinity."""
    all_stats = [stats(tensor) for tensor in tensors]
    kinds = {"posinf": any(s.pos_inf for s in all_stats), "neginf": any(s.neg_inf for s in all_stats)}
    return [name for name, is_there in kinds.items() if is_there]


def _number(evidence: Evidence, what: str) -> Finding:
    """A plain number of the script's own that is NaN (the mean of an empty list, as a weight of the loss), or a factor that
    is infinite."""
    code = words.code(evidence)
    how = f"repair the number that is {what} where it is computed; it is used in: {code}"
    return Finding(
        "nonfinite-input",
        f"{words.operator(evidence)} {words.place(evidence)} was given a number of the script's own that is {what}, and "
        f"passed it on.",
        weight=100,
        evidence={"name": code, "role": "number", "samples": []},
        proposals=(Proposal("fix-data", words.region(evidence), how),),
        phase="data",
    )


def _others_with_nan(evidence: Evidence, given: NamedTensor) -> dict[int | Ref, Tensor]:
    """What else the step was given with NaN in it, by identity: one bad sample comes in by many ways (a ray's origin).

    Infinities alone may be meant (a mask), and are left.
    """
    others: dict[int | Ref, Tensor] = {}
    for _, _, held in evidence.held():
        value = held.value.detach()
        is_data = held.tensor.is_leaf and not held.tensor.requires_grad and value.is_floating_point()
        if is_data and id(held.tensor) != given.key and bool(torch.isnan(compat.elements_here(value)).any()):
            others[id(held.tensor)] = value
    return others


def _nan_written(evidence: Evidence) -> dict[CodePlace, Intervention]:
    """The places outside modules where the script wrote NaN as a number (`x[3].fill_(nan)`), and the same with 0."""

    def with_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*map(_zero_for_nan, args), **{key: _zero_for_nan(value) for key, value in kwargs.items()})

    places: dict[CodePlace, Intervention] = {}
    for event in evidence.events():
        if isinstance(event, GlueOp) and any(map(_is_nan, (*event.args, *event.kwargs.values()))):
            line = event.line
            file, number = (line.code.co_filename, line.number) if line is not None else (None, None)
            places[str(event.func), file, number] = with_zeros
    return places


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _zero_for_nan(value: Any) -> Any:
    return 0.0 if _is_nan(value) else value


def _with(given: NamedTensor, others: dict[int | Ref, Tensor], written: dict[CodePlace, Intervention]) -> Variant:
    """The step with these values in the place of what it was given."""
    if given.role != CONSTANT:
        return Variant(tensors=others, at_places=written)
    constants = {key: value for key, value in others.items() if isinstance(key, int)}
    return Variant(tensors=others, at_places=written, within=lambda: Replaced(constants))


def _which(samples: list[int], is_batch: bool) -> str:
    """ " (samples 3, 5 of the batch)"; "" where it is not known."""
    if not samples:
        return ""
    some = ", ".join(map(str, samples[:6]))
    thing = "sample" if is_batch else "row"
    return f" ({thing}{'s' if len(samples) > 1 else ''} {some} of {'the batch' if is_batch else 'it'})"


def _column(tensor: Tensor) -> tuple[int, int] | None:
    """The dimension and the index at which every sample is bad, where all else is finite: a constant feature, standardised."""
    if tensor.dim() < 2 or not compat.is_dense(tensor) or tensor.shape[0] < 2 or _has_good_sample(tensor):
        return None
    bad = ~torch.isfinite(tensor)
    for dimension in range(tensor.dim() - 1, 0, -1):
        others = [d for d in range(tensor.dim()) if d != dimension]
        found = bad.any(others)
        if tensor.shape[dimension] > 2 and int(found.sum()) == 1:
            return dimension, int(found.nonzero()[0, 0])
    return None


def _has_good_sample(tensor: Tensor) -> bool:
    return (
        tensor.dim() > 0
        and compat.is_dense(tensor)
        and bool(torch.isfinite(tensor).reshape(tensor.shape[0], -1).all(1).any())
    )


def _without_bad_samples(tensor: Tensor) -> Tensor:
    """The batch with each bad sample replaced by a good one; the batch keeps its size for the replay."""
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return cleaned(tensor)
    good = torch.isfinite(tensor).reshape(tensor.shape[0], -1).all(1)
    if not bool(good.any()):
        return cleaned(tensor)
    first = int(good.nonzero()[0, 0])
    index = torch.arange(tensor.shape[0])
    index[~good.cpu()] = first
    return tensor[index.to(tensor.device)]
