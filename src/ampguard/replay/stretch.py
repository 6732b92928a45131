"""Running a stretch of steps again, one after the other, on copies of the weights: as they ran, or with other updates.

Forward, glue and backward of each step are those of `rebuild`; between them a copy of the script's own optimizer steps
on the copied parameters. The inputs are those of the steps as they ran. What a script does to its gradients between
backward and the update is not recorded: where the norm of what the optimizer used is below that of the replayed ones,
they were clipped, and the replay clips at the same norm. Whether that tells the whole story, the losses show: as they
ran, the steps must give the losses that were seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat, numerics
from ampguard.capture.copies import distance, parameters_of
from ampguard.capture.operands import held_by, leaves
from ampguard.capture.raised import is_refused, refused_values
from ampguard.capture.record import BackwardCall, BadResult, Event, Ref, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.stretch import KeptStep, Stretch, Update
from ampguard.capture.weights import norm_of
from ampguard.errors import ChangedSinceError, ReplayError
from ampguard.replay.arguments import Values, is_replayable
from ampguard.replay.backward import Gradients
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import ModuleSandbox, neutral_thread
from ampguard.replay.variants import Variant

SAME_NORM = 1e-4
"""Relative difference between two norms that are the same but for rounding."""
SAME_LIMIT = 0.01
SECONDS = 5.0
STEPS_WORTH = 150.0
"""A stretch may be replayed for so many times the duration of a step, and at least `SECONDS`."""


@dataclass(frozen=True, slots=True)
class Change:
    """How the updates differ from those that were made.

    `rate_factor` multiplies the learning rates, `max_rate` bounds them; `max_norm` is what the gradients of each
    optimizer are clipped to (by their 2-norm). Where one of several optimizers is asked about, only its updates are
    changed, unless it is `of_all`.
    """

    rate_factor: float = 1.0
    max_rate: float | None = None
    max_norm: float | None = None
    of_all: bool = False


AS_IT_RAN = Change()


@dataclass(slots=True)
class Course:
    """What the steps came to: their losses, as far as they got. `failed_at`: the first step that was not finite."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    """Of several optimizers' losses those of the one that is asked about, if one is; `totals`: of all."""
    totals: list[tuple[int, float]] = field(default_factory=list)
    failed_at: int | None = None
    skipped: int = 0
    updates: int = 0
    weights_apart: float | None = None
    """||replayed weights - the script's weights now|| / ||the script's||; None where those are not finite."""

    @property
    def highest(self) -> float:
        return max((abs(loss) for _, loss in self.losses), default=0.0)


class StretchReplay:
    """Replays one stretch, as often as asked, within a time."""

    def __init__(self, stretch: Stretch, recorder: FlightRecorder, whose: Optimizer | None = None) -> None:
        """`whose`: of several optimizers the one whose losses are asked for, and whose updates are changed."""
        self.stretch = stretch
        self.only = stretch.snapshot.number_of(whose) if whose is not None and stretch.segments else None
        self._recorder = recorder
        self._deadline = time.perf_counter() + max(SECONDS, STEPS_WORTH * recorder.step_seconds)
        self._limits: dict[int, float] = {}
        """For each optimizer whose gradients the script clips: at which norm."""
        self._norms: list[tuple[int, float, float]] = []
        """(optimizer, norm of the replayed gradients, norm of those that were used)."""

    def as_it_ran(self) -> Course:
        """The steps unchanged."""
        self._norms.clear()
        return self._run(AS_IT_RAN)

    def learn_clipping(self) -> None:
        """Find out, from the steps as they ran, at which norm the script clips its gradients. Raises ReplayError."""
        self._limits = limits_of(self._norms)

    def with_change(self, change: Change) -> Course:
        """The steps with other updates."""
        return self._run(change)

    def failing_step_before(self) -> Course:
        """The last step alone, on the weights that the stretch began with."""
        with neutral_thread():
            course = Course()
            failing = self.stretch.failing or self.stretch.steps[-1]
            self._step(failing, _Copies(self.stretch), AS_IT_RAN, course)
            return course

    def earlier_step_now(self) -> Course:
        """The last step before the one that failed, alone, on the weights of now."""
        with neutral_thread():
            course, copies = Course(), _Copies(self.stretch)
            copies.take_present()
            earlier = [step for step in self.stretch.steps if step is not self.stretch.failing]
            self._step(earlier[-1], copies, AS_IT_RAN, course)
            return course

    def loss_of(self, step: KeptStep) -> float | None:
        """The loss of a step as it was seen: of the optimizer that is asked about."""
        return step.loss if self.only is None else step.loss_of(self.only)

    def _run(self, change: Change) -> Course:
        course = Course()
        copies = _Copies(self.stretch)
        with neutral_thread():
            for step in self.stretch.steps:
                if time.perf_counter() > self._deadline:
                    raise ReplayError("there was no time to run all of these steps again")
                self._step(step, copies, change, course)
                if course.failed_at is not None:
                    break
            course.weights_apart = copies.apart()
        return course

    def _step(self, step: KeptStep, copies: _Copies, change: Change, course: Course) -> None:
        replay = _StepReplay(step, self._recorder, copies, change, self._limits, self._norms, self.only)
        loss, is_finite = replay.carry_out()
        own = loss if self.only is None else replay.own_loss
        course.skipped += replay.skipped
        course.updates += replay.updated
        if loss is not None and math.isfinite(loss):
            course.totals.append((step.number, loss))
        if own is not None and math.isfinite(own):
            course.losses.append((step.number, own))
        if not is_finite or (loss is not None and not math.isfinite(loss)):
            course.failed_at = step.number


