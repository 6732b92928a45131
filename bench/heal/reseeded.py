"""The same script from other random numbers: every seed that it sets is shifted.

python -m bench.heal.reseeded SHIFT run --precision fp32 train.py        # what follows SHIFT is ampguard's
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ampguard.cli import main


def shifted(seed_with: Callable[..., Any], shift: int) -> Callable[..., Any]:
    """The seeding function, for another seed. Seeds that are no whole number stay."""

    def seed(value: Any = None, *args: Any, **kwargs: Any) -> Any:
        return seed_with(value + shift if isinstance(value, int) else value, *args, **kwargs)

    return seed


if __name__ == "__main__":
    for module, name in ((torch, "manual_seed"), (torch.random, "manual_seed"), (np.random, "seed"), (random, "seed")):
        setattr(module, name, shifted(getattr(module, name), int(sys.argv[1])))
    sys.argv[1:] = sys.argv[2:]
    main()
