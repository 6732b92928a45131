"""Tensors: memory, versions, hooks, and operators on many at once."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

_flatten: Callable[[Any], torch.Tensor] | None = getattr(torch._C._nn, "flatten_dense_tensors", None)
_is_zero: Callable[[torch.Tensor], bool] | None = getattr(torch.Tensor, "_is_zerotensor", None)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of, as autograd follows it; None for any other."""
    return tensor._base if tensor._is_view() else None


WITH_VALUES = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Layouts whose `values()` needs nothing to be added up first."""


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind `tensor` (of a sparse one: behind its values); 0 where it has none (of a subclass)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0 if tensor.layout is torch.strided else _key_of_values(tensor)


def reserve_storage_key(tensor: torch.Tensor) -> object:
    """While what this returns lives no other memory gets the `storage_key` of this tensor's, though that be given back."""
    try:
        from torch.multiprocessing.reductions import StorageWeakRef

        return StorageWeakRef(tensor.untyped_storage())
    except (ImportError, RuntimeError, NotImplementedError, AttributeError):
        return None


def _key_of_values(tensor: torch.Tensor) -> int:
    try:
        return int(stored_values(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there are numbers to look at: not so for meta and fake tensors, for empty ones, and for zeros without memory.

    Double backward makes zeros that have no memory. To read one inside a dispatch mode, where PyTorch does not fill
    it in, ends the process.
    """
    if tensor.is_meta or tensor.numel() == 0 or (_is_zero is not None and _is_zero(tensor)):
        return False
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is None or not isinstance(tensor, fake.FakeTensor)


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter; -1 for inference tensors, which keep none."""
    return -1 if tensor.is_inference() else tensor._version


def whole_of(view: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a view looks into, where that one's elements fill its memory in some order; None where it is no view."""
    whole = None if view.is_inference() else base_of(view)
    if whole is None or not is_dense(whole) or not has_values(whole):
        return None
    is_filled = whole.storage_offset() == 0 and whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
    return whole if is_filled else None


plain_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""`version_of` for the hot path; raises RuntimeError for an inference tensor."""


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in one call where PyTorch has one."""
    together = getattr(torch, "_foreach_norm", None)
    return list(together(tensors)) if together is not None else [torch.linalg.vector_norm(t) for t in tensors]


def largest_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each tensor, of one device and type; NaN where it holds one."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None or tensors[0].dtype.itemsize < 2:
        return [t.float().abs().amax() for t in tensors]
    return list(together(tensors, float("inf")))


SMALL = 1 << 16
"""Elements up to which tensors are copied together."""


def clones_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each; of many small ones in a few calls, and then in one piece of memory for each type."""
    copies: list[torch.Tensor | None] = [None] * len(tensors)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if type(t) is torch.Tensor and t.layout is torch.strided and t.is_contiguous() and t.numel() <= SMALL:
            groups.setdefault((t.device, t.dtype), []).append(i)
    for places in groups.values():
        if len(places) > 1:
            alike = [tensors[i] for i in places]
            parts = flattened(alike).split([t.numel() for t in alike])
            for i, part in zip(places, parts, strict=True):
                copies[i] = part if tensors[i].dim() == 1 else part.view(tensors[i].shape)
    return [t.detach().clone() if copy is None else copy for t, copy in zip(tensors, copies, strict=True)]


def copy_together(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each of the values, in one call where PyTorch has one."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(into, values)
        return
    for target, value in zip(into, values, strict=True):
        target.copy_(value)


def has_gradient_hooks(leaf: torch.Tensor) -> bool:
    """Whether something happens when a gradient has been added to this leaf, beside our own looking on."""
    return hooks_behind_leaf(leaf) is not None or torch.distributed.is_initialized()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and strides that say where its elements lie: neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse or nested tensor as they are stored, without adding up what belongs to one place."""
    if tensor.layout in WITH_VALUES or tensor.is_nested:
        return tensor.values()
    values = getattr(tensor, "_values", None)
    return values() if tensor.layout == torch.sparse_coo and values is not None else tensor.to_dense()


def elements_here(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory here of any tensor, as a dense one: of a shard this part, else the stored values; or itself."""
    tensor = local_part(tensor)
    return tensor if is_dense(tensor) else stored_values(tensor)


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All elements of some tensors of one type in one new tensor."""
    with torch.no_grad():
        if _flatten is not None:
            return _flatten(tensors)
        return torch.cat([t.detach().reshape(-1) for t in tensors])


def norms_in(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The 2-norm of each tensor, of one device and type, summed up in `dtype`."""
    together = getattr(torch, "_foreach_norm", None)
    if together is not None and all(t.dtype == dtype for t in tensors):
        return list(together(tensors))
    if together is None or local_part(tensors[0]) is not tensors[0]:  # 2.15 takes the type for a dimension there
        return [torch.linalg.vector_norm(t, dtype=dtype) for t in tensors]
    return list(together(tensors, 2, dtype))


def is_made(tensor: torch.Tensor) -> bool:
    """Whether operators have made it that autograd can follow.

    A view that was made without gradients, and whose base was written to since, is refused as soon as it is asked.
    """
    try:
        return not tensor.is_leaf
    except RuntimeError:
        return False


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply tensors of one device in place by a number, or by a 0-d tensor that lies there too; in one call if it can be."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def add_to_all_(tensors: list[torch.Tensor], number: torch.Tensor, times: float = 1.0) -> None:
    """Add a 0-d tensor to each tensor in place, on one device."""
    torch._foreach_add_(tensors, number, alpha=times)


def update_scale_(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> None:
    """One update of a loss scale and of its count of finite steps, in place and without waiting, as GradScaler makes it."""
    torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)


@functools.cache
def has_kernel(operator: str, device_type: str) -> bool:
    """Whether an ATen operator has a kernel of its own for a kind of device: not one made of other operators."""
    ask = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    try:
        return ask is not None and bool(ask(f"aten::{operator}", device_type.upper()))
    except RuntimeError:  # an operator or a device that this PyTorch does not know
        return False


def cast_leaf(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf of which `tensor` is a copy in another type (as autocast makes them); None where it is something else."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or not node.next_functions:
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else None


def stored_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of a sparse gradient: which rows it holds and their values, as they are stored; None where it is stored otherwise."""
    indices = getattr(tensor, "_indices", None)
    if tensor.layout != torch.sparse_coo or tensor.sparse_dim() != 1 or indices is None:
        return None
    return indices()[0], stored_values(tensor)


def unscale_all_(tensors: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply tensors in place by `inverse`, and set `found_inf` to 1 where an element is Inf or NaN: one pass, no waiting."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)


_version = operator.attrgetter("_version")


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """`version_of` each; quicker for many."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # an inference tensor
        return [version_of(t) for t in tensors]


def increment_versions(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that tensors were written to, by code that does not."""
    increment = torch.autograd.graph.increment_version
    try:
        increment(tensors)
    except TypeError:  # takes one at a time
        for tensor in tensors:
            increment(tensor)


def keeping_version(tensor: torch.Tensor) -> Any:
    """A context in which writing to a tensor goes unnoticed by the graphs that have kept it; None where PyTorch has none."""
    keep = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    return keep(tensor) if keep is not None else None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of a tensor that is spread over several (a DTensor); any other tensor as it is.

    To ask such a tensor itself for a number would make all ranks talk to each other, and wait for those that do not.
    """
    if type(tensor) is torch.Tensor:
        return tensor
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


def hooks_of_leaf(leaf: torch.Tensor) -> Any:
    """The hooks on a leaf's gradient, by the number of their handle; None where there are none."""
    hooks = getattr(leaf, "_backward_hooks", None)
    return hooks if hooks and isinstance(hooks, dict) else None


def hooks_behind_leaf(leaf: torch.Tensor) -> Any:
    """The hooks that run once a leaf's gradient is complete, by the number of their handle; None where there are none.

    None too where all of them only look on.
    """
    hooks = getattr(leaf, "_post_accumulate_grad_hooks", None)
    if not hooks or not isinstance(hooks, dict):
        return None
    return None if all(hasattr(hook, _LOOKS_ON) for hook in hooks.values()) else hooks


_LOOKS_ON = "looks_on_for_ampguard"


def observing(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """A hook behind a leaf, marked as one of ours that changes nothing."""
    setattr(hook, _LOOKS_ON, True)
    return hook


def is_wanting_leaf(tensor: torch.Tensor) -> bool:
    """Whether this is a leaf of the graph that wants a gradient.

    PyTorch refuses to say where a view that was made without gradients has been written to with them: it is none.
    """
    try:
        return tensor.is_leaf and tensor.requires_grad
    except RuntimeError:
        return False
