"""Batches that are lists with a sample in each entry: detectron2's list of dicts, torchvision's tuple of images.

There a sample is no row of a tensor but an entry of the list, with all the tensors that lie in it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.places import Part, Place, is_same_memory, parts_of, paths_to, places_of
from ampguard.numerics import is_finite

MAX_DEPTH = 3
MAX_PLACES = 16
MAX_BESIDE = 4


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of samples. `within`: how a tensor is written behind an entry ("['image']"); `bad`: the samples whose is bad.

    `beside`: the script's other lists with an entry for each of the samples. `place`: of the tensor in the script.
    """

    name: str
    within: str
    samples: list[dict[str, Tensor]]
    bad: list[int]
    beside: list[str]
    place: Place | None = None

    @property
    def has_good_sample(self) -> bool:
        return len(self.bad) < len(self.samples)

    def without_bad_samples(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """For each tensor of a bad sample, by identity, that of a good one. `values`: what a step was given of each."""
        good = next(i for i in range(len(self.samples)) if i not in self.bad)
        others = self.samples[good]
        return {
            id(tensor): values.get(id(others[written]), others[written]).detach()
            for i in self.bad
            for written, tensor in self.samples[i].items()
            if written in others
        }

    def in_code(self) -> str:
        """The code that keeps the good samples.

        >>> Listed("batch", "['image']", [], [], []).in_code()
        "batch = [each for each in batch if torch.isfinite(each['image']).all()]"
        >>> Listed("images", "", [], [], ["targets"]).in_code().partition("; ")[2]
        'images, targets = [images[i] for i in keep], [targets[i] for i in keep]'
        """
        are_good = f"torch.isfinite(each{self.within}).all()"
        if not self.beside:
            return f"{self.name} = [each for each in {self.name} if {are_good}]"
        names = [self.name, *self.beside]
        kept = ", ".join(f"[{name}[i] for i in keep]" for name in names)
        return f"keep = [i for i, each in enumerate({self.name}) if {are_good}]; {', '.join(names)} = {kept}"


def listed(evidence: Evidence, tensor: Tensor) -> Listed | None:
    """The list of samples that a tensor lies in; None where it lies in none."""
    batch = evidence.replayer.last_batch if evidence.replayer is not None else None
    paths = (path for depth in range(1, MAX_DEPTH + 1) for path, _ in paths_to(tensor, "batch", batch, depth))
    as_loaded = _in_path(next(paths, []), tensor)
    places = places_of(tensor)
    if as_loaded is None:
        return _shortest(places, tensor)
    for place in itertools.islice(places, MAX_PLACES):
        found = _in_path(place.path, tensor, place)
        if found is not None and len(found.samples) == len(as_loaded.samples):
            return found  # (and not the whole data set, where the batch is made of what lies in it)
    return as_loaded


def _shortest(places: Iterator[Place], tensor: Tensor) -> Listed | None:
    """Of the first lists, side by side: a batch is a part of the data set that it was taken from."""
    first = next(places, None)
    found = _in_path(first.path, tensor, first) if first is not None else None
    if first is None or found is None:
        return None  # to look further takes long, and finds other names of the same
    for place in itertools.islice(places, MAX_BESIDE):
        if place.variables is not first.variables or len(place.path) != len(first.path):
            break
        other = _in_path(place.path, tensor, place)
        if other is not None and len(other.samples) < len(found.samples):
            found = other
    return found


def _in_path(path: list[Part], tensor: Tensor, place: Place | None = None) -> Listed | None:
    """The innermost of what a tensor lies in that is a list of samples."""
    variables = place.variables if place is not None else {}
    for at in reversed(range(len(path))):
        name, value = path[at]
        if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or len(value) < 2:
            continue
        around = parts_of(*path[at - 1]) if at else list(variables.items())
        beside = [n for n, other in around if other is not value and _is_as_long(other, value)]
        samples = [dict(_tensors_in("", _resolved(entry))) for entry in value]
        if not _are_samples(value, samples, bool(beside)):
            continue
        mine = next((i for i, parts in enumerate(samples) if any(t is tensor for t in parts.values())), None)
        mine = mine if mine is not None else next(i for i, p in enumerate(samples) if _has(p, tensor))
        within = next(w for w, t in samples[mine].items() if t is tensor or is_same_memory(t, tensor))
        bad = [i for i, parts in enumerate(samples) if i == mine or (within in parts and not is_finite(parts[within]))]
        beside = beside if all(map(str.isidentifier, [name, *beside])) else []
        return Listed(name, within, samples, bad, beside, place)
    return None


def _has(parts: dict[str, Tensor], tensor: Tensor) -> bool:
    return any(is_same_memory(part, tensor) for part in parts.values())


def _are_samples(entries: list[Any] | tuple[Any, ...], samples: list[dict[str, Tensor]], has_others: bool) -> bool:
    """Whether each entry is one sample: all hold the same, and no entry is a batch of its own.

    The parts of a batch (`x, y`) lie side by side as well. So tensors side by side are samples only where they are more than
    two, and either their first dimensions differ or another list of as many goes with them.
    """
    if len({type(_resolved(entry)) for entry in entries}) > 1 or not all(samples):
        return False
    kinds = [{written: (t.dtype, t.dim()) for written, t in parts.items()} for parts in samples]
    if any(kind != kinds[0] for kind in kinds):
        return False
    if "" not in kinds[0]:
        return True
    return len(samples) > 2 and (has_others or len({parts[""].shape[:1] for parts in samples}) > 1)


def _is_as_long(one: Any, other: list[Any] | tuple[Any, ...]) -> bool:
    return isinstance(one, (list, tuple)) and not hasattr(one, "_fields") and len(one) == len(other)


def _resolved(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def _tensors_in(name: str, value: Any, depth: int = MAX_DEPTH) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for written, part in parts_of(name, value):
            yield from _tensors_in(written, _resolved(part), depth - 1)
