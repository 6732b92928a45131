"""A recorded step, run again for the script itself: on its own parameters, through autograd, with the fixes in force.

The replay that verifies a fix throws its results away. Here they become the step's: what `torch.autograd` is then given
is the loss that the script would have computed had the fix been in its code, and its gradients are right.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.record import BackwardCall, BadResult, Event, GlueOp, Line, Modes, Ref, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.engine.casting import is_castable
from ampguard.errors import ReplayError
from ampguard.replay.arguments import Values, fresh_copy_needed
from ampguard.replay.backward import Gradients
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import set_streams
from ampguard.replay.variants import Variant, converted, promoted
from ampguard.run.overrides.lines import LinesInFloat32
from ampguard.run.overrides.plan import Plan


class LiveStep(Replayer):
    """Runs what some results were made from. Modules that a fix has changed run as they are now."""

    def __init__(
        self,
        targets: Sequence[Ref],
        recorder: FlightRecorder,
        plan: Plan,
        lines: LinesInFloat32,
        given: Mapping[Ref, Tensor] | None = None,
    ) -> None:
        """`given`: results that are taken as they are. Raises ReplayError where the step cannot be run again."""
        bad = BadResult("loss", "train", recorder.steps.count, recorder.log.slice(), tuple(targets))
        super().__init__(bad, recorder, given=given)
        self.keeps_graph = True
        self.check()  # of derivatives too
        if any(isinstance(event, BackwardCall) for event in self.events):
            raise ReplayError("the step differentiates in the middle of its loss")
        self._plan = plan
        self._lines = lines
        self._values: Values | None = None
        self._cuts_graph = False

    def compute(self) -> Mapping[Ref, Tensor]:
        """Every result of the step, by what made it. Raises what the step raises."""
        outcome = self.run(Variant(), traced=False)
        assert self._values is not None
        self._cuts_graph = not outcome.is_exact
        return self._values.made

    @property
    def reaches_the_leaves(self) -> bool:
        """Whether gradients of the results arrive where the script's own would: in its parameters."""
        values = self._values
        if values is None or self._cuts_graph or values.is_approximate:
            return False
        return not any(t.requires_grad and t.is_leaf for t in values.stand_ins.values())

    def _outcome(self, values: Values, *rest: Any) -> Any:
        self._values = values
        return super()._outcome(values, *rest)

    def _run_event(self, event: Event, values: Values, variant: Variant, gradients: Gradients) -> list[Tensor]:
        if isinstance(event, RootCall):
            event = dataclasses.replace(event, modes=self._modes_of(event.modes))
            with self._lines.within_modules():
                return super()._run_event(event, values, variant, gradients)
        return super()._run_event(event, values, variant, gradients)

    def _modes_of(self, modes: Modes) -> Modes:
        """The autocast that a call had, in the precision that holds now."""
        if not self._plan.is_set:
            return modes
        wanted = self._plan.dtype
        autocast = tuple(
            (d, on and wanted is not None, wanted or dtype if on else dtype) for d, on, dtype in modes.autocast
        )
        return dataclasses.replace(modes, autocast=autocast)

    def _run_glue(self, op: GlueOp, values: Values) -> list[Tensor]:
        """An operator outside every module, at autograd's level: casts are part of the graph."""
        name = compat.schema_of(op.func).name.split("::")[-1]
        with torch.set_grad_enabled(op.grad):
            args, kwargs = values.for_operator(op.args), values.for_operator(op.kwargs)
            dtype = self._dtype_at(op.line)
            if dtype is not None:
                args, kwargs = converted(op.func, args, kwargs, dtype)
            else:
                args = promoted(args, name)
            for position in self._recorder.tape.overwritten(op.func):
                if fresh_copy_needed(op.args[position]):
                    copied = map_tensors(args[position], lambda t: t.clone())
                    args = (*args[:position], copied, *args[position + 1 :])
            if op.rng is not None:
                set_streams(op.rng)
            output = op.func(*args, **kwargs)
        if isinstance(output, Tensor):
            return [output]
        return [t for t in output if isinstance(t, Tensor)] if isinstance(output, (tuple, list)) else []

    def _dtype_at(self, line: Line | None) -> torch.dtype | None:
        """What low-precision operands become; None: they stay what they are."""
        if line is not None and self._lines.holds(os.path.basename(line.code.co_filename), line.number):
            return torch.float32
        if self._plan.is_set:
            return self._plan.dtype or torch.float32
        return None


def has_low_weights(step: LiveStep) -> bool:
    """Whether weights are float16 or bfloat16 themselves."""
    modules: list[nn.Module] = [event.module for event in step.events if isinstance(event, RootCall)]
    return any(is_castable(p) and p.dtype != torch.float32 for module in modules for p in compat.all_parameters(module))
