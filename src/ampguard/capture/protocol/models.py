"""The modules of a run, as far as the recorder has seen them called: whose parameters does nobody train?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.judging.plain_leaves import leaves_in
from ampguard.capture.record import BackwardCall, Line, RootCall, StepRecord
from ampguard.capture.recorder import FlightRecorder

MAX_ROOTS = 64


class Models:
    """Root modules that were called, by weak reference."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._callers: list[int] = []
        """The thread that each of them was seen to be called by last."""
        self.trained_in_half = False
        """A module was called under float16 autocast, with gradients."""
        self.made_half = False
        """Something made a float16 tensor without autocast: a loss computed on `.half()` of what the model gave."""
        self.autocasts: set[str] = set()
        self._looked_until = 0
        """Events before it were looked at."""

    def look(self) -> None:
        """Note the modules of the present step, and the precision that they were called under."""
        events = self._recorder.log.kept_since(self._looked_until)
        # Asked after the events: they are others where another thread is followed.
        if self._recorder.turns.thread != get_ident():
            return
        for event in events:
            if not self.made_half and type(event) is not BackwardCall:
                made = [tensor for ref in event.outputs if (tensor := ref()) is not None]
                self.made_half = torch.float16 in [tensor.dtype for tensor in made]
            if type(event) is not RootCall:
                continue
            known = next((n for n, (ref, _) in enumerate(self._roots) if ref() is event.module), None)
            if known is not None:
                self._callers[known] = get_ident()
            elif len(self._roots) < MAX_ROOTS:
                self._roots.append((weakref.ref(event.module), event.prefix))
                self._callers.append(get_ident())
            if event.modes.grad:
                self.autocasts |= {str(dtype) for _, enabled, dtype in event.modes.autocast if enabled}
        self._looked_until = self._recorder.log.next_index

    def record(self) -> StepRecord:
        """The present step."""
        return self._recorder.log.slice()

    def roots(self) -> list[tuple[nn.Module, str]]:
        """The modules that are still alive, each with the dotted name under which it hangs in the user's module."""
        found = [(ref(), prefix) for ref, prefix in self._roots]
        return [(module, prefix) for module, prefix in found if module is not None]

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the module that was called."""
        found: dict[str, Tensor] = {}
        for module, _ in self.roots():
            inner = compat.unwrapped(module)
            found |= {**compat.named_parameters(inner), **compat.named_buffers(inner), **found}
        return found

    def called(self) -> set[int]:
        """The parameters, by identity, of the modules that were called with gradients since the last update before them."""
        roots = [event for event in self.record().events if type(event) is RootCall and event.modes.grad]
        last = [root for root in roots if root.updates_before == roots[-1].updates_before]
        return {id(p) for root in last for p in compat.all_parameters(root.module)}

    def called_at(self, parameter: Tensor) -> Line | None:
        """Where the module that has this parameter was called last."""
        roots = [event for event in self.record().events if type(event) is RootCall]
        calls = (root for root in reversed(roots) if any(p is parameter for p in compat.all_parameters(root.module)))
        return next((root.line for root in calls), None)

    def plain_leaves(self) -> list[Tensor]:
        """The tensors of the present step that want a gradient and hang in no module."""
        events = self._recorder.log.record.events
        if self._recorder.turns.thread != get_ident():
            return []
        known = {id(p) for p in self.parameters()}
        return [leaf for leaf in leaves_in(events) if id(leaf) not in known]

    def parameters(self) -> Iterator[nn.Parameter]:
        for module, _ in self.roots():
            yield from compat.all_parameters(module)

    def mine(self) -> list[nn.Module]:
        """Those that the calling thread has called last: of others', no gradient is ever looked at."""
        called = [ref for (ref, _), caller in zip(self._roots, self._callers, strict=False) if caller == get_ident()]
        return [module for ref in called if (module := ref()) is not None]


def unowned(models: Models, held: Iterable[Tensor]) -> list[Tensor]:
    """Parameters of called modules that receive gradients and that no optimizer holds (`held`: those of all threads)."""
    ids = {id(p) for p in held}
    found = [p for module in models.mine() for p in compat.all_parameters(module) if id(p) not in ids]
    return [p for p in found if p.requires_grad and p.is_leaf and p.grad is not None]


