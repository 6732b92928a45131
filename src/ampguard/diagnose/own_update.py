"""The script's own update, made by no optimizer of PyTorch's: did its arithmetic spoil the weights?"""

from __future__ import annotations

import dataclasses

from torch import nn

from ampguard import compat
from ampguard.capture.events.written_weights import parameter_behind
from ampguard.capture.record import GlueOp, Ref, RootCall
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding


def is_an_update(evidence: Evidence) -> bool:
    """Whether what went bad are weights that are trained, and no graph was recorded of what made them so: no transform of
    weights, and no average of them."""
    event = next((e for e in evidence.events() if e.index == evidence.op.event), None)
    if not isinstance(event, GlueOp) or event.grad:
        return False
    if evidence.bad.is_of_weights:
        return any(_is_trained(target, evidence) for target in evidence.bad.targets)
    roots = [e for e in evidence.events() if isinstance(e, RootCall) and e.swapped_state]
    return any(p.requires_grad for root in roots for p in _swapped(root))


def _swapped(root: RootCall) -> list[nn.Parameter]:
    return [p for name, p in compat.named_parameters(root.module).items() if name in root.swapped_state]


def _is_trained(target: object, evidence: Evidence) -> bool:
    record = evidence.bad.record
    event = record.event(target.event) if isinstance(target, Ref) else None
    written = parameter_behind(event, lambda: record) if isinstance(event, GlueOp) else None
    return written is not None and written.requires_grad


def as_update(finding: Finding) -> Finding:
    """What is an underflow elsewhere, in the arithmetic of an optimizer."""
    head = "The update that the script makes itself spoils the weights although their gradients are finite. "
    return dataclasses.replace(finding, cause="optimizer-underflow", explanation=head + finding.explanation)
