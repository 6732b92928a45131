"""Are the gradients finite, and how long are they: both answers from one read of them.

Where nobody wants the length, tensors that fit the cache are looked at by PyTorch's own kernel of GradScaler.unscale_:
it writes what it read, but takes all of them in one call.

A sum of squares is Inf or NaN where any gradient is, so the norm tells both. It can also be Inf because the sum itself
overflowed. On the CPU that is looked into when it happens; elsewhere, where looking means waiting, the squares are
summed in a type wide enough that it cannot happen.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ampguard.compat import norms_in, unscale_all_
from ampguard.engine.step.check import GradientCheck
from ampguard.engine.step.layout import Look, look_at
from ampguard.engine.step.one_pass import check_in_one_pass
from ampguard.engine.step.squares import sum_of_squares

CPU = torch.device("cpu")
CPU_ONLY = frozenset(("cpu",))
UNSCALED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
"""Types that the kernel of GradScaler.unscale_ takes."""
CACHED = 1 << 21
"""Elements up to which writing gradients back is cheaper than one product for each (8 MiB of float32)."""


def check_gradients(
    parameters: Iterable[Tensor], scale: Tensor | None = None, *, wants_norm: bool = True
) -> GradientCheck:
    """Norm and finiteness over every `.grad` of the parameters, which carry the loss scale `scale` (0-d float32).

    Reads each gradient once and changes none. With gradients on several devices the answers lie on the first of them
    that is not the CPU. Waits for no device, and can be captured in a CUDA graph, if all gradients are dense: a sparse
    one must add up what belongs to one place first. Without any gradient the norm is 0. With `wants_norm=False` it is
    None, and a model of small tensors is looked at quicker.
    """
    return _checked(look_at(list(parameters)), scale, wants_norm)


def check_groups(looks: Sequence[Look], scale: Tensor | None, wants_norm: bool) -> GradientCheck:
    """The same of one optimizer's groups, which were looked at already, and which the next call steps."""
    made = check_in_one_pass(looks, scale, wants_norm)
    if made is not None:
        return made
    look = looks[0] if len(looks) == 1 else _joined(looks)
    check = _checked(look, scale, wants_norm)
    return GradientCheck(check.norm, check.found_inf, check.inverse_scale, looks)


def _joined(looks: Sequence[Look]) -> Look:
    asked = [p for look in looks for p in look.asked]
    parameters = [p for look in looks for p in look.parameters]
    gradients = [g for look in looks for g in look.gradients]
    return Look(asked, parameters, gradients, all(look.is_plain for look in looks))


def _checked(look: Look, scale: Tensor | None, wants_norm: bool) -> GradientCheck:
    gradients, layout = look.gradients, look.layout
    with torch.no_grad():
        are_on_cpu = layout.kinds == CPU_ONLY if layout is not None else False not in [g.is_cpu for g in gradients]
        if are_on_cpu and look.is_plain and (scale is None or scale.is_cpu):
            elements = layout.elements if layout is not None else None
            return _on_host(gradients, scale, wants_norm, elements)
        return _on_device(gradients, scale, wants_norm, look.is_plain)


def unscale_gradients(parameters: Iterable[Tensor], scale: Tensor) -> GradientCheck | None:
    """As `check_gradients` without the norm, and divides every gradient by `scale` in the same pass, also if one is Inf.

    None, with nothing changed, where they are not all plain tensors without gaps, of one device and one type that keeps
    small numbers (float32 or float64).
    """
    look = look_at(list(parameters))
    gradients = look.gradients
    if not gradients or not look.is_plain or not _are_alike(gradients):
        return None
    here = gradients[0].device
    with torch.no_grad():
        inverse = _scalar(1.0 / scale.item()) if scale.is_cpu else _reciprocal(scale).to(here, non_blocking=True)
        one = torch.ones((), dtype=torch.float32, device=here)
        found_inf = torch.zeros((), dtype=torch.float32, device=here)
        unscale_all_(gradients, found_inf, inverse.to(here, non_blocking=True))
        return GradientCheck(None, found_inf, one)


def _are_alike(gradients: list[Tensor]) -> bool:
    if {g.dtype for g in gradients} not in ({torch.float32}, {torch.float64}):
        return False
    try:
        return all(map(Tensor.is_contiguous, gradients)) and len({g.device for g in gradients}) == 1
    except RuntimeError:  # a sparse tensor does not even answer
        return False


