"""The models that DistributedDataParallel keeps the same on several ranks, found among the modules that are called."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.ranks.checksums import bit_sum


class Replica:
    """One DDP model of this process. `ranks`: of the processes that hold the same weights, in order."""

    def __init__(self, ddp: nn.parallel.DistributedDataParallel, number: int) -> None:
        self.number = number
        self.ranks: list[int] = sorted(torch.distributed.get_process_group_ranks(ddp.process_group))
        self.is_promised = True
        """False once DDP has stopped to promise equal weights (`join`, post-local SGD): it is never asked again."""
        self._ddp = weakref.ref(ddp)

    def sums(self) -> tuple[list[str], list[Tensor]] | None:
        """Names and bit sums of its weights; None where nothing is to be compared after this step."""
        ddp = self._ddp()
        replicated = compat.replicated_by(ddp) if ddp is not None and self.is_promised else None
        if ddp is None or replicated is None:
            self.is_promised = False
            return None
        if not compat.averaged_last_gradients(ddp):
            return None  # inside no_sync(), or after a call without gradients
        with torch.no_grad():
            return [name for name, _ in replicated], [bit_sum(p) for _, p in replicated]


class Replicas:
    """All DDP models seen so far."""

    def __init__(self) -> None:
        self.known: list[Replica] = []
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def look(self, roots: Iterable[nn.Module]) -> None:
        """Find the DDP models among modules that are called; each module is looked at once."""
        for root in roots:
            if root not in self._looked_at:
                self._looked_at.add(root)
                for module in root.modules():
                    if isinstance(module, nn.parallel.DistributedDataParallel):
                        self._looked_at.add(module)
                        self.known.append(Replica(module, len(self.known)))
