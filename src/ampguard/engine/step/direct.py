"""PyTorch's fused kernels, called as its optimizers call them but without the Python around that.

`optimizer.step()` spends more time on finding its tensors, one parameter after another, than a small model's kernel
takes. What lies where was just looked at, so the kernel is called at once; where anybody could notice that `step` was
not, or anything is not as usual, it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from ampguard.compat import fused_adam_, fused_sgd_, may_bypass_step, note_bypass
from ampguard.engine.step.kernels import family
from ampguard.engine.step.layout import Look, moments_of, momentum_of


def step_directly(
    optimizer: Optimizer, looks: Sequence[Look], divisor: Tensor | None, found_inf: Tensor | None
) -> bool:
    """Step on the gradients divided by `divisor`, or not at all if `found_inf` is 1; False with nothing done if it cannot.

    `looks`: one at each group, whose tensors suit the fused kernel. Both numbers are 0-d float32 on their device.
    """
    known = family(type(optimizer))
    if known is None or known is Adagrad or len(looks) != len(optimizer.param_groups):
        return False
    gather = momentum_of if known is SGD else moments_of
    lists = [gather(optimizer.state, g, look) for g, look in zip(optimizer.param_groups, looks, strict=True)]
    if any(kept is None for kept in lists) or not may_bypass_step(optimizer):
        return False
    with torch.no_grad():
        for group, look, state in zip(optimizer.param_groups, looks, lists, strict=True):
            if not look.parameters or state is None:
                continue
            if known is SGD:
                fused_sgd_(group, look.parameters, look.gradients, state[0], divisor, found_inf)
            else:
                is_decoupled = group.get("decoupled_weight_decay", known is AdamW)
                fused_adam_(is_decoupled, group, look.parameters, look.gradients, state, divisor, found_inf)
    note_bypass(optimizer)
    return True
