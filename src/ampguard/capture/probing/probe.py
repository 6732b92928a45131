"""What every probe of the recorder is."""

from __future__ import annotations

from ampguard.capture.patches import Patches
from ampguard.capture.recorder import FlightRecorder


class Probe:
    """Listens in on one kind of call and tells the recorder, from when it is installed until the patches are undone."""

    def __init__(self, recorder: FlightRecorder, patches: Patches) -> None:
        self._recorder = recorder
        self._patches = patches

    def install(self) -> None:
        """Put wrappers in the place of PyTorch's functions."""
        raise NotImplementedError
