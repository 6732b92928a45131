"""The models that DistributedDataParallel keeps the same on several ranks: those that are called, or of which a part is."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampguard import compat
from ampguard.capture.frames import user_line
from ampguard.capture.patches import Patches
from ampguard.capture.ranks.past_wrapper import PastWrapper, past_wrapper
from ampguard.capture.record import Line, RootCall
from ampguard.numerics import bit_sum


class Replica:
    """One DDP model of this process. `ranks`: of the processes that hold the same weights, in order."""

    by_hand = False
    reduced = None

    def __init__(self, ddp: DistributedDataParallel, number: int) -> None:
        self.number = number
        self.ranks: list[int] = sorted(torch.distributed.get_process_group_ranks(ddp.process_group))
        self.is_promised = True
        """False once DDP has stopped to promise equal weights (`join`, post-local SGD): it is never asked again."""
        self.past: PastWrapper | None = None
        """How the iteration that was looked at last has trained it without calling DDP; None where it has not."""
        self.made_at: Line | None = None
        """Where the script wraps it, if it has since the guard began."""
        self._is_left_alone = False
        self._ddp = weakref.ref(ddp)

    def look(self, calls: Sequence[RootCall], in_no_sync: weakref.WeakSet[DistributedDataParallel]) -> None:
        """See how the iteration that made these calls has used it. `in_no_sync`: whose `no_sync()` was entered."""
        ddp = self._ddp()
        if ddp is not None and self.is_promised:
            past = past_wrapper(ddp, calls)
            self._is_left_alone = past is not None and ddp in in_no_sync
            self.past = None if self._is_left_alone else past

    def model(self) -> DistributedDataParallel | None:
        """The model itself, while it lives."""
        return self._ddp()

    @property
    def has_averaged(self) -> bool:
        """Whether the last iteration that was looked at has let it average gradients."""
        ddp = self._ddp()
        return ddp is not None and not self._is_left_alone and compat.averaged_last_gradients(ddp)

    @property
    def size(self) -> int:
        """How many weights it keeps alike."""
        ddp = self._ddp()
        return len(compat.replicated_by(ddp) or ()) if ddp is not None else 0

    def sums(self) -> tuple[list[str], list[Tensor]] | None:
        """Names and bit sums of its weights; None where nothing is to be compared after this step."""
        ddp = self._ddp()
        replicated = compat.replicated_by(ddp) if ddp is not None and self.is_promised else None
        if ddp is None or replicated is None:
            self.is_promised = False
            return None
        is_expected = self.past is not None or compat.averaged_last_gradients(ddp)
        if self._is_left_alone or not is_expected:
            return None  # inside no_sync(), or after a call without gradients
        with torch.no_grad():
            return [name for name, _ in replicated], [bit_sum(p) for _, p in replicated]


class Replicas:
    """All DDP models seen so far, in the order in which they, or parts of them, were called: the same on all ranks."""

    def __init__(self) -> None:
        self.known: list[Replica] = []
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._added: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._uncalled: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet(made_before())
        self._in_no_sync: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        """Those whose `no_sync()` was entered since the last look."""
        self._lines: weakref.WeakKeyDictionary[DistributedDataParallel, Line | None] = weakref.WeakKeyDictionary()
        self._patches = Patches()

    def install(self, guarded: Callable[..., Any]) -> None:
        """Hear of each DDP model that is made, and of each `no_sync()`. `guarded(function, ...)` calls what may fail."""

        def watch_init(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                original(self, *args, **kwargs)
                guarded(made, self, user_line(sys._getframe(1)))

            return __init__

        def watch_no_sync(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def no_sync(self: DistributedDataParallel) -> Any:
                guarded(left_alone, self)
                return original(self)

            return no_sync

        made, left_alone = self._made, self._in_no_sync.add
        self._patches.replace(DistributedDataParallel, "__init__", watch_init)
        self._patches.replace(DistributedDataParallel, "no_sync", watch_no_sync)

    def _made(self, ddp: DistributedDataParallel, line: Line | None) -> None:
        self._uncalled.add(ddp)
        self._lines[ddp] = line

    @property
    def are_any(self) -> bool:
        """Whether there is a DDP model, called or not."""
        return bool(self.known or self._uncalled)

    def parameters(self) -> set[int]:
        """The identities of all parameters that lie in DDP models, called or not."""
        models = [ddp for replica in self.known if (ddp := replica.model()) is not None]
        return {id(parameter) for ddp in [*models, *self._uncalled] for parameter in compat.all_parameters(ddp)}

    def undo(self) -> None:
        """Take the patches out."""
        self._patches.undo()

    def look(self, calls: Sequence[RootCall]) -> None:
        """Find the DDP models among what an iteration has called, and how it went about them."""
        self.find(calls)
        for ddp in list(self._uncalled):
            if past_wrapper(ddp, calls) is not None:
                self._add(ddp)
        for replica in self.known:
            replica.look(calls, self._in_no_sync)
        self._in_no_sync.clear()

    def find(self, calls: Sequence[RootCall]) -> None:
        """Find the DDP models among what is called."""
        for call in calls:
            self._find_under(call.module)

    def _find_under(self, root: nn.Module) -> None:
        """Each module is looked at once."""
        if root not in self._looked_at:
            self._looked_at.add(root)
            for module in compat.all_modules(root):
                if isinstance(module, DistributedDataParallel):
                    self._add(module)

    def _add(self, ddp: DistributedDataParallel) -> None:
        self._uncalled.discard(ddp)
        if ddp not in self._added:
            self._added.add(ddp)
            self.known.append(Replica(ddp, len(self.known)))
            self.known[-1].made_at = self._lines.get(ddp)


def made_before() -> list[DistributedDataParallel]:
    """The DDP models that are there already."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []  # and without a process group there is none
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [ddp for ddp in found if "module" in compat.children_of(ddp)]
