"""`ampguard compare --eval`: the script's own evaluation, made again under other precisions.

What differs between two trainings is the weights as well. So one training runs, in float32, and each call that it makes
without gradients is made again in each precision: the same weights, inputs and random numbers. The script gets what it
would have got, and whatever the further calls change is put back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from ampguard import compat
from ampguard.capture.record import RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.replay.names import module_names
from ampguard.replay.sandbox import ModuleSandbox, neutral_thread, quiet, set_streams
from ampguard.report.differences import Difference
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.module_outputs import ModuleOutputs, relative_error
from ampguard.run.overrides.not_borne import NotBorne
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.regions import Regions, device_of

CALLS_PER_STEP = 4
"""Of one model, between two optimizer steps: an evaluation's first batches."""

MOST_CALLS = 400


@dataclass(frozen=True, slots=True)
class Given:
    """Copies of a call's arguments, before it."""

    module: nn.Module
    args: Any
    kwargs: Any


class Evaluations:
    """Makes evaluation calls again and keeps the worst of what each module's output becomes."""

    def __init__(
        self,
        precisions: Sequence[str],
        plan: Plan,
        regions: Regions,
        not_borne: NotBorne,
        recorder: FlightRecorder,
        ledger: Ledger,
    ) -> None:
        self._precisions = tuple(precisions)
        self._plan = plan
        self._regions = regions
        self._not_borne = not_borne
        self._recorder = recorder
        self._ledger = ledger
        self._is_busy = False
        self._calls = 0
        self._of_step: tuple[int, dict[int, int]] = (-1, {})
        self._worst: dict[tuple[str, str], Difference] = {}

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Given | None:
        """A module is about to be called from outside. None where that is no evaluation, or enough of it was seen."""
        is_training = torch.is_grad_enabled() and getattr(module, "training", False)
        recorder = self._recorder
        is_ours = self._is_busy or recorder.paused or not recorder.active  # an investigation runs the model again
        if is_ours or is_training or self._calls >= MOST_CALLS:
            return None
        step = recorder.steps.count
        if self._of_step[0] != step:
            self._of_step = (step, {})
        seen = self._of_step[1]
        seen[id(module)] = seen.get(id(module), 0) + 1
        if seen[id(module)] > CALLS_PER_STEP:
            return None
        try:
            with torch.no_grad():
                return Given(module, *copy.deepcopy((args, kwargs)))
        except Exception as why:  # a graph hangs on it, a generator, an open file
            self._ledger.failed(f"an argument of {type(module).__name__} cannot be copied for a second call: {why}")
            return None

    def after(self, given: Given) -> None:
        """The call has returned."""
        events = self._recorder.log.record.events
        root = next((e for e in reversed(events) if isinstance(e, RootCall)), None)
        if root is None or root.module is not given.module:
            self._ledger.failed(f"a call of {type(given.module).__name__} was not recorded and is not compared")
            return
        self._is_busy, (paused, self._recorder.paused) = True, (self._recorder.paused, True)
        mode = self._plan.mode
        try:
            with neutral_thread(), quiet(), compat.force_eager():
                self._compare(root, given)
        except Exception as why:  # the model's own code, run again
            self._ledger.failed(f"a call of {type(given.module).__name__} could not be made again: {why}")
        finally:
            self._plan.mode = mode
            self._is_busy, self._recorder.paused = False, paused

    def _compare(self, root: RootCall, given: Given) -> None:
        names = module_names(root.module, root.prefix)
        modules = {names[id(m)]: m for m in compat.all_modules(root.module) if id(m) in names}
        exact = self._call("fp32", root, given, modules)
        self._calls += 1
        for precision in self._precisions:
            found = self._call(precision, root, given, modules)
            for name, module in modules.items():
                self._keep(name, type(module).__name__, precision, found, exact)

    def _call(self, precision: str, root: RootCall, given: Given, modules: dict[str, nn.Module]) -> ModuleOutputs:
        self._plan.change(precision)
        args, kwargs = copy.deepcopy((given.args, given.kwargs))
        device = device_of(given.module, args, kwargs) or "cpu"
        sandbox = ModuleSandbox(root, given.module)

        def run(dtype: torch.dtype | None) -> ModuleOutputs:
            outputs = ModuleOutputs()
            set_streams(root.rng)
            with outputs.of(modules), self._regions.around(self._regions.make(device, dtype)):
                given.module(*args, **kwargs)
            return outputs

        sandbox.enter()
        try:
            found: ModuleOutputs = self._not_borne.call(
                given.module, lambda: run(self._plan.dtype), lambda: run(None), lambda: modules
            )
        finally:
            sandbox.leave()
        return found

    def _keep(self, name: str, kind: str, precision: str, found: ModuleOutputs, exact: ModuleOutputs) -> None:
        for one, other in zip(found.calls.get(name, ()), exact.calls.get(name, ()), strict=False):
            output, inputs = relative_error(one.outputs, other.outputs), relative_error(one.inputs, other.inputs)
            if output is None or not one.outputs:
                continue
            (error, lost), (input_error, input_lost) = output, inputs or (0.0, 0.0)
            step = self._recorder.steps.count
            new = Difference(name, kind, precision, error, input_error, lost, input_lost, step)
            old = self._worst.get((name, precision))
            if old is None or new.badness > old.badness:
                self._worst[name, precision] = new

    def as_dict(self) -> dict[str, Any]:
        """For the report: the worst first."""
        worst = sorted(self._worst.values(), key=lambda d: d.badness, reverse=True)
        return {
            "calls": self._calls,
            "precisions": list(self._precisions),
            "modules": [msgspec.structs.asdict(d) for d in worst],
        }
