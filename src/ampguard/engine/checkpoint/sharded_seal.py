"""Numbers by which it is seen whether a sharded checkpoint was altered, however many ranks save and load it.

Of each tensor the bits of all elements are added up, each rank's own part on the rank, and the sums over the ranks: in
whatever way a tensor is cut, its sum is the same. One pass over the memory, and one number a tensor to be reduced.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampguard import compat
from ampguard.engine.checkpoint.seal import leaves, told
from ampguard.numerics import bit_sum


def sums_of(state: Mapping[str, Any]) -> dict[str, int] | None:
    """By path: the sum of the bits of a tensor, or that of what else it is. None where ranks hold different names.

    All ranks take part.
    """
    tensors = {path: leaf for path, leaf in leaves(state) if isinstance(leaf, Tensor)}
    others = {path: zlib.crc32(told(leaf).encode()) for path, leaf in leaves(state) if path not in tensors}
    if not _is_alike_everywhere(zlib.crc32("\n".join(tensors).encode())):
        return None
    sums = [_own_share(leaf).to(_device()) for leaf in tensors.values()]
    together = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=_device())
    if _several_ranks():
        dist.all_reduce(together)
    return others | dict(zip(tensors, together.tolist(), strict=True))


def altered(saved: Mapping[str, int], now: Mapping[str, int]) -> str | None:
    """The path of the first that is not what was saved."""
    return next((path for path, number in now.items() if saved.get(path, number) != number), None)


def _own_share(tensor: Tensor) -> Tensor:
    """What this rank adds: its own part of a tensor that is spread; all of one that is whole, on the first rank."""
    if compat.counts_on_this_rank(tensor):
        return bit_sum(compat.local_part(tensor))
    return torch.zeros((), dtype=torch.int64)


def _is_alike_everywhere(number: int) -> bool:
    if not _several_ranks():
        return True
    ends = torch.tensor([number, -number], device=_device())
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return int(ends[0]) == -int(ends[1])


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> torch.device:
    """Where collectives take their numbers."""
    return torch.device("cuda" if _several_ranks() and dist.get_backend() == "nccl" else "cpu")
