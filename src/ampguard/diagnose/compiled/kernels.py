"""The same operator on the same operands, in the same type, by another of PyTorch's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat, numerics
from ampguard.diagnose.evidence import Evidence, result_of
from ampguard.replay.variants import Captured

PRODUCTS = frozenset(
    ["convolution", "convolution_backward", "addmm", "mm", "bmm", "baddbmm", "linear", "addmv", "mv", "linear_backward"]
)
"""Operators that a library computes where there is one: oneDNN on the CPU, cuDNN on CUDA."""

ROOM = 0.9
"""A result beyond this share of its type's range is at the edge: there rounding decides, and no kernel is wrong."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Another kernel: what it is called, the context that chooses it, and how a script does that."""

    name: str
    chosen: Callable[[], contextlib.AbstractContextManager[Any]]
    how: str


def attention_by_formula() -> contextlib.AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


FORMULA = Kernel(
    "the attention's own formula",
    attention_by_formula,
    "from torch.nn.attention import SDPBackend, sdpa_kernel\nwith sdpa_kernel(SDPBackend.MATH):\n    {code}",
)
PYTORCHS_OWN = Kernel(
    "PyTorch's own kernel in place of oneDNN's",
    compat.without_onednn,
    "with torch.backends.mkldnn.flags(enabled=False):\n    {code}",
)
WITHOUT_CUDNN = Kernel(
    "PyTorch's own kernel in place of cuDNN's",
    lambda: torch.backends.cudnn.flags(enabled=False),
    "with torch.backends.cudnn.flags(enabled=False):\n    {code}",
)


def other_kernel(evidence: Evidence) -> tuple[Kernel, Tensor] | None:
    """A kernel whose result on the same operands is finite, well inside its type, and that result; None where none is."""
    call = evidence.call
    if call is None or evidence.given is not None or evidence.intended:
        return None
    name = evidence.op.short_name
    if name.startswith("_scaled_dot_product"):
        result = attention_again(evidence, call, is_backward=name.endswith("_backward"))
        kernel = FORMULA
    elif any(not numerics.is_finite(t) for t in floats(call)):
        return None
    elif name in PRODUCTS:
        kernel = WITHOUT_CUDNN if evidence.op.device == "cuda" else PYTORCHS_OWN
        result = run_again(evidence, call, kernel)
    else:
        return None
    is_well = (
        result is not None and numerics.is_finite(result) and result.abs().max() <= ROOM * torch.finfo(result.dtype).max
    )
    return (kernel, result) if result is not None and is_well else None


def floats(call: Captured) -> list[Tensor]:
    return [t for t in call.tensors if t.is_floating_point()]


def run_again(evidence: Evidence, call: Captured, kernel: Kernel) -> Tensor | None:
    """The operator itself under another kernel."""
    try:
        with torch.no_grad(), kernel.chosen():
            result = result_of(call.func(*call.args, **call.kwargs), evidence.link.result)
    except RuntimeError:
        return None
    return result.detach() if isinstance(result, Tensor) and result.numel() else None


def attention_again(evidence: Evidence, call: Captured, is_backward: bool) -> Tensor | None:
    """The attention or its derivative by the formula; None where it drops elements at random."""
    names = [argument.name for argument in compat.schema_of(call.func).arguments]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    operands = [given.get(name) for name in ("query", "key", "value")]
    if given.get("dropout_p") or not all(isinstance(t, Tensor) for t in operands):
        return None
    mask = given.get("attn_mask", given.get("attn_bias"))
    if any(not numerics.is_finite(t) for t in operands if isinstance(t, Tensor)) or has_empty_row(mask):
        return None
    query, key, value = (t.detach().requires_grad_() for t in operands if isinstance(t, Tensor))
    try:
        with torch.enable_grad(), FORMULA.chosen():
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=bool(given.get("is_causal")), scale=given.get("scale")
            )
            if not is_backward:
                return output.detach() if evidence.link.result == 0 else None
            found = torch.autograd.grad(output, [query, key, value], given.get("grad_out", given.get("grad_out_")))
    except RuntimeError:
        return None
    return found[evidence.link.result] if evidence.link.result < len(found) else None


def has_empty_row(mask: Any) -> bool:
    """Whether a mask leaves a query without a key: what comes of that is the mask's doing, whatever the kernel."""
    if not isinstance(mask, Tensor):
        return False
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    return not bool(allowed.any(-1).all())
