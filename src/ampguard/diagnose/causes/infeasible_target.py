"""infeasible-target: this sample's loss is infinite in any precision because its target cannot be produced.

What happens   a CTC target longer than its input (each repeated label needs a blank between) has probability 0; so has a
               class whose logit is masked to -Inf. The loss of that sample is Inf.
Why it hurts   its gradient is NaN, and a sum or mean over the batch takes everybody with it.
Instead        filter such samples (or CTCLoss(zero_infinity=True)); check labels against the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.proposals import changed_result

PICKS = frozenset(
    {"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "cross_entropy_loss", "gather", "index", "neg"}
)


@cause("infeasible-target")
def infeasible_target(evidence: Evidence) -> Finding | None:
    if evidence.op.refused or evidence.link.kind == 1:
        return None
    if "ctc_loss" in evidence.op.short_name:
        return _ctc(evidence)
    if evidence.intended and evidence.converts and evidence.op.short_name in PICKS:
        return _masked_label(evidence)
    return None


def _ctc(evidence: Evidence) -> Finding | None:
    call = evidence.capture(evidence.op.index)
    if call is None or evidence.given is not None:
        return None
    losses = call.result.detach().reshape(-1)
    samples = (losses == math.inf).nonzero().reshape(-1).tolist()
    tensors = call.tensors
    if not samples or not bool(torch.isfinite(tensors[0]).all()):
        return None
    lengths = _lengths(call.args)
    shown = ", ".join(
        f"sample {s}" + (f" ({lengths[1][s]} labels on {lengths[0][s]} frames)" if lengths else "") for s in samples[:4]
    )
    return Finding(
        "infeasible-target",
        f"The CTC loss of {shown} is infinite: the target needs more frames than the input has. The network's output is "
        f"finite, so no precision cures it.",
        weight=85,
        evidence={"samples": samples, "lengths": lengths},
        proposals=(
            Proposal(
                "filter-sample",
                words.region(evidence),
                "drop samples whose target is longer than their input, or use zero_infinity=True",
                trial=changed_result(lambda t: torch.where(torch.isinf(t), torch.zeros_like(t), t)),
            ),
        ),
        phase="loss",
    )


def _lengths(args: tuple[object, ...]) -> tuple[list[int], list[int]] | None:
    def listed(value: object) -> list[int] | None:
        if isinstance(value, Tensor):
            return [int(v) for v in value.reshape(-1).tolist()]
        return [int(v) for v in value] if isinstance(value, (list, tuple)) else None

    if len(args) < 4:
        return None
    inputs, targets = listed(args[2]), listed(args[3])
    return (inputs, targets) if inputs is not None and targets is not None else None


def _masked_label(evidence: Evidence) -> Finding | None:
    name = words.operator(evidence)
    integers = [o for o in evidence.operands if not o.values.is_floating_point()]
    labels = sorted(set(integers[0].values.reshape(-1).tolist()))[:8] if integers else []
    return Finding(
        "infeasible-target",
        f"{name} {words.place(evidence)} picks a class whose logit was masked to -Inf: the target has probability 0, its "
        f"loss is infinite in any precision.",
        weight=85,
        evidence={"labels": labels},
        proposals=(
            Proposal(
                "filter-sample",
                words.region(evidence),
                "drop samples whose label is outside the allowed classes (or correct the mask): "
                + words.code(evidence),
                trial=changed_result(lambda t: torch.where(torch.isinf(t), torch.zeros_like(t), t)),
            ),
        ),
        phase="loss",
    )
