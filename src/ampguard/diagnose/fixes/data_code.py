"""The code that repairs a batch: what the script itself calls the data, and all that has to lose the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ampguard.diagnose.code.accused import bad_operand
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.naming import NamedTensor
from ampguard.diagnose.givens.places import Place, parts_of


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
        is_whole = len(holder) > 1 and all(map(has_rows, holder)) and (name or "").isidentifier()
        return f"{name} = [v[keep] for v in {name}]" if is_whole and not hasattr(holder, "_fields") else None
    if holder is not None:
        is_batch = name is not None and name != "self"
        parts = [written for written, v in _all_in(name or "", holder) if has_rows(v)] if is_batch else []
        return _shortened(list(dict.fromkeys([place.written, *parts])))
    replayer = evidence.replayer
    beside = [
        other
        for other, value in place.variables.items()
        if other != place.written and has_rows(value) and replayer is not None and replayer.is_of_batch(value)
    ]
    if not beside:
        return None
    return _shortened([place.written, *dict.fromkeys(beside)])


def _all_in(name: str, holder: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """What lies in an object and can be assigned to, each as it is written."""
    for written, value in parts_of(name, holder) if not isinstance(holder, tuple) else ():
        yield written, value
        if depth > 1:
            yield from _all_in(written, value, depth - 1)


def _shortened(names: list[str]) -> str:
    """
    >>> _shortened(["x", "y"])
    'x, y = x[keep], y[keep]'
    """
    return f"{', '.join(names)} = {', '.join(f'{each}[keep]' for each in names)}"


_IS_OF_THE_BATCH = "torch.is_tensor(v) and len(v) == len(keep)"


def cleaned_data(evidence: Evidence, given: NamedTensor, place: Place | None, infinite: str) -> str:
    """The code that puts 0 in the place of what is not finite."""
    if place is None:
        written = bad_operand(evidence) if given.short_name != given.name else None
        return f"torch.nan_to_num({written or given.short_name}{infinite})"
    if isinstance(place.holder, tuple):  # to which nothing can be assigned
        return f"{place.written}.nan_to_num_({infinite.removeprefix(', ')})"
    return f"{place.written} = torch.nan_to_num({place.written}{infinite})"
