"""Where the examples are, and the environment in which they run as a user's scripts."""

from __future__ import annotations

import os
from pathlib import Path

import ampguard

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{HERE}:{Path(ampguard.__file__).parents[1]}",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
