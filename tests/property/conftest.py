"""Properties are looked for with the same examples in every run."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ampguard", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("ampguard")
