"""Seeds before a script's first line, for two runs of it to be compared."""

from __future__ import annotations

import random
import sys

from ampguard.run.late import AfterImport

NUMPY_SEEDS = 2**32
LEAST_SEED, LARGEST_SEED = -(2**63), 2**64 - 1
"""What `torch.manual_seed` takes."""


def seed_everything(seed: int) -> None:
    """Seed Python's random numbers now and numpy's as soon as it is imported. torch's: see `seed_torch`."""
    random.seed(seed)
    if "numpy" in sys.modules:
        _seed_numpy(seed)
    else:
        AfterImport("numpy", lambda: _seed_numpy(seed)).install()


def seed_torch(seed: int) -> None:
    """To be called once torch is imported."""
    import torch

    torch.manual_seed(seed)


def _seed_numpy(seed: int) -> None:
    sys.modules["numpy"].random.seed(seed % NUMPY_SEEDS)
