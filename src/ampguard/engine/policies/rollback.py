"""rollback: go back to the last good state and leave the batch out.

A skipped step leaves parameters alone, but not what the forward pass itself has changed (running statistics), nor the
steps before it that led there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from ampguard import compat
from ampguard.engine.casting import map_tensors
from ampguard.engine.checkpoint import files
from ampguard.engine.options import is_count
from ampguard.engine.policies.base import BadStep, Policy, logger
from ampguard.errors import PoisonedStateError, SetupError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp


class Rollback(Policy):
    """Keeps a snapshot of the state every `every` good steps: in memory, or in `folder` where one is given.

    Several ranks keep theirs, each its own, after the same step or not at all, and go back together. The random streams
    are not set back: the same noise would lead to the same failure.
    """

    name = "rollback"
    waits = True

    def __init__(self, every: int = 100, folder: str | os.PathLike[str] | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, (int, float)) or not is_count(every):
            raise SetupError(
                f"Rollback(every={every!r}): a snapshot is taken every so many steps, so a whole number of at least 1"
            )
        if not isinstance(folder, (str, os.PathLike, NoneType)):
            raise SetupError(
                f"Rollback(folder={folder!r}): a folder is named by a path, not by a {type(folder).__name__}"
            )
        self.every = every
        self.path = Path(folder) / "last-good.pt" if folder is not None else None
        self.rollbacks = 0
        self._snapshot: Mapping[str, Any] | None = None
        self._taken_at: int | None = None
        self._taken_before = 0
        """The number, as messages count (skipped ones too), of the step that came after the snapshot."""

    def prepare(self, amp: Amp) -> None:
        if self.path is None:
            return
        _refuse_unwritable(self.path.parent)
        if compat.several_ranks():
            self.path = self.path.with_name(f"last-good-rank-{torch.distributed.get_rank()}.pt")

    def begin(self, amp: Amp) -> None:
        self._take(amp, amp.steps, bool)  # perhaps this rank alone evaluates first

    def saved(self, amp: Amp, state: Mapping[str, Any]) -> None:
        """What a resumed run would go back to, this one does as well. Of several ranks perhaps one alone saves."""
        if self._taken_at is not None and not compat.several_ranks():
            self._took(state, amp, amp.steps)

    def loaded(self, amp: Amp) -> None:
        if self._taken_at is not None:  # of the training that was before; `begin` has still to take one else
            self.begin(amp)

    def on_good_step(self, amp: Amp, step: int) -> None:
        if self._taken_at is None or step - self._taken_at >= self.every:
            self._take(amp, step, amp.ranks.all_agree)

    def _take(self, amp: Amp, step: int, all_agree: Callable[[bool], bool]) -> None:
        why, state = "that of another rank holds NaN or Inf", None
        try:
            state = amp.present_state()
        except PoisonedStateError as error:
            why = str(error)
        if not all_agree(state is not None) or state is None:
            logger.warning("no snapshot is taken before step %d. %s", amp.verdicts.attempts, why)
            return
        self._took(state, amp, step)

    def _took(self, state: Mapping[str, Any], amp: Amp, step: int) -> None:
        self._keep(state)
        self._taken_at, self._taken_before = step, amp.verdicts.attempts

    def on_bad_step(self, amp: Amp, bad: BadStep) -> None:
        super().on_bad_step(amp, bad)
        if bad.is_settling:
            return
        if not amp.ranks.all_agree(self._taken_at is not None):
            logger.warning("%s: skipped; there is no good state yet to go back to", bad)
            return
        amp.roll_back(self._last())
        self.rollbacks += 1
        self._taken_at = amp.steps
        logger.warning("%s: back to the state before step %d, the batch is left out", bad, self._taken_before)

    def _keep(self, state: Mapping[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # perhaps it was removed
            files.save(dict(state), self.path)
        else:
            self._snapshot = map_tensors(lambda t: t.detach().to("cpu", copy=True), state)

    def _last(self) -> Mapping[str, Any]:
        if self.path is not None:
            return files.load(self.path)  # type: ignore[no-any-return]
        assert self._snapshot is not None
        return self._snapshot


def _refuse_unwritable(folder: Path) -> None:
    """Raise SetupError where no file can be made: found out now, not at the first snapshot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SetupError(
            f"Rollback(folder={os.fspath(folder)!r}): no snapshot can be written there ({error.strerror or error})\n"
            "  do    name a folder that can be written to, or leave it out: snapshots are kept in memory then"
        ) from error
