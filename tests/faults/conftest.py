"""Faults are put into every room of ampguard, and the training must not notice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

sys.path.append(str(Path(__file__).parents[1] / "capture"))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_failure_spoils_no_other_test() -> Iterator[None]:
    """A test that finds the guard still installed says so; the next one starts from a clean PyTorch all the same."""
    from test_probes import PATCHED

    before = [vars(owner)[name] for owner, name in PATCHED]
    yield
    for (owner, name), original in zip(PATCHED, before, strict=True):
        setattr(owner, name, original)
    while (mode := _get_current_dispatch_mode()) is not None:
        mode.__exit__(None, None, None)
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