def _on_host(
    gradients: list[Tensor], scale: Tensor | None, wants_norm: bool, elements: int | None = None
) -> GradientCheck:
    inverse = 1.0 if scale is None else 1.0 / scale.item()
    if not wants_norm and (found := _found_together(gradients, elements)) is not None:
        return GradientCheck(None, found, _scalar(inverse))
    if {g.layout for g in gradients} - {torch.strided}:
        gradients = [_dense(g) for g in gradients]
    squares = sum_of_squares(gradients)
    norm = math.sqrt(squares) if squares == squares else squares
    found_inf = 0.0 if math.isfinite(squares) else 1.0
    return GradientCheck(_scalar(norm * inverse) if wants_norm else None, _scalar(found_inf), _scalar(inverse))


def _found_together(gradients: list[Tensor], elements: int | None) -> Tensor | None:
    """1.0 where one of some gradients that fit the cache is Inf or NaN; None where the kernel does not take them."""
    try:
        if (sum(map(Tensor.numel, gradients)) if elements is None else elements) > CACHED:
            return None
        found_inf = torch.zeros((), dtype=torch.float32, device=CPU)
        unscale_all_(gradients, found_inf, torch.ones_like(found_inf))  # times 1: every element stays as it is
    except RuntimeError:  # sparse, complex, or expanded from fewer elements
        return None
    return found_inf


def _on_device(
    gradients: list[Tensor], scale: Tensor | None, wants_norm: bool = True, is_plain: bool = False
) -> GradientCheck:
    """The same without asking for a single number. `is_plain`: no gradient is of a subclass of tensors.

    Gradients of one device and type are looked at without sorting them; where nobody wants their norm, by the kernel that
    GradScaler looks with, which writes each element back as it was.
    """
    here = next((g.device for g in gradients if not g.is_cpu), scale.device if scale is not None else CPU)
    nothing = torch.zeros((), dtype=torch.float32, device=here)
    inverse = nothing + 1 if scale is None else _reciprocal(scale.to(here, non_blocking=True))
    if not gradients:
        return GradientCheck(nothing if wants_norm else None, nothing.clone(), inverse)
    dtype = _one_type(gradients) if is_plain else None
    if dtype in UNSCALED and not wants_norm:
        unscale_all_(gradients, nothing, torch.ones_like(nothing))
        return GradientCheck(None, nothing, inverse)
    groups = [(_wide(here, dtype), gradients)] if dtype is not None else _alike(gradients)
    norms = [_norm(group, wide).to(here, non_blocking=True) for wide, group in groups]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([n.to(norms[0].dtype) for n in norms]))
    unscale_all_([norm], nothing, inverse)
    found_inf = nothing if dtype is not None else _agreed(nothing, gradients)
    return GradientCheck(norm.float() if wants_norm else None, found_inf, inverse)


def _one_type(gradients: list[Tensor]) -> torch.dtype | None:
    """The type of dense gradients of one device and type; None where there are several, or sparse ones."""
    kinds = set(map(_kind, gradients))
    return next(iter(kinds))[0] if len(kinds) == 1 and next(iter(kinds))[2] is torch.strided else None


_kind = operator.attrgetter("dtype", "device", "layout")


def _agreed(found_inf: Tensor, gradients: list[Tensor]) -> Tensor:
    """One verdict for all ranks where some gradients are shards, whose norm they share, and others are not."""
    shards = [g for g in gradients if _is_shard(g)]
    if shards and len(shards) < len(gradients):
        for group in shards[0].device_mesh.get_all_groups():  # type: ignore[attr-defined]
            torch.distributed.all_reduce(found_inf, op=torch.distributed.ReduceOp.MAX, group=group)
    return found_inf


def _norm(tensors: list[Tensor], wide: torch.dtype) -> Tensor:
    """2-norm over tensors of one device and type; of sharded ones over all their shards."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms_in(tensors, wide)))
    whole: Tensor = norm.full_tensor() if _is_shard(norm) else norm  # type: ignore[attr-defined]
    return whole


def _alike(gradients: list[Tensor]) -> list[tuple[torch.dtype, list[Tensor]]]:
    """Groups of one device and type, each with the type in which no sum of their squares overflows."""
    groups: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for gradient in map(_dense, gradients):
        groups.setdefault((gradient.device, gradient.dtype, _is_shard(gradient)), []).append(gradient)
    return [(_wide(device, dtype), tensors) for (device, dtype, _), tensors in groups.items()]


def _wide(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """65504 squared a million times over fits float32; the other types reach as far as float32 itself.

    MPS has no float64: a sum of squares beyond 3e38 is taken for Inf there, and the step is skipped.
    """
    if dtype.is_complex:
        return torch.complex64 if device.type == "mps" else torch.complex128
    return torch.float32 if dtype == torch.float16 or device.type == "mps" else torch.float64


def _reciprocal(scale: Tensor) -> Tensor:
    return scale.reciprocal() if not scale.is_cpu else scale.double().reciprocal().float()


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def _is_shard(gradient: Tensor) -> bool:
    return hasattr(gradient, "full_tensor")


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=CPU)
