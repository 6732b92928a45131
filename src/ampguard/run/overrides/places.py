"""Models whose weights cannot be replaced for a call."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ampguard import compat


def why_weights_stay(root: nn.Module) -> str | None:
    """Why the weights of a model cannot be replaced for a call, and what to do; None where they can."""
    if compat.needs_other_ranks(root):
        return (
            f"the weights of {type(root).__name__} are spread over ranks (FSDP, tensor parallelism) and stay as they "
            "are; give FSDP a MixedPrecision policy in the script"
        )
    scripted = next((m for m in compat.all_modules(root) if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None and compat.has_parameters(scripted):
        return (
            f"{type(root).__name__} holds a TorchScript module, whose weights cannot be replaced: it stays in float32; "
            "use --precision fp16 or bf16 (autocast), or leave torch.jit.script out"
        )
    return None


def is_not_made_yet(root: nn.Module) -> bool:
    """Whether a lazy module gets its weights in the coming call."""
    return any(is_lazy(p) for p in compat.all_parameters(root))
