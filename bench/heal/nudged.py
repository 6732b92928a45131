"""`ampguard` with weights that differ in their last bit: how far does a loop carry a difference of one rounding?

python -m bench.heal.nudged SEED TYPE run --precision fp32 train.py        # what follows TYPE is ampguard's

Each floating parameter is multiplied by 1 + eps or 1 - eps of TYPE (float32, float16), by coin tosses of our own, when an
optimizer is made over it. All that the script draws is as it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampguard.cli import main


def nudging(make: Callable[..., None], seed: int, dtype: torch.dtype = torch.float32) -> Callable[..., None]:
    """The constructor of optimizers, which changes what is the last bit in `dtype` of parameters new to any of them."""
    tosses = torch.Generator().manual_seed(seed)
    nudged = WeakIdKeyDictionary()

    @functools.wraps(make)
    def make_over_nudged(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            if parameter.is_floating_point() and parameter not in nudged:
                nudge(parameter, tosses, dtype)
                nudged[parameter] = True

    return make_over_nudged


@torch.no_grad()
def nudge(parameter: Tensor, tosses: torch.Generator, dtype: torch.dtype) -> None:
    """One unit in the last place of `dtype` or two, up or down."""
    signs = torch.randint(0, 2, parameter.shape, generator=tosses) * 2 - 1
    parameter.mul_(1 + torch.finfo(dtype).eps * signs.to(parameter.device, torch.float64))


if __name__ == "__main__":
    seed, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    Optimizer.__init__ = nudging(Optimizer.__init__, seed, dtype)  # type: ignore[method-assign]
    sys.argv[1:] = sys.argv[3:]
    main()
