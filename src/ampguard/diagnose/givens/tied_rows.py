"""Rows that are no samples: the nodes of a graph, whose neighbours are told by a matrix or by indices.

A batch goes on without some of its samples, such an input does not go on without some of its rows. That is seen by calling
the module with fewer of them, everything beside it that has as many rows cut alike. Where it was given indices of rows it is
not called: those of the last rows would lie beyond the end, which a kernel of an extension need not notice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.operands import held_by, leaves, refs_in, refs_of
from ampguard.capture.record import BadResult, Held, HeldGenerator, Ref, RootCall
from ampguard.capture.root_calls.trees import PLAIN_TYPES
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.naming import NamedTensor
from ampguard.errors import ReplayError
from ampguard.replay.rebuild import Replayer
from ampguard.replay.variants import Variant

LEAST_ROWS = 2
"""Rows that are left: a module that refuses a single one (a batch norm) says nothing about more."""

_KNOWN = PLAIN_TYPES | {Ref, Held, HeldGenerator}
_INTEGERS = frozenset({torch.int32, torch.int64})


def are_tied(evidence: Evidence, given: NamedTensor) -> bool:
    """Whether the module that was given this tensor needs all of its rows, as far as that can be seen."""
    value = given.tensor
    if evidence.replayer is None or value.dim() == 0 or not compat.is_dense(value):
        return False
    good = torch.isfinite(value).reshape(value.shape[0], -1).all(1)
    rows, left = value.shape[0], int(good.sum())
    call = _call_with(evidence, given)
    if call is None or not LEAST_ROWS <= left < rows:
        return False
    given_ones = _tensors_given(evidence, call)
    indices = [t for t in given_ones if _may_index(t, left, rows)]
    if any(t.shape[0] != rows for t in indices):
        return True
    if indices or any(_may_index(t, left, rows) for t in _tensors_of(call.module)):
        return False
    if compat.several_ranks() or not _KNOWN.issuperset(map(type, leaves((call.args, call.kwargs)))):
        return False  # other ranks do not call theirs, and an object may hold anything
    return _refuses(evidence, call, given, good)


def _call_with(evidence: Evidence, given: NamedTensor) -> RootCall | None:
    """The first call of a module that was given it."""
    calls = (event for event in evidence.events() if isinstance(event, RootCall))
    if given.made_by is not None:
        return next((call for call in calls if given.made_by in refs_of(call)), None)
    return next((call for call in calls if any(held.tensor is given.held for held in held_by(call))), None)


def _tensors_given(evidence: Evidence, call: RootCall) -> list[Tensor]:
    made = [tensor for ref in refs_of(call) if (tensor := evidence.made(ref)) is not None]
    return [*(held.value for held in held_by(call)), *made]


def _tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """A module's own tensors that are no parameters."""
    yield from compat.all_buffers(module)
    for inner in compat.all_modules(module):
        yield from (value for value in vars(inner).values() if isinstance(value, Tensor))


def _may_index(tensor: Tensor, left: int, rows: int) -> bool:
    """Whether these may be indices of rows, with some that would lie beyond the rows that are left."""
    is_read = compat.is_dense(tensor) and compat.has_values(tensor)
    if tensor.dtype not in _INTEGERS or not tensor.dim() or not tensor.numel() or not is_read:
        return False
    return int(tensor.min()) >= 0 and left <= int(tensor.max()) < rows


def _refuses(evidence: Evidence, call: RootCall, given: NamedTensor, good: Tensor) -> bool:
    """Whether the module alone raises where it is given the good rows, cut everywhere or only here.

    What the script computed before it is given as it was: sizes stand in the record as numbers.
    """
    alone = _alone(evidence, call)
    made = {ref: evidence.made(ref) for ref in refs_in((call.args, call.kwargs))}
    held = {id(h.tensor): h.value for h in held_by(call) if not isinstance(h.tensor, nn.Parameter)}
    whole: dict[int | Ref, Tensor] = {key: t.detach() for key, t in (made | held).items() if t is not None}
    if alone is None or not made.keys() <= whole.keys():
        return False
    everywhere = {key: _rows(t, good) for key, t in whole.items() if _has_rows(t, len(good))}
    here: dict[int | Ref, Tensor] = {given.key: _rows(given.tensor, good)}
    return all(_raises(alone, whole | cut) for cut in (everywhere | here, here)) and not _raises(alone, whole)


def _alone(evidence: Evidence, call: RootCall) -> Replayer | None:
    """A replayer of one call and of nothing before it."""
    assert evidence.replayer is not None
    bad = evidence.bad
    try:
        alone = evidence.replayer.beside(BadResult("output", bad.mode, bad.step, bad.record, (Ref(call.index, 0),)))
    except ReplayError:
        return None
    alone.events = [call]
    return alone


def _raises(alone: Replayer, tensors: dict[int | Ref, Tensor]) -> bool:
    try:
        alone.run(Variant(tensors=tensors), traced=False)
    except ReplayError:
        return False
    except Exception:
        return True
    return False


def _has_rows(tensor: Tensor, rows: int) -> bool:
    is_cut = not tensor.is_nested and tensor.layout in (torch.strided, torch.sparse_coo)
    return is_cut and tensor.dim() > 0 and tensor.shape[0] == rows


def _rows(tensor: Tensor, good: Tensor) -> Tensor:
    return tensor.index_select(0, good.nonzero().reshape(-1).to(tensor.device))
