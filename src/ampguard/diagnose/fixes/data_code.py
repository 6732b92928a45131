"""The code that repairs a batch: what the script itself calls the data, and all that has to lose the same samples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.frames import frames_here, locals_of
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.naming import NamedTensor

MAX_FRAMES = 60
MAX_ITEMS = 64
MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where the script holds a tensor: how it writes it, what it lies in and how it writes that, and its frame's variables."""

    written: str
    holder: Any
    holder_written: str | None
    variables: dict[str, Any]


def place_of(tensor: Tensor) -> Place | None:
    """Where the running script holds a tensor; None where no variable leads to it."""
    for frame in frames_here(sys._getframe(1), MAX_FRAMES):
        if is_script_code(frame.f_code):
            variables = {n: v for n, v in locals_of(frame).items() if n.isidentifier() and not n.startswith("__")}
            for depth in range(MAX_DEPTH + 1):
                for name, value in variables.items():
                    for written, holder, holder_written in _inside(name, value, tensor, depth):
                        return Place(written, holder, holder_written, variables)
    return None


def _inside(name: str, value: Any, tensor: Tensor, depth: int) -> Iterator[tuple[str, Any, str | None]]:
    """The places of a tensor that lie so deep in a value, each with what it lies in."""
    if depth == 0:
        if isinstance(value, Tensor) and (value is tensor or _is_same_memory(value, tensor)):
            yield name, None, None
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"{name}[{key!r}]", item) for key, item in list(value.items())[:MAX_ITEMS]]
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = [(f"{name}[{i}]", item) for i, item in enumerate(value[:MAX_ITEMS])]
    for written, item in items:
        for found, holder, holder_written in _inside(written, item, tensor, depth - 1):
            yield (found, value, name) if holder is None else (found, holder, holder_written)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and compat.storage_key(one) == compat.storage_key(other) != 0


def kept_samples(evidence: Evidence, given: NamedTensor, place: Place | None) -> str:
    """The code that drops the samples of a batch that are not finite."""
    written = place.written if place is not None else given.short_name
    rows = {1: "", 2: ".all(1)"}.get(given.tensor.dim(), ".flatten(1).all(1)")
    keep = f"keep = torch.isfinite({written}){rows}"
    rest = _rest(evidence, given, place) if place is not None and given.tensor.dim() else None
    return keep if rest is None else f"{keep}; {rest}"


def _rest(evidence: Evidence, given: NamedTensor, place: Place) -> str | None:
    size = given.tensor.shape[0]

    def has_rows(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size

    holder, name = place.holder, place.holder_written
    if isinstance(holder, Mapping):
        taken = "v[keep]" if all(map(has_rows, holder.values())) else f"v[keep] if {_IS_OF_THE_BATCH} else v"
        kept = f"{{k: {taken} for k, v in {name}.items()}}"
        return f"{name} = {kept}" if name is not None and name.isidentifier() else f"{name}.update({kept})"
    if isinstance(holder, (list, tuple)):
        is_whole = len(holder) > 1 and all(map(has_rows, holder))
        return f"{name} = [v[keep] for v in {name}]" if is_whole else None
    replayer = evidence.replayer
    beside = [
        other
        for other, value in place.variables.items()
        if other != place.written and has_rows(value) and replayer is not None and replayer.is_of_batch(value)
    ]
    if not beside:
        return None
    names = [place.written, *dict.fromkeys(beside)]
    return f"{', '.join(names)} = {', '.join(f'{each}[keep]' for each in names)}"


_IS_OF_THE_BATCH = "torch.is_tensor(v) and len(v) == len(keep)"


def cleaned_data(given: NamedTensor, place: Place | None, infinite: str) -> str:
    """The code that puts 0 in the place of what is not finite."""
    if place is None:
        return f"torch.nan_to_num({given.short_name}{infinite})"
    is_fixed = isinstance(place.holder, tuple)
    return ("" if is_fixed else f"{place.written} = ") + f"torch.nan_to_num({place.written}{infinite})"
