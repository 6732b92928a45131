"""The most memory that a process has held, without what the guard itself needed in between."""

from __future__ import annotations

import pytest
import torch

from ampguard.run.overrides.memory import MARKS, PeakMemory

LARGE = 200


@pytest.mark.skipif(not MARKS.exists(), reason="the system's mark cannot be set back here")
def test_what_is_held_apart_does_not_count() -> None:
    memory = PeakMemory()
    with memory.apart():
        pass
    before = memory.mib()["host"]
    with memory.apart():
        many = [torch.ones(1 << 12) for _ in range(LARGE << 6)]  # 16 KiB each
        del many
    assert memory.mib()["host"] < before + LARGE / 2
    one = torch.ones(LARGE << 18)
    del one
    assert memory.mib()["host"] > before + LARGE / 2
