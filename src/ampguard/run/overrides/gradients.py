"""The gradients that an optimizer is about to use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.numerics import is_finite


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """What it updates; nothing is known of one that is none of PyTorch's."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all gradients are finite. Waits for the device, once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient if gradient.layout == torch.strided else compat.stored_values(gradient)
        if values.numel():
            by_device.setdefault(values.device, []).append(values.detach())
    for together in by_device.values():
        with torch.no_grad():
            total = torch.stack([norm.float() for norm in compat.norms_of(together)]).sum()
        # The squares of finite gradients beyond 1e19 are not finite: then each is looked at.
        if bool(torch.isfinite(total)):
            continue
        if any(compat.local_part(g) is not g for g in together) or not all(is_finite(g) for g in together):
            return False  # of shards the sum is over all ranks, and no rank may think otherwise
    return True


def bad_gradients(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """`3 of 12 gradients (first: blocks.0.weight)`; `names` by the parameters' identities."""
    held = [p for p in parameters_of(optimizer) if p.grad is not None]
    bad = [p for p in held if p.grad is not None and not is_finite(p.grad)]
    if not held:
        return "gradients"
    first = names.get(id(bad[0])) if bad else None
    return f"{len(bad)} of {len(held)} gradients" + (f" (first: {first})" if first else "")