def unowned_plain(leaves: list[Tensor], held: Iterable[Tensor], lost: Iterable[Tensor]) -> list[Tensor]:
    """The same of tensors outside modules, of the shape of one that is lost: an input may want a gradient, too."""
    ids, shapes = {id(p) for p in held}, {p.shape for p in lost}
    return [leaf for leaf in leaves if leaf.grad is not None and id(leaf) not in ids and leaf.shape in shapes]


def wrapped_around(models: Models, held: list[Tensor], holds: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Unowned parameters of adapters, and the frozen parameters of `holds` that they were put around.

    An adapter has such parameters itself, or is a part of a model (not all of it) that consists of nothing else: what else
    of it is trained, an optimizer would hold.
    """
    added = {id(p): p for p in unowned(models, held)}
    frozen = {id(p): p for p in holds if not p.requires_grad} if added else {}
    owned = {id(p) for p in held if p.requires_grad}
    roots = [root for root, _ in models.roots()]
    adapters: list[nn.Module] = []
    found: dict[int, Tensor] = {}
    inside: dict[int, Tensor] = {}
    for module in reversed(
        [m for root in roots for m in compat.all_modules(root)] if frozen else []
    ):  # the inner ones first
        own = [p for p in compat.own_parameters(module) if id(p) in added]
        parts = compat.all_parameters(module)
        if not own and module not in roots and not any(id(p) in owned for p in parts):
            own = [p for p in parts if id(p) in added]
        around = [p for p in parts if id(p) in frozen] if own else []
        if around and not any(m in adapters for m in compat.all_modules(module)):
            adapters.append(module)
            found |= {id(p): p for p in own}
            inside |= {id(p): p for p in around}
    return [p for p in added.values() if id(p) in found], list(inside.values())


def orphans(models: Models, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that belong to no module that was called."""
    known = {id(p) for p in models.parameters()}
    return [p for p in parameters if id(p) not in known]


def share_memory(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether any of them are views of the same memory."""
    keys: set[Any] = {compat.storage_key(t) for t in some} - {0}
    return any(compat.storage_key(t) in keys for t in others)


def hold_flat(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether any of `some` is a flat buffer from which `others` are cut: the same memory, and not the same shape.

    (A parameter that was wrapped anew, by weight_norm or `nn.Parameter(p.data)`, has the same memory and its old shape.)
    """
    flat = [t for t in some if t.dim() == 1]
    kept = {id(t): compat.storage_key(t) for t in flat}
    cut = [(compat.storage_key(t), tuple(t.shape)) for t in others]
    return any(key and any(key == k and tuple(t.shape) != s for k, s in cut) for t in flat if (key := kept[id(t)]))


def left_buffer(models: Models, held: list[Tensor], flat: Iterable[Tensor]) -> list[Tensor]:
    """Trained parameters that have left a flat buffer among `flat`, from which others are cut still.

    `held`: all that optimizers hold. A buffer is one where parameters of modules lie in its memory; what of it they do not
    cover must have room for those that lie elsewhere and that no optimizer holds.
    """
    outside = unowned(models, held)
    if not outside:
        return []
    keys = {compat.storage_key(t) for t in held}
    outside = [p for p in outside if compat.storage_key(p) not in keys]
    theirs = {id(t) for t in held}
    within = {id(p): p for p in models.parameters() if id(p) not in theirs}
    for buffer in [t for t in flat if t.dim() == 1]:
        key = compat.storage_key(buffer)
        covered = sum(p.numel() for p in within.values() if key and compat.storage_key(p) == key)
        if covered and outside and sum(p.numel() for p in outside) <= buffer.numel() - covered:
            return outside
    return []


def look_alike(lost: list[Tensor], found: list[Tensor]) -> bool:
    """Whether the shapes of `lost` are among those of `found`: a copy of the same layers."""
    shapes = [tuple(t.shape) for t in found]
    for tensor in lost:
        if tuple(tensor.shape) not in shapes:
            return False
        shapes.remove(tuple(tensor.shape))
    return True
