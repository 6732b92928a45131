"""The guard's report, from inside a framework's callback: while it runs, or of a guard of the callback's own."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

logger = logging.getLogger("ampguard")


class Reporting:
    """One training's report. With `watch`, a guard is begun where none is on, and ended with the training."""

    def __init__(self, watch: bool) -> None:
        self.watches = watch
        self._own: contextlib.AbstractContextManager[Any] | None = None
        self._session: Any = None

    @property
    def is_guarded(self) -> bool:
        """Whether a guard is on in this training."""
        return self._session is not None

    def begin(self, folder: str | Path | None) -> None:
        """A training begins, whose logs go to `folder`."""
        if self._own is not None:  # the one before has failed, and nobody said so
            self.end()
        self._session = _guarding()
        if self._session is None and self.watches:
            from ampguard.run.watch import watch

            is_alone = os.environ.get("WORLD_SIZE", "1") == "1"  # several ranks agree on a folder by themselves
            out = _free(Path(folder) / "ampguard") if folder is not None and is_alone else None
            self._own = watch(out=out)
            self._session = self._own.__enter__()

    def end(self, error: BaseException | None = None) -> Path | None:
        """The training ends: write what is known by now. Where the report is; None without a guard."""
        session, own = self._session, self._own
        self._session = self._own = None
        if session is None:
            return None
        if own is None:
            return _written_so_far(session)
        with contextlib.suppress(BaseException) if error is not None else contextlib.nullcontext():
            own.__exit__(type(error) if error is not None else None, error, getattr(error, "__traceback__", None))
        written: Path | None = session.report_path
        return written


def _guarding() -> Any:
    """The guard that is on; asks nothing of a process in which none was begun."""
    guarding = getattr(sys.modules.get("ampguard.run.session"), "guarding", None)
    return guarding() if guarding is not None else None


def _written_so_far(session: Any) -> Path | None:
    """The guard goes on, and writes the whole report when the run ends."""
    try:
        path: Path | None = session.report_now()
    except Exception as error:  # a report that cannot be written yet must not end a training
        logger.info("the guard's report will be written at the end of the run (%s)", error)
        return None
    return path


def _free(folder: Path) -> Path:
    """A run folder is never used twice."""
    number = 1
    while (path := folder if number == 1 else folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return path
