"""Failures that cannot be run again: the steps that follow are traced operator by operator while they run."""

from __future__ import annotations

from ampguard.capture.record import BadResult, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.replay.live import LiveTracing

ARMED_STEPS = 50


class Arming:
    """What was not explained yet, and how long the recorder traces for another of its kind."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.unexplained: list[tuple[BadResult, str]] = []
        """Failures of which nothing was found out, each with the reason."""
        self.saw_bad_weights = False
        """Whether the watching ended because weights were bad."""
        self._recorder = recorder
        self.until: int | None = None

    @property
    def live(self) -> LiveTracing | None:
        """The tracing in use, where it has seen something."""
        live = self._recorder.live
        return live if isinstance(live, LiveTracing) and live.trace.ops else None

    def keep(self, bad: BadResult, reason: str) -> None:
        """One failure of each mode is kept, to be told at the end if its like never comes back."""
        if not any(earlier.mode == bad.mode for earlier, _ in self.unexplained):
            self.unexplained.append((bad, reason))

    def arm(self, bad: BadResult, reason: str) -> None:
        """Trace the steps to come."""
        self.until = bad.step + ARMED_STEPS
        modules = [e.module for e in bad.record.events if isinstance(e, RootCall)]
        self._recorder.live = LiveTracing(reason, modules, self._recorder.barrier)

    def caught(self, bad: BadResult) -> int:
        """A failure was traced while it ran: those of its mode that armed the tracing were this one. How many they are."""
        same = [earlier for earlier, _ in self.unexplained if earlier.mode == bad.mode]
        self.unexplained = [kept for kept in self.unexplained if kept[0].mode != bad.mode]
        self.disarm()
        return len(same)

    def forget_gradients(self) -> None:
        """What the bad gradients did is told by what they made of the weights."""
        self.unexplained = [kept for kept in self.unexplained if kept[0].kind != "gradient"]

    def weights_are_bad(self) -> None:
        """A failure that nobody could explain has spoiled the weights: no later step can show where it began."""
        self.saw_bad_weights = True
        self.disarm()

    def tick(self, step: int) -> None:
        """An iteration ended."""
        if self.until is not None and step > self.until:
            self.disarm()

    def disarm(self) -> None:
        self.until = None
        self._recorder.live = None
