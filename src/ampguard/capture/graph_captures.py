"""CUDA graphs: while one is captured the guard is silent, and what a replay does is counted to the running step.

During a capture nothing runs on the device, and nothing may be asked of it: `.item()`, an event, pinned memory or the
state of a random generator ends the capture with an error. So from the beginning to the end of each capture, in every
thread, no probe is told of anything (`recorder.active`) and no barrier lets anything of ours run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ampguard.capture.barrier import captures_underway

if TYPE_CHECKING:
    from ampguard.capture.recorder import FlightRecorder


class GraphCaptures:
    """The CUDA graphs of one recorder."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._silenced: set[int] = set()
        """Those that are being captured; with them, calls that capture some by themselves."""
        self.before_silence: list[Callable[[], None]] = []
        """Who wants to close something before a capture begins."""

    def begin(self, graph: Any) -> None:
        """A capture begins: from here on the guard is silent."""
        recorder = self._recorder
        if not (recorder.active or self._silenced):
            return
        if not self._silenced:
            recorder.barrier.call(self._before_silence)
        self._silenced.add(id(graph))
        captures_underway.add(id(graph))
        recorder.active = False

    def _before_silence(self) -> None:
        for close in self.before_silence:
            close()
        self._recorder.tape.leave()
        if self._recorder.before_training.is_on:
            self._recorder.before_training.end()

    def end(self, graph: Any, is_captured: bool) -> None:
        """It has ended; with the last one, the silence."""
        if id(graph) not in self._silenced:
            return
        self._silenced.discard(id(graph))
        captures_underway.discard(id(graph))
        if not self._silenced:
            self._recorder.active = not self._recorder.barrier.tripped

    def give_up(self) -> None:
        """The guard is taken out, perhaps in the middle of a capture."""
        captures_underway.difference_update(self._silenced)
        self._silenced.clear()

    def before_replay(self, graph: Any) -> None:
        """The script is about to replay a graph."""

    def after_replay(self, graph: Any) -> None:
        """It has."""
