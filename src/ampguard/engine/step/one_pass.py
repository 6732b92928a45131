"""Gradients looked at, and Adam's step made, by kernels of our own on a CUDA device: fewer passes over memory.

PyTorch's fused kernels write the divided gradients back, and its check without a norm writes what it has read. Ours
write only what changes, take all tensors of a group in one launch, and find them by tables of addresses, which are sent
to the device only when something has moved. They need Triton, which comes with PyTorch's builds for CUDA; where it is
missing or does not compile, PyTorch's kernels are taken.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from ampguard.compat import HAS_CUDA, add_to_all_, cuda_is_capturing, increment_versions, may_bypass_step, note_bypass
from ampguard.engine.step.check import GradientCheck
from ampguard.engine.step.kernels import family
from ampguard.engine.step.layout import Look, moments_of

_KIND = "cuda"
_ALIGNED = 16
"""Bytes of which every address must be a multiple."""
_REMEMBERED = 8
"""Tables of addresses that are kept for a group: gradients made anew lie now here, now there."""


class Tables:
    """Where the tensors of a group lie, on the device."""

    def __init__(self, parameters: Sequence[Tensor], chunk: int) -> None:
        sizes = list(map(Tensor.numel, parameters))
        self.device = parameters[0].device
        self.sizes = sizes
        chunks = [-(-size // chunk) for size in sizes]
        self.programs = sum(chunks)
        owners = [number for number, count in enumerate(chunks) for _ in range(count)]
        starts = [start for size in sizes for start in range(0, size, chunk)]
        self.owners, self.starts, self.numels = map(self._sent, (owners, starts, sizes))
        self._known: dict[tuple[int, ...], Tensor | None] = {}

    def at(self, tensors: Sequence[Tensor], unaligned: Sequence[Tensor] = ()) -> Tensor | None:
        """The addresses of some tensors, int64; None where one is not a multiple of 16 bytes. `unaligned` need not be."""
        places = tuple(map(Tensor.data_ptr, tensors))
        key = (*places, *map(Tensor.data_ptr, unaligned)) if unaligned else places
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            is_aligned = all(place % _ALIGNED == 0 for place in places)
            self._known[key] = self._sent(key) if is_aligned else None
        return self._known[key]

    def _sent(self, numbers: Sequence[int]) -> Tensor:
        table = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the script made the default
        return table.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else table


@functools.cache
def _kernels() -> Any:
    """The module of Triton's kernels; None where there is no Triton."""
    try:
        return importlib.import_module("ampguard.engine.step.triton_kernels")
    except Exception:  # an import of Triton can fail in any way
        return None


_given_up: list[str] = []
"""Why the kernels are not taken any more."""


def check_in_one_pass(looks: Sequence[Look], scale: Tensor | None, wants_norm: bool) -> GradientCheck | None:
    """The gradients of several groups looked at; None, with nothing done, where they do not suit."""
    present = [look for look in looks if look.parameters]
    if not present or not all(map(_suits, present)) or not _is_here(present):
        return None
    device = present[0].gradients[0].device
    if scale is not None and (scale.device != device or scale.dtype != torch.float32):
        return None
    try:
        with torch.no_grad():
            answers = _looked_at(present, scale, wants_norm, device)
    except Exception as error:  # no compiler, a folder that cannot be written: Triton raises anything
        _give_up(error)
        return None
    return GradientCheck(answers[0] if wants_norm else None, answers[1], answers[2], looks) if answers else None


def _looked_at(
    looks: Sequence[Look], scale: Tensor | None, wants_norm: bool, device: torch.device
) -> list[Tensor] | None:
    """The norm, unscaled, found_inf, and the inverse scale."""
    kernels = _kernels()
    tables = [_tables_of(look, kernels.CHUNK) for look in looks]
    gradients = [_gradients_of(look, table) for look, table in zip(looks, tables, strict=True)]
    if any(places is None for places in gradients):
        return None
    count = sum(table.programs for table in tables)
    parts = torch.empty(count, dtype=torch.float64, device=device)
    answers = torch.empty(3, dtype=torch.float32, device=device)
    first = 0
    for places, table in zip(gradients, tables, strict=True):
        kernels.look_kernel[(table.programs,)](
            places, table.owners, table.starts, table.numels, parts, first,
            WANTS_NORM=wants_norm, CHUNK=kernels.CHUNK, BLOCK=kernels.BLOCK,
        )  # fmt: skip
        first += table.programs
    kernels.conclude_kernel[(1,)](
        parts, count, scale if scale is not None else answers, answers,
        WANTS_NORM=wants_norm, HAS_SCALE=scale is not None, PARTS=kernels.PARTS,
    )  # fmt: skip
    return list(answers.unbind(0))


def adam_in_one_pass(
    optimizer: Optimizer, looks: Sequence[Look], check: GradientCheck, max_norm: float | None, clip_eps: float
) -> bool:
    """Step Adam or AdamW as `apply_update` says, gradients left as they are; False, with nothing done, if it cannot.

    `looks`: one at each group, whose tensors suit the fused kernel.
    """
    if family(type(optimizer)) not in (Adam, AdamW) or len(looks) != len(optimizer.param_groups):
        return False
    present = [(group, look) for group, look in zip(optimizer.param_groups, looks, strict=True) if look.parameters]
    if not present or not all(_suits(look) and _has_kernel(group) for group, look in present):
        return False
    if not _is_here([look for _, look in present]) or not may_bypass_step(optimizer) or max_norm == 0.0:
        return False
    numbers = [number for number in (check.norm, check.found_inf, check.inverse_scale) if number is not None]
    if any(number.device not in present[0][1].layout.devices for number in numbers):  # type: ignore[union-attr]
        return False
    with torch.no_grad():
        try:
            launches = [_launch_of(optimizer, group, look) for group, look in present]
        except Exception as error:
            _give_up(error)
            return False
        if any(launch is None for launch in launches):
            return False
        return _made(optimizer, launches, check, max_norm, clip_eps)  # type: ignore[arg-type]


