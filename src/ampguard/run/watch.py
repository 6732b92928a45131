"""`with ampguard.watch():`, the same guard inside a script or a notebook."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ampguard.run.folder import name_of_program
from ampguard.run.session import RunOptions, Session, guarding

__all__ = ["guarding", "watch"]


@contextlib.contextmanager
def watch(
    *,
    out: str | Path | None = None,
    steps: int | None = None,
    max_incidents: int = 5,
    on_nonfinite: Literal["observe", "stop", "skip", "heal"] = "observe",
) -> Iterator[Session]:
    """Guard the training inside the block. The options are those of `ampguard run`; yields the session.

    After the block `session.report` holds the incidents. An exception of the block passes through unchanged; reaching
    `steps`, `on_nonfinite="stop"`, or too many steps held off in a row, ends the block early without one. A block that
    is entered by hand and never left (a notebook's) ends with the process.

    Raises UsageError or RunFolderError, before the block runs, where the run folder cannot be made.
    """
    from ampguard.errors import StopRun

    session = Session(
        RunOptions(Path(out) if out is not None else None, steps, max_incidents, on_nonfinite, name_of_program())
    )
    session.start()

    def at_exit() -> None:
        session.finish(getattr(sys, "last_value", None))  # what ended the script, where an exception did

    atexit.register(at_exit)  # a guard cannot end where Python takes itself apart: no thread is there any more
    try:
        yield session
    except StopRun as stop:
        session.finish(stop)
    except BaseException as error:
        session.finish(error)
        raise
    else:
        session.finish()
    finally:
        atexit.unregister(at_exit)
