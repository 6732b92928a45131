"""What is known of a run at a step, or at a failure: what the rules over many steps are given."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.events.lineage import events_behind
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.record import GlueOp, Line, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.hand_updates import HandUpdates
from ampguard.capture.sampling.keeper import StretchKeeper
from ampguard.capture.sampling.rates import rate_of_optimizer
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.trajectory import Trajectory
from ampguard.diagnose.dynamics.turns import diverging
from ampguard.incident import Incident
from ampguard.replay.names import parameter_name
from ampguard.replay.stretch import StretchReplay

MAX_STRETCH_REPLAYS = 3
"""Failures for which the steps before are run again: each may take as long as many steps."""


class Situations:
    """Puts it together."""

    def __init__(
        self,
        recorder: FlightRecorder,
        trajectory: Trajectory,
        keeper: StretchKeeper,
        hand_updates: HandUpdates,
        rank: int,
        on_new: Callable[[Optimizer], None],
    ) -> None:
        """`on_new`: told of an optimizer that had not been seen."""
        self._recorder = recorder
        self._trajectory = trajectory
        self._keeper = keeper
        self._hand_updates = hand_updates
        self._rank = rank
        self._on_new = on_new
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._lines: dict[int, Line] = {}
        self._names: dict[int, tuple[weakref.ref[Tensor], str | None]] = {}
        self._replays_left = MAX_STRETCH_REPLAYS

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer steps for the first time, or in a step that is looked at."""
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers = [ref for ref in self._optimizers if ref() is not None]
            self._optimizers.append(weakref.ref(optimizer))
            self._on_new(optimizer)
        if id(optimizer) not in self._lines:
            line = script_line(sys._getframe(1))
            if line is not None:
                self._lines[id(optimizer)] = line

    def at(self, step: int, known: Incident | None) -> Situation:
        """At a step. `known`: what was told of the steps that the scaler is skipping."""
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        situation = Situation(self._trajectory, step, self._rank, None, known, optimizers, self._lines, self._name_of)
        situation.by_hand = self._hand_updates.last
        return situation

    def of(self, incident: Incident, known: Incident | None) -> Situation:
        """At a failure, with the steps that led to it where they were kept."""
        situation = self.at(incident.step, known)
        situation.failure = incident
        running = [x for x in self._recorder.judge.losses if type(x) is float and math.isfinite(x)]
        situation.running = [(incident.step, loss) for loss in running]
        stretch = self._keeper.with_running_step() if self._replays_left else None
        self._replays_left -= stretch is not None
        whose = diverging(situation, len(self._keeper.turns))
        if whose is not None:
            owners = self._owners_behind(incident)
            situation.rests_on_others = bool(owners) and not any(o is whose for o in owners)
        situation.whose = whose
        if whose is not None:
            situation.trajectory = self._trajectory.of(whose)
        situation.stretch = StretchReplay(stretch, self._recorder, whose) if stretch is not None else None
        return situation

    def _owners_behind(self, incident: Incident) -> list[Optimizer]:
        """Of a failure outside modules, the optimizers of the weights from whose results it was computed, where that is known.
        A policy's loss may fail by a weight that critics have given each sample."""
        record, place = self._recorder.log.record, incident.location
        if place is None or incident.module is not None:
            return []
        glue = [event for event in record.events if isinstance(event, GlueOp) and event.line is not None]
        at = {
            e.index for e in glue if e.line is not None and e.line.number == place.line and e.line.location() == place
        }
        makers = at & {e.index for e in glue if _is_called(e, incident.op)} or at
        behind = {index for event in makers for index in events_behind(record, event)}
        roots = [e for index in behind if isinstance(e := record.event(index), RootCall) and not e.is_function]
        memory = {compat.storage_key(p) for root in roots for p in compat.all_parameters(root.module)} - {0}
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        return [
            o
            for o in optimizers
            if any(compat.storage_key(p) in memory for group in o.param_groups for p in group["params"])
        ]

    def _name_of(self, parameter: Tensor) -> str | None:
        """A parameter's name, looked up once: where no recent call tells it, every object has to be asked."""
        known = self._names.get(id(parameter))
        if known is None or known[0]() is not parameter:
            roots = {id(e.module): e for e in self._recorder.log.record.events if isinstance(e, RootCall)}
            name = parameter_name(parameter, [(e.module, e.prefix) for e in roots.values()])
            known = self._names[id(parameter)] = (weakref.ref(parameter), name)
        return known[1]

    def rate(self) -> float:
        """The highest learning rate in use."""
        rates = [rate_of_optimizer(optimizer) for ref in self._optimizers if (optimizer := ref()) is not None]
        return max(rates, default=0.0)


def _is_called(event: GlueOp, op: str | None) -> bool:
    """Whether an operator, or a call that is kept in its place (`torch.exp`), goes by this name ("aten.exp.default")."""
    name = getattr(getattr(event.func, "overloadpacket", event.func), "__name__", "")
    return op is not None and name.strip("_") == op.removeprefix("aten.").partition(".")[0].strip("_")
