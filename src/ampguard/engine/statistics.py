"""What forward passes write to buffers (running statistics), put back where the batch of a skipped step has spoiled it.

A skipped step leaves parameters and optimizer state alone. BatchNorm has taken the bad batch in by then, and its NaN would
stay for good: in every evaluation, and no checkpoint could be saved any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.numerics import is_finite

LARGEST = 1 << 18
"""Elements up to which a buffer is copied: statistics and codebooks, no queue of a million features."""
WINDOWS_BETWEEN_SCANS = 256
GENERATIONS = 2
"""Windows whose copies are kept: the verdict of an accelerator's step comes when the next window has begun."""


@dataclass(slots=True)
class _Place:
    """A buffer, under the name in its module's own table."""

    owner: dict[str, Any]
    name: str
    path: str
    tensor: Tensor
    version: int
    first: Tensor
    """Its value when it was found."""
    changes: bool
    """Whether it is copied before each window: it was written to, or the kernels of norms may write to it uncounted."""

    def now(self) -> Tensor | None:
        """What stands there, if it can be copied."""
        tensor = self.owner.get(self.name)
        return tensor if _is_small(tensor) else None

    def has_changed(self) -> bool:
        tensor = self.owner.get(self.name)
        return tensor is not self.tensor or compat.version_of(self.tensor) != self.version

    def is_poisoned(self) -> bool:
        """Whether it is not finite, and was when it was found. Waits for the device."""
        now = self.now()
        return now is not None and not is_finite(now) and is_finite(self.first)


class Statistics:
    """The small buffers that training writes to, as they were before the last windows."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        self._models = models
        self._places: dict[tuple[int, str], _Place] = {}
        self._kept: deque[dict[tuple[int, str], Tensor]] = deque(maxlen=GENERATIONS)
        self._windows = 0
        self._is_open = False

    def before_forward(self) -> None:
        """A forward pass of training is about to begin: keep what the first one of a window may change."""
        if self._is_open or compat.cuda_is_capturing():
            return
        self._is_open = True
        with torch.inference_mode(False), torch.no_grad(), compat.unseen():
            if self._windows % WINDOWS_BETWEEN_SCANS == 0:
                self._scan()
            self._windows += 1
            self._keep()

    def end_window(self) -> None:
        """A step was made or skipped: the next forward pass begins a window."""
        self._is_open = False

    def forget(self) -> None:
        """Another state was loaded: what was kept is another training's."""
        self._places.clear()
        self._kept.clear()
        self._windows = 0
        self._is_open = False

    def of_open_window(self) -> dict[str, Tensor]:
        """By path, what the buffers held before an open window that has written to them."""
        if not self._is_open:
            return {}
        written = {key: place for key, place in self._places.items() if place.changes or place.has_changed()}
        return {place.path: self._kept[0].get(key, place.first) for key, place in written.items()}

    def restore(self, of_open_window: Mapping[str, Tensor]) -> None:
        """Another state was loaded, perhaps one of an open window."""
        self.forget()
        if not of_open_window:
            return
        self._is_open = True
        with torch.inference_mode(False), torch.no_grad(), compat.unseen():
            self._scan()
            self._windows += 1
            kept = {key: (of_open_window.get(place.path), place.tensor) for key, place in self._places.items()}
            self._kept.appendleft(
                {key: saved.to(here.device, copy=True) for key, (saved, here) in kept.items() if saved is not None}
            )

    def put_back(self) -> list[str]:
        """A step was skipped: give the modules whose statistics are no longer finite the last ones that were.

        The paths of what was put back. Waits for the device.
        """
        with torch.inference_mode(False), torch.no_grad(), compat.unseen():
            poisoned: dict[int, list[tuple[int, str]]] = {}
            for key, place in self._places.items():
                if place.is_poisoned():
                    poisoned.setdefault(key[0], []).append(key)
            return [path for owner, keys in poisoned.items() for path in self._put_back(owner, keys)]

    def _put_back(self, owner: int, poisoned: list[tuple[int, str]]) -> list[str]:
        """Give one module's buffers the values of the last window before which the poisoned ones were finite."""
        places = {key: place for key, place in self._places.items() if key[0] == owner}
        firsts = {key: place.first for key, place in places.items()}
        for kept in (*self._kept, firsts):
            values = {key: kept.get(key, first) for key, first in firsts.items()}
            if all(is_finite(values[key]) for key in poisoned):
                for key, place in places.items():
                    now = place.now() if place.changes or place.has_changed() else None
                    if now is not None and now.shape == values[key].shape:
                        now.copy_(values[key])
                return [places[key].path for key in poisoned]
        return []

    def _scan(self) -> None:
        """Find the buffers there are."""
        found = {}
        for name, model in self._models.items():
            root = name if len(self._models) > 1 else ""
            for path, module in compat.named_modules_of_user(model, root).values():
                owner = compat.buffers_of(module)
                for key, tensor in owner.items():
                    if not _is_small(tensor):
                        continue
                    place = self._places.get((id(owner), key))
                    if place is None:
                        full = f"{path}.{key}" if path else key
                        version, first = compat.version_of(tensor), tensor.detach().clone()
                        place = _Place(owner, key, full, tensor, version, first, _may_be_written_uncounted(tensor))
                    found[id(owner), key] = place
        self._places = found

    def _keep(self) -> None:
        values = {}
        for key, place in self._places.items():
            place.changes = place.changes or place.has_changed()
            now = place.now() if place.changes else None
            if now is not None:
                values[key] = now.detach()
        self._kept.appendleft(dict(zip(values, compat.clones_of(list(values.values())), strict=True)))


def _is_small(tensor: Tensor | None) -> bool:
    return (
        tensor is not None
        and type(tensor) is Tensor
        and not tensor.is_inference()
        and compat.has_values(tensor)
        and tensor.layout == torch.strided
        and tensor.numel() <= LARGEST
    )


def _may_be_written_uncounted(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.is_floating_point()
