"""nonfinite-input: the batch (inputs or targets) already holds NaN or Inf.

What happens   the data has a hole: a missing value, a division in preprocessing, the log of an empty frame.
Why it hurts   no change of precision or learning rate helps.
Instead        clean or filter the sample named here; assert torch.isfinite(batch).all() in the Dataset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.givens import describe_input
from ampguard.numerics import stats
from ampguard.replay.variants import Variant


@cause("nonfinite-input", phases=("forward", "backward"))
def nonfinite_input(evidence: Evidence) -> Finding | None:
    given = describe_input(evidence)
    if given is None:
        return None
    facts = stats(given.tensor)
    samples = given.samples
    reader = evidence.chain.head.op
    share = f"{facts.nan} NaN, {facts.pos_inf} +Inf, {facts.neg_inf} -Inf of {given.tensor.numel()} values"
    which = _which(samples, given.is_batch)
    what = f"{given.role} `{given.name}` of the step" if given.is_batch else f"{given.role} that `{given.name}` read"
    return Finding(
        "nonfinite-input",
        f"The {what} already holds non-finite values: {share}{which}. The computation only "
        f"passed them on, first in {words.name(reader)}.",
        weight=100,
        evidence={"name": given.name, "role": given.role, "samples": samples, "values": facts.as_dict()},
        proposals=(
            Proposal(
                "filter-sample",
                given.name,
                f"drop the samples that are not finite: keep = torch.isfinite({given.short_name}).flatten(1).all(1)",
                trial=lambda e: Variant(tensors={given.key: _without_bad_samples(given.tensor)}),
            ),
            Proposal(
                "fix-data",
                given.name,
                f"clean the data: torch.nan_to_num({given.short_name}), or repair it where it is made",
                trial=lambda e: Variant(
                    tensors={given.key: torch.nan_to_num(given.tensor, nan=0.0, posinf=0.0, neginf=0.0)}
                ),
            ),
        ),
        phase="data",
        op=reader,
    )


def _which(samples: list[int], is_batch: bool) -> str:
    """ " (samples 3, 5 of the batch)"; "" where it is not known."""
    if not samples:
        return ""
    some = ", ".join(map(str, samples[:6]))
    thing = "sample" if is_batch else "row"
    return f" ({thing}{'s' if len(samples) > 1 else ''} {some} of {'the batch' if is_batch else 'it'})"


def _without_bad_samples(tensor: Tensor) -> Tensor:
    """The batch with each bad sample replaced by a good one; the batch keeps its size for the replay."""
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    good = torch.isfinite(tensor).reshape(tensor.shape[0], -1).all(1)
    if not bool(good.any()):
        return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    first = int(good.nonzero()[0, 0])
    index = torch.arange(tensor.shape[0])
    index[~good.cpu()] = first
    return tensor[index.to(tensor.device)]
