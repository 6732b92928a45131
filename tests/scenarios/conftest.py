"""Scenarios run in this process, on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_stays_on_the_stack() -> Iterator[None]:
    """The tape is a dispatch mode: one that a run leaves behind slows down everything after it."""
    yield
    left = []
    while (mode := _get_current_dispatch_mode()) is not None:
        left.append(mode)
        mode.__exit__(None, None, None)
    assert left == []
