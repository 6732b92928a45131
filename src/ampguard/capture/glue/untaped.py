"""Keeping the tape off what must not be taped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ampguard.capture.recorder import FlightRecorder


@contextlib.contextmanager
def without_tape(recorder: FlightRecorder, is_silent: bool = False) -> Iterator[None]:
    """The tape is off and stays off. `is_silent`: what is called meanwhile is nobody's business either."""
    tape = recorder.tape
    with contextlib.suppress(Exception):  # not through the barrier: after a fault nothing comes through it
        tape.leave()
    before = tape.is_barred, recorder.paused
    tape.is_barred, recorder.paused = True, recorder.paused or is_silent
    try:
        yield
    finally:
        tape.is_barred, recorder.paused = before
        recorder.barrier.call(recorder.resume_tape)
