"""Where no memory is left for the guard it steps aside: that is no fault of its own, and nobody is to report it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard
from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import is_out_of_memory

OF_THE_HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError(OF_THE_HOST), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError(), False),
    ],
)
def test_what_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    is_of_memory: bool,
) -> None:
    def raises(*args: object, **kwargs: object) -> None:
        raise error

    assert is_out_of_memory(error) == is_of_memory
    monkeypatch.setattr(FlightRecorder, "enter_root", raises)
    with ampguard.watch(out=tmp_path / "run"):
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    said = capsys.readouterr().err
    assert ("no memory is left" in said) == is_of_memory
    assert ("a fault of its own" in said) != is_of_memory
    assert ("Please report it" in said) != is_of_memory
    assert "the guard is off from here on" in said
