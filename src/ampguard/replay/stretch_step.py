"""One step of a stretch that is run again: its events on copies of the weights, and the updates between and after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat, numerics
from ampguard.capture.events.operands import held_by, leaves
from ampguard.capture.raised import is_refused, refused_values
from ampguard.capture.record import BackwardCall, BadResult, Event, Ref, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.stretch import KeptStep, Update
from ampguard.errors import ChangedSinceError, ReplayError
from ampguard.replay.arguments import Values, is_replayable
from ampguard.replay.backward import Gradients
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import ModuleSandbox
from ampguard.replay.stretch_updates import Copies, Updates
from ampguard.replay.variants import Variant


class StepReplay(Replayer):
    """Runs one iteration of a stretch."""

    def __init__(
        self,
        step: KeptStep,
        recorder: FlightRecorder,
        copies: Copies,
        updates: Updates,
    ) -> None:
        self._only = updates.only
        self.own_loss: float | None = None
        """The sum of the losses that the optimizer in question answered; of those that none did, where it made no step."""
        self._turn = 0
        """Losses that the updates so far have answered."""
        self._step = step
        self._copies = copies
        self._updates = updates
        self._pending = list(step.updates)
        self._sums: dict[int, Tensor] = {}
        self._losses: list[float] = []
        self._is_finite = True
        self._values: Values | None = None
        self.skipped = 0
        self.updated = 0
        calls = [e for e in step.record.events if isinstance(e, BackwardCall) and not e.create_graph]
        targets = [Ref(call.index, 0) for call in calls] + ([step.target] if step.target is not None else [])
        kind: Any = "gradient" if calls else "loss"
        super().__init__(
            BadResult(kind, "train", step.number, step.record, tuple(targets), parameters=tuple(copies.originals)),
            recorder,
        )

    def check(self) -> None:
        """Raise ReplayError where what a step read is no longer what it was. The weights are: they are copies."""
        if not self.events:  # a running statistic was poisoned: no loss has been made yet, and no gradient
            raise ReplayError(f"step {self._step.number} failed before it had a loss that could be compared")
        for event in self.events:
            for held in held_by(event):
                if id(held.tensor) not in self._copies.parameters and not held.is_intact:
                    raise ChangedSinceError(f"a tensor that step {self._step.number} read was changed in place since")
            if isinstance(event, RootCall) and any(not is_replayable(v) for v in leaves((event.args, event.kwargs))):
                raise ReplayError("an argument of a module is used up by the call (a generator or an open file)")

    def carry_out(self) -> tuple[float | None, bool]:
        """Run the step and its updates. Returns the loss (unscaled), and whether its gradients are finite."""
        try:
            self.run(Variant(), traced=False)
        except Exception as error:
            if not (self._step.raises and refused_values(error)):
                raise
            return (sum(self._losses) if self._losses else None), False
        for update in self._pending:
            self._apply(update)
        values = self._values
        if values is not None:
            handed_on = {ref: made.detach() for ref, made in values.made.items() if ref in self._copies.handed_on}
            self._copies.made.update(handed_on)
        if self._step.target is not None:
            if values is None or self._step.target not in values.made:
                raise ReplayError("the loss of the step that failed was not made by recorded operators")
            failed = values.made[self._step.target].detach()
            if failed.numel() == 1:
                self._losses.append(float(failed) / (self._step.target_scale or 1.0))
            else:  # the script raised over it before it made a loss
                self._is_finite = self._is_finite and not is_refused(failed)
        if self._only is not None and all(update.optimizer != self._only for update in self._step.updates):
            self._answered()
        if self._sums:  # no update used them
            self._is_finite = self._is_finite and all(numerics.is_finite(g) for g in self._sums.values())
        return (sum(self._losses) if self._losses else None), self._is_finite

    # --- what a replay of one step alone does not need ------------------------------------------------------------------

    def _run_event(self, event: Event, values: Values, variant: Variant, gradients: Gradients) -> list[Tensor]:
        if self._values is None:
            self._values = values
            values.stand_ins.update(self._copies.parameters)
            values.replaced |= {key: copy for key, copy in self._copies.parameters.items()}  # noqa: C416
            values.made.update(self._copies.made)
        while self._pending and self._pending[0].before <= event.index:
            self._sandboxes.pop_all().close()  # they would put back what the update changes
            self._apply(self._pending.pop(0))
        if not isinstance(event, BackwardCall):
            outputs = super()._run_event(event, values, variant, gradients)
            if isinstance(event, RootCall):
                self._take_buffers(event)
            return outputs
        scales = self._own_scales(values.for_backward(event.args)[0])
        mine = Gradients(self._copies.originals)
        outputs = super()._run_event(event, values, variant, mine)
        if not event.create_graph:
            losses = values.for_backward(event.args)[0]
            found = [
                float(loss.detach()) / scale for loss, scale in zip(losses, scales, strict=True) if loss.numel() == 1
            ]
            self._losses += found
        for (_, gradient), owner in zip(mine.results(), mine.owners(), strict=True):
            before = self._sums.get(id(owner))
            self._sums[id(owner)] = gradient if before is None else before + gradient
        return outputs

    def _own_scales(self, losses: Sequence[Tensor]) -> list[float]:
        """By which scale each loss is multiplied: a scaler's; the graph tells of one of the script's own, before it is used."""
        if self._step.scale is not None:
            return [self._step.scale] * len(losses)
        return [self._recorder.judge.own_scale.of_replayed(loss) for loss in losses]

    def _swap_state(self, sandbox: ModuleSandbox, module: nn.Module, variant: Variant, values: Values) -> None:
        """Give the module the copied parameters, and the buffers as the last step left them."""
        copies = self._copies
        for owner in compat.all_modules(module):
            if isinstance(owner, torch.jit.ScriptModule):
                raise ReplayError("the weights of a scripted module cannot be replaced")
            for name, parameter in list(compat.parameters_of(owner).items()):
                if parameter is not None and id(parameter) in copies.parameters:
                    sandbox.swap_parameter(owner, name, copies.parameters[id(parameter)])
            self._swap_lists(owner)
            buffers = compat.buffers_of(owner)
            for name in list(buffers):
                carried = copies.buffers.get((id(buffers), name))
                if carried is not None:
                    sandbox.swap_buffer(owner, name, carried.clone())

    def _swap_lists(self, owner: nn.Module) -> None:
        """Lists in which a module keeps its parameters beside their names (recurrent layers do)."""
        known = self._copies.parameters
        for name, value in list(vars(owner).items()):
            if type(value) is list and any(isinstance(item, Tensor) and id(item) in known for item in value):
                vars(owner)[name] = [known.get(id(item), item) for item in value]
                self._sandboxes.callback(vars(owner).__setitem__, name, value)

    def _take_buffers(self, root: RootCall) -> None:
        for saved in root.buffers:
            now = saved.owner.get(saved.name)
            if saved.copy is not None and now is not None:
                self._copies.buffers[(id(saved.owner), saved.name)] = now.detach().clone()

    # --- updates --------------------------------------------------------------------------------------------------------

    def _apply(self, update: Update) -> None:
        """One optimizer's step on the copies, with the gradients that were summed up for it."""
        if update.optimizer == self._only:
            self._answered()
        self._turn = len(self._losses)
        owned = self._copies.owned[update.optimizer]
        gradients = {id(p): g for p in owned if (g := self._sums.pop(id(p), None)) is not None}
        if self._updates.make(update, self._copies, gradients):
            self.updated += 1
            return
        self.skipped += 1
        if update.scale is None:
            self._is_finite = False

    def _answered(self) -> None:
        """The losses since the last update are those of the optimizer in question."""
        mine = self._losses[self._turn :]
        if mine:
            self.own_loss = (self.own_loss or 0.0) + sum(mine)
