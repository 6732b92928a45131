"""Training loops in this process, under a session with overrides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ampguard.errors import StopRun
from ampguard.run.overrides.asked import Overrides
from ampguard.run.session import RunOptions, Session

Overridden = Callable[..., contextlib.AbstractContextManager[Session]]


@pytest.fixture
def overridden(tmp_path: Path) -> Overridden:
    """`with overridden("fp16", force_fp32=("head",)) as session:`; a StopRun ends the block, as it ends a script."""

    @contextlib.contextmanager
    def enter(precision: str | None = None, force_fp32: tuple[str, ...] = (), **options: Any) -> Iterator[Session]:
        asked = Overrides(precision, force_fp32) if precision or force_fp32 else None
        session = Session(RunOptions(out=tmp_path / "run", overrides=asked, **options))
        session.start()
        error: BaseException | None = None
        try:
            yield session
        except StopRun as stop:
            error = stop
        finally:
            session.finish(error)
            session.ended_by = error  # type: ignore[attr-defined]

    return enter


@pytest.fixture(autouse=True)
def _fresh_random_numbers() -> None:
    torch.manual_seed(0)
