"""Where the guard listens in: PyTorch's own functions, wrapped while it is on and put back after it.

Each probe installs, observes, undoes. After `undo()` every patched attribute is the original object again, unless
somebody else has replaced it since: then theirs stays, and ours, still underneath, only passes calls on.
"""

from __future__ import annotations

import contextlib
import os

from ampguard import compat
from ampguard.capture.patches import Patches
from ampguard.capture.probing.clipping import ClippingProbe
from ampguard.capture.probing.collectives import CollectiveProbe
from ampguard.capture.probing.compilers import CompilerProbe
from ampguard.capture.probing.derivatives import DerivativeProbe
from ampguard.capture.probing.device_graphs import DeviceGraphProbe
from ampguard.capture.probing.edges import EdgeProbe
from ampguard.capture.probing.forward_mode import ForwardModeProbe
from ampguard.capture.probing.functions import FunctionProbe
from ampguard.capture.probing.loading import LoadingProbe
from ampguard.capture.probing.modules import ModuleProbe
from ampguard.capture.probing.swapping import SwappingProbe
from ampguard.capture.probing.tensor_classes import TensorClassProbe
from ampguard.capture.probing.updates import UpdateProbe
from ampguard.capture.probing.warnings_shown import WarningProbe
from ampguard.capture.recorder import FlightRecorder

PROBES = (
    ModuleProbe,
    DerivativeProbe,
    FunctionProbe,
    ForwardModeProbe,
    CompilerProbe,
    ClippingProbe,
    EdgeProbe,
    CollectiveProbe,
    LoadingProbe,
    SwappingProbe,
    WarningProbe,
    DeviceGraphProbe,
    TensorClassProbe,
)


class Probes:
    """All probes of one recorder."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._updates = UpdateProbe(recorder, self._patches)

    def install(self) -> None:
        """Begin to observe."""
        for probe in PROBES:
            probe(self._recorder, self._patches).install()
        self._updates.install()
        self._recorder.has_compiled_before = compat.may_compile()
        self._recorder.active = True
        self._recorder.before_training.begin()
        os.register_at_fork(after_in_child=self._in_child)

    def undo(self) -> None:
        """Put back every patched attribute and take the tape off the stack."""
        self._recorder.captures.give_up()
        self._recorder.active = False
        self._patches.undo()
        for handle in self._updates.handles:
            handle.remove()
        self._updates.handles.clear()
        with contextlib.suppress(Exception):  # not through the barrier: after a fault nothing comes through it
            self._recorder.tape.leave()
            self._recorder.before_training.end()
            self._recorder.left_behind.leave()
        with contextlib.suppress(Exception):
            compat.forget_functions()

    def _in_child(self) -> None:
        """A forked process (a DataLoader worker) is not the guarded one."""
        self._recorder.active = False
        self._recorder.tape.abandon()
        self._recorder.before_training.abandon()
