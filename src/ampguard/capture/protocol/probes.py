"""The probes of the protocol: the calls of a training loop, wrapped while the guard is on and put back after it.

They lie on top of the recorder's own probes. Inside a root module, a backward pass or an investigation
(`recorder.paused`) nothing is noted. A healthy step takes the shortest way through each wrapper.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.protocol.functional import FunctionalTraining
from ampguard.capture.protocol.listener import BreachListener
from ampguard.capture.protocol.probing.autocast import AutocastProbe
from ampguard.capture.protocol.probing.backward import BackwardProbe
from ampguard.capture.protocol.probing.hooks import HookProbe
from ampguard.capture.protocol.probing.norms import NormProbe
from ampguard.capture.protocol.probing.optimizers import OptimizerProbe
from ampguard.capture.protocol.probing.scaler_steps import ScalerStepProbe
from ampguard.capture.protocol.probing.scaling import ScalingProbe
from ampguard.capture.protocol.probing.schedulers import SchedulerProbe
from ampguard.capture.protocol.probing.witness import Witness
from ampguard.capture.recorder import FlightRecorder

PROBES = (
    BackwardProbe,
    ScalingProbe,
    ScalerStepProbe,
    OptimizerProbe,
    NormProbe,
    SchedulerProbe,
    AutocastProbe,
    HookProbe,
)


class CallProbes:
    """All protocol probes of one recorder."""

    def __init__(self, recorder: FlightRecorder, listener: BreachListener) -> None:
        self._witness = Witness(recorder, listener)
        self._functional = FunctionalTraining(recorder, recorder.barrier.call)
        self.moves = self._witness.moves
        self.models = self._witness.models
        self.scans = self._witness.scans
        self.habits = self._witness.habits

    def install(self) -> None:
        """Begin to observe; after the recorder's probes."""
        witness, habits = self._witness, self.habits
        captures = witness.recorder.captures
        captures.before_silence += [witness.close_window, witness.moves.let_go]
        captures.on_training = witness.moves.lose_track
        captures.on_scaler = witness.moves.scales_in_graph
        for probe in PROBES:
            probe(witness).install()
        place = compat.functional_gradient()
        if place is not None:
            witness.patches.replace(*place, self._functional.watch)
        slope = compat.functional_slope()
        if slope is not None:
            witness.patches.replace(*slope, self._functional.watch_slope)
        saving = witness.noting(before=lambda frame, obj=None, file=None: habits.saving(obj, file, frame))
        witness.patches.replace(torch, "save", lambda original: _by_position(saving(original), ("obj", "f")))
        witness.patches.replace(pickle, "dump", lambda original: _by_position(saving(original), ("obj", "file")))

    def forward_begins(self, is_end: bool = False) -> None:
        """A root module is about to be called, or the run ends: was the step of the last gradients passed over?"""
        witness, dropped = self._witness, self._witness.dropped
        if dropped.waiting >= dropped.usual and get_ident() == witness.training.ident:
            witness.guarded(dropped.look, None, None, is_end)

    def run_ends(self) -> None:
        """The script is over: what is only suspected is looked at once more."""
        self._witness.guarded(self._witness.never_held.run_ends)

    def undo(self) -> None:
        """Put back every patched attribute."""
        witness = self._witness
        witness.guarded(witness.window.close)
        witness.window.put_back()  # (also after a fault, when nothing that is guarded is called any more)
        witness.patches.undo()
        for handle in witness.handles:
            handle.remove()
        witness.handles.clear()


def _by_position(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The same, called with its first arguments by their places also where a script names them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = [kwargs.pop(name) for name in names[len(args) :] if name in kwargs]
        return function(*args, *named, **kwargs)

    return call