class _Copies:
    """The weights, buffers, optimizers and results that one replay of a stretch carries from step to step."""

    def __init__(self, stretch: Stretch) -> None:
        self.parameters, self.optimizers = stretch.snapshot.stand_ins()
        self.originals = [original for original, _ in stretch.snapshot.pairs()]
        updated = [{id(p) for p in parameters_of([optimizer])} for optimizer in self.optimizers]
        self.owned = [[p for p in self.originals if id(self.parameters[id(p)]) in theirs] for theirs in updated]
        """For each optimizer, the script's own tensors that it updates."""
        self.buffers: dict[tuple[int, str], Tensor] = {}
        """By the dict that holds a buffer, and its name."""
        self.made: dict[Ref, Tensor] = {}
        later: set[Ref] = set()
        for step in stretch.steps:
            for event in step.record.events:
                refs = (leaf for leaf in leaves((event.args, event.kwargs)) if isinstance(leaf, Ref))
                later |= {ref for ref in refs if ref.event < step.record.iteration_start}
        self.handed_on = later
        """Results that a later step uses."""

    def take_present(self) -> None:
        """Give the copies the values that the script's own weights have now."""
        with torch.no_grad():
            for original in self.originals:
                self.parameters[id(original)].copy_(original)

    def apart(self) -> float | None:
        """How far the copied weights are from the script's, relative to those."""
        return distance([(self.parameters[id(original)], original) for original in self.originals])


class _StepReplay(Replayer):
    """One iteration of a stretch: its events, and the updates between and after them."""

    def __init__(
        self,
        step: KeptStep,
        recorder: FlightRecorder,
        copies: _Copies,
        change: Change,
        limits: dict[int, float],
        norms: list[tuple[int, float, float]],
        only: int | None = None,
    ) -> None:
        self._only = only
        self.own_loss: float | None = None
        """The sum of the losses that the optimizer in question answered; of those that none did, where it made no step."""
        self._turn = 0
        """Losses that the updates so far have answered."""
        self._step = step
        self._copies = copies
        self._change = change
        self._limits = limits
        self._norms = norms
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
        for owner in module.modules():
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
        copies = self._copies
        optimizer, owned = copies.optimizers[update.optimizer], copies.owned[update.optimizer]
        gradients = {id(p): g for p in owned if (g := self._sums.pop(id(p), None)) is not None}
        with torch.no_grad():
            if update.scale is not None:
                gradients = {key: g * (1.0 / update.scale) for key, g in gradients.items()}
            if not all(numerics.is_finite(g) for g in gradients.values()):
                if update.scale is None:
                    self._is_finite = False
                self.skipped += 1
                return
            gradients = self._clipped(gradients, update)
        for parameter in owned:
            copies.parameters[id(parameter)].grad = gradients.get(id(parameter))
        self._set_options(optimizer, update)
        try:
            compat.step_without_hooks(optimizer)(optimizer)
        finally:
            for parameter in owned:
                copies.parameters[id(parameter)].grad = None
        self.updated += 1

    def _answered(self) -> None:
        """The losses since the last update are those of the optimizer in question."""
        mine = self._losses[self._turn :]
        if mine:
            self.own_loss = (self.own_loss or 0.0) + sum(mine)

    def _clipped(self, gradients: dict[int, Tensor], update: Update) -> dict[int, Tensor]:
        """The gradients as the optimizer was given them; with a change, clipped where the script or the change does."""
        norm = norm_of(list(gradients.values()))
        if norm is None or not float(norm):
            return gradients
        size = float(norm)
        factor = 1.0
        if self._change is AS_IT_RAN:
            used = update.grad_norm
            if used is not None and math.isfinite(used):
                self._norms.append((update.optimizer, size, used))
                factor = used / size if abs(used - size) > SAME_NORM * size else 1.0
        else:
            bounds = (self._limits.get(update.optimizer), self._change.max_norm if self._is_asked(update) else None)
            limit = min((bound for bound in bounds if bound is not None), default=math.inf)
            factor = min(1.0, limit / size)
        return gradients if factor == 1.0 else {key: g * factor for key, g in gradients.items()}

    def _is_asked(self, update: Update) -> bool:
        """Whether it is this optimizer's updates that are changed."""
        return self._only is None or self._change.of_all or update.optimizer == self._only

    def _set_options(self, optimizer: Optimizer, update: Update) -> None:
        for group, options in zip(optimizer.param_groups, update.options, strict=True):
            group.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()})
            if "lr" in group and self._change is not AS_IT_RAN and self._is_asked(update):
                rate = group["lr"] * self._change.rate_factor
                highest = self._change.max_rate
                if highest is not None and float(rate) > highest:
                    rate = rate * 0 + highest
                group["lr"] = rate


def limits_of(norms: list[tuple[int, float, float]]) -> dict[int, float]:
    """At which norm the gradients of each optimizer were clipped, from (optimizer, norm before, norm used).

    Raises ReplayError where they were changed in another way.
    """
    limits: dict[int, float] = {}
    for number in {n for n, _, _ in norms}:
        mine = [(before, used) for n, before, used in norms if n == number]
        clipped = [used for before, used in mine if used < before * (1 - SAME_NORM)]
        if not clipped and all(used <= before * (1 + SAME_NORM) for before, used in mine):
            continue
        limit = max(clipped, default=0.0)
        is_one_limit = clipped and min(clipped) >= (1 - SAME_LIMIT) * limit
        if not is_one_limit or any(used > limit * (1 + SAME_LIMIT) for _, used in mine):
            raise ReplayError("something other than clipping changed the gradients between backward and the update")
        limits[number] = limit
    return limits
