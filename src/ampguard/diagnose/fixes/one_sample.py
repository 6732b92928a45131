"""A failure that is one sample's (or a few samples') of a batch: the step without them.

Which samples: those along whose index of the batch's dimension the accused operator's result is bad. For the replay each of
them is replaced by a good one in everything that the step was given for the whole batch, so that nothing changes its shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.record import Held, Ref, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal
from ampguard.diagnose.givens.named_arguments import named_leaves
from ampguard.replay.variants import Variant

SHOWN = 4


@dataclass(frozen=True, slots=True)
class BadSamples:
    """Some samples of a batch of so many."""

    samples: list[int]
    batch: int
    given: dict[int | Ref, Tensor] = field(default_factory=dict)
    """What the step was given that is no weight, under the keys by which a replay puts other values in its place."""

    @property
    def in_words(self) -> str:
        """
        >>> BadSamples([3], 8).in_words, BadSamples([1, 4], 16).in_words
        ('sample 3 of the batch of 8', 'samples 1, 4 of the batch of 16')
        """
        some = ", ".join(map(str, self.samples[:SHOWN])) + (", ..." if len(self.samples) > SHOWN else "")
        return f"sample{'s' if len(self.samples) > 1 else ''} {some} of the batch of {self.batch}"


def bad_samples(evidence: Evidence) -> BadSamples | None:
    """Those along the batch's dimension of the accused operator's result, where it is at most half of them."""
    call = evidence.call
    if call is not None and call.output is None:
        call = evidence.capture(evidence.op.index)  # (its operands alone were kept)
    result = call.result.detach() if call is not None and isinstance(call.result, Tensor) else None
    if result is None or not result.is_floating_point() or not compat.is_dense(result):
        return None
    given = _given(evidence)
    sizes = {size for tensor in given.values() for size in tensor.shape[:2]}
    for dim in range(min(result.dim(), 2)):
        size = result.shape[dim]
        rest = [d for d in range(result.dim()) if d != dim]
        is_bad = torch.isnan(result) if evidence.kind == "nan" else ~torch.isfinite(result)
        samples = (is_bad.any(rest) if rest else is_bad).nonzero().flatten().tolist()
        if size in sizes and size > 1 and 0 < len(samples) <= size // 2:
            return BadSamples(samples, size, given)
    return None


def left_out(evidence: Evidence, why: str) -> Proposal | None:
    """The fix; None where the failure is not that of a few samples. `why`: "its mask forbids every path"."""
    found = bad_samples(evidence)
    if found is None:
        return None
    how = f"drop {found.in_words} before the loss is computed: {why}"
    return Proposal("filter-sample", words.region(evidence), how, trial=lambda e: _without(found))


def _without(found: BadSamples) -> Variant:
    index = torch.arange(found.batch)
    index[found.samples] = next(i for i in range(found.batch) if i not in found.samples)
    others: dict[int | Ref, Tensor] = {}
    for key, tensor in found.given.items():
        dim = next((d for d in range(min(tensor.dim(), 2)) if tensor.shape[d] == found.batch), None)
        if dim is not None:
            others[key] = tensor.detach().index_select(dim, index.to(tensor.device))
    return Variant(tensors=others)


def _given(evidence: Evidence) -> dict[int | Ref, Tensor]:
    """Held tensors by identity, and what the script made without a module by reference; weights are left out."""
    events = evidence.events()
    state = {id(t) for e in events if isinstance(e, RootCall) for t in compat.all_tensors(e.module)}
    called = {e.index for e in events if isinstance(e, RootCall)}
    found: dict[int | Ref, Tensor] = {}
    gone: list[Ref] = []
    for leaf in (leaf for event in events for _, leaf in named_leaves(event)):
        if isinstance(leaf, Held) and id(leaf.tensor) not in state:
            found[id(leaf.tensor)] = leaf.value
        elif isinstance(leaf, Ref) and leaf.event not in called:
            made = evidence.made(leaf)
            if made is not None:
                found[leaf] = made
            elif leaf.output == 0:
                gone.append(leaf)
    found |= _made_again(evidence, gone)
    return {key: tensor for key, tensor in found.items() if _is_data(tensor)}


def _made_again(evidence: Evidence, gone: list[Ref]) -> dict[int | Ref, Tensor]:
    """Results that the script does not hold any more. One replay."""
    wanted = {ref.event: ref for ref in gone}
    ops = {op.index: wanted[op.event] for op in evidence.trace.ops if op.root is None and op.event in wanted}
    if evidence.replayer is None or not ops:
        return {}
    captured = evidence.replayer.run(Variant(capture=frozenset(ops)), traced=False).captured
    return {ops[index]: call.result for index, call in captured.items() if isinstance(call.result, Tensor)}


def _is_data(tensor: Tensor) -> bool:
    is_weight = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    return tensor.dim() > 0 and not is_weight and compat.is_dense(tensor)