def _made(
    optimizer: Optimizer, launches: Sequence[_Launch], check: GradientCheck, max_norm: float | None, clip_eps: float
) -> bool:
    """Launch the kernel for each group; False where the first launch of all fails, with the counts of steps put back."""
    goes = 1.0 - check.found_inf
    for number, launch in enumerate(launches):
        add_to_all_(launch.steps, goes)
        try:
            launch(check, max_norm, clip_eps)
        except Exception as error:
            add_to_all_(launch.steps, goes, -1.0)
            _give_up(error)
            if number:
                raise
            return False
        increment_versions(launch.written)
    note_bypass(optimizer)
    return True


@dataclass
class _Launch:
    """Of Adam's kernel, on a group."""

    group: dict[str, Any]
    is_decoupled: bool
    table: Tables
    gradients: Tensor
    others: Tensor
    steps: list[Tensor]
    written: list[Tensor]

    def __call__(self, check: GradientCheck, max_norm: float | None, clip_eps: float) -> None:
        kernels, group, table = _kernels(), self.group, self.table
        beta1, beta2 = group["betas"]
        kernels.adam_kernel[(table.programs,)](
            self.gradients, self.others, table.owners, table.starts, table.numels, len(table.sizes),
            check.norm if check.norm is not None else check.found_inf, check.found_inf, check.inverse_scale,
            float(max_norm or 0.0), clip_eps,
            float(group["lr"]), beta1, 1.0 - beta1, _log(beta1), beta2, 1.0 - beta2, _log(beta2),
            float(group["weight_decay"]), float(group["eps"]),
            DECOUPLED=self.is_decoupled, CLIPS=max_norm is not None, CHUNK=kernels.CHUNK, BLOCK=kernels.BLOCK,
        )  # fmt: skip


def _launch_of(optimizer: Optimizer, group: dict[str, Any], look: Look) -> _Launch | None:
    """None where a parameter has yet to step for the first time, or something does not lie as the kernel needs it."""
    state = moments_of(optimizer.state, group, look)
    if state is None:
        return None
    first, second, _, steps = state
    if not _lie_as_layout_says(look, [first, second]):
        return None
    table = _tables_of(look, _kernels().CHUNK)
    written = [*look.parameters, *first, *second]
    gradients, others = _gradients_of(look, table), table.at(written, steps)
    if gradients is None or others is None:
        return None
    is_decoupled = bool(group.get("decoupled_weight_decay", family(type(optimizer)) is AdamW))
    return _Launch(group, is_decoupled, table, gradients, others, steps, written)


def _log(beta: float) -> float:
    """Of 0, a number whose power is 0."""
    return math.log(beta) if beta > 0.0 else -1e4


def _suits(look: Look) -> bool:
    """Whether all tensors are plain float32 of one CUDA device, without gaps."""
    if "suits" not in look.notes:
        layout = look.layout
        look.notes["suits"] = (
            layout is not None
            and layout.kept is not None
            and look.is_plain
            and layout.is_contiguous
            and layout.dtypes == {torch.float32}
            and layout.kinds == {_KIND}
            and layout.elements > 0
            and _lie_as_layout_says(look, [look.parameters, look.gradients])
        )
    return bool(look.notes["suits"])


def _lie_as_layout_says(look: Look, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether tensors beside the parameters are of their sizes, float32, on their device, without gaps.

    Asked in every step: a kernel that is given an address reads and writes there, whatever it finds.
    """
    sizes = list(map(Tensor.numel, look.parameters))
    kinds = {(torch.float32, *look.layout.devices, torch.strided)}  # type: ignore[union-attr]
    return all(
        set(map(_what_and_where, tensors)) == kinds
        and list(map(Tensor.numel, tensors)) == sizes
        and all(map(Tensor.is_contiguous, tensors))
        for tensors in lists
    )


_what_and_where = operator.attrgetter("dtype", "device", "layout")


def _has_kernel(group: dict[str, Any]) -> bool:
    return not group["amsgrad"] and not group["maximize"] and group["betas"][1] > 0.0


def _is_here(looks: Sequence[Look]) -> bool:
    """Whether the kernels can be launched now, on the device where everything lies."""
    devices = {device for look in looks for device in look.layout.devices}  # type: ignore[union-attr]
    if len(devices) != 1 or _given_up or not HAS_CUDA or cuda_is_capturing() or _kernels() is None:
        return False
    return next(iter(devices)).index == torch.cuda.current_device()


def _tables_of(look: Look, chunk: int) -> Tables:
    """Kept with the layout, as long as the parameters have the same sizes."""
    kept: dict[str, Any] = look.layout.kept  # type: ignore[union-attr, assignment]
    known: Tables | None = kept.get("tables")
    if known is None or known.sizes != list(map(Tensor.numel, look.parameters)):
        known = kept["tables"] = Tables(look.parameters, chunk)
    return known


def _gradients_of(look: Look, table: Tables) -> Tensor | None:
    """Their addresses."""
    if "gradients" not in look.notes:
        look.notes["gradients"] = table.at(look.gradients)
    return look.notes["gradients"]  # type: ignore[no-any-return]


def _give_up(error: Exception) -> None:
    _given_up.append(f"{type(error).__name__}: {error}")
    logging.getLogger("ampguard").info("Triton's kernels are not taken, PyTorch's are: %s", _given_up[0])
