"""Are the gradients finite? asked where no scaler asks: before an optimizer uses them, or a loop throws them away."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.by_hand import UpdateByHand
from ampguard.capture.cleaned import CleanedGradients
from ampguard.capture.cut_to_zero import CutToZero
from ampguard.capture.events.log import EventLog
from ampguard.capture.hooks import TensorHooks
from ampguard.capture.judging.judge import Judge
from ampguard.capture.on_device import DeviceGradients
from ampguard.capture.record import BackwardCall, Ref
from ampguard.capture.remade import RemadeGradients, gradients_of
from ampguard.compat import HAS_CUDA, found_inf, is_made, version_of, versions_of
from ampguard.errors import message_of
from ampguard.numerics import all_finite_on_cpu

CLOSE_LOOKS = 8
"""Backward passes at the beginning after which it is seen whether the loop changes its parameters by hand."""


class GradientWatch:
    """Follows gradients from the backward pass to the update, and has bad ones judged."""

    def __init__(self, log: EventLog, judge: Judge) -> None:
        self.suspects_underflow = False
        """Set by whoever samples gradients: the next update's gradients are to be compared with float32's."""
        self.scaler: Any = None
        """Who has scaled the loss that was differentiated last; None where nobody has."""
        self.hooks = TensorHooks(log)
        self.remade = RemadeGradients(log)
        self.healed_in = -1
        """The last step in which the guard itself has put finite gradients in the place of bad ones: the script has not."""
        self.cleaned = CleanedGradients()
        self.on_device = DeviceGradients(log, judge.gradients.were_bad)
        self.by_hand = UpdateByHand(judge.gradients.report)
        self._log = log
        self._judge = judge.gradients
        self._judge_of_losses = judge
        self._is_unjudged = False
        """Whether there are gradients that nobody has looked at."""
        self._has_raised = False
        """Whether the backward pass that ends now has raised."""
        self._judges_at_once = False
        """True for a loop that changes its parameters by gradients, clears these, and differentiates again."""
        self._close_looks = CLOSE_LOOKS
        self._versions: list[tuple[Tensor, int]] = []
        self._cleared: dict[int | None, int] = {}
        """For each optimizer, by identity: the event from which on its gradients add up. None: for all of them."""
        self._known_finite: list[tuple[list[Tensor], list[int]]] = []
        """Gradients that somebody has found finite since the last backward pass, and their versions then."""
        self.cut: CutToZero | None = None
        """Gradients of the last backward pass that were finite, and that clipping has made 0."""

    @property
    def _is_scaled(self) -> bool:
        """Whether the loss that was differentiated last carries a scaler's scale."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def is_unjudged(self) -> bool:
        """Whether there are gradients that nobody has looked at."""
        return self._is_unjudged

    def differentiated(self) -> None:
        """A backward pass has added gradients."""
        self._known_finite = []
        self.cut = None
        self._judge.spoil()
        if self.hooks.known:
            self.hooks.differentiated()
        self._is_unjudged = not self._has_raised
        self._has_raised = False
        parameters: list[Tensor] = []
        if self._judges_at_once and self._is_unjudged:
            self._judge_now()
        elif self._close_looks:
            self._close_looks -= 1
            parameters = [p for p in self._judge.parameters_of_modules() if p.requires_grad]
            self._versions = [(p, version_of(p)) for p in parameters]
        if not self._is_scaled and self._judge.is_here:
            self.cleaned.differentiated(parameters)

    def replayed(self) -> None:
        """The replay of a CUDA graph has made gradients; those of the replay before are overwritten."""
        self._known_finite = []
        self._judge.are_good()
        self._judge.spoil()
        self._is_unjudged = False

    def raised(self, error: BaseException, scaler: Any) -> None:
        """A backward pass raised. What it left in the parameters is nothing that anybody will use."""
        self._has_raised = True
        if is_anomaly(error):
            parameters = [p for p in self._judge.parameters_of_modules() if p.requires_grad]
            scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
            since = max(self._cleared.values(), default=0)
            self._judge.made_backward_raise(parameters, scale, error, since)

    def are_looked_at_by_scaler(self, optimizer: torch.optim.Optimizer, is_unscaled: bool) -> None:
        """A scaler is about to step: it looks by itself, or has looked when it unscaled them."""
        self._is_unjudged = False
        self._known_finite = []
        if self.remade.are_used and is_unscaled and not self._judge_remade(optimizer):
            self._judge_changed(optimizer)

    def _judge_remade(self, optimizer: torch.optim.Optimizer) -> bool:
        """Has the script itself turned good gradients into bad ones?"""
        gradients = gradients_of(optimizer)
        targets = self.remade.bad_ones(gradients, self._judge.step)
        if targets:
            self._judge.remade_are_bad(parameters_of(optimizer), targets)
        return bool(targets)

    def _copied_from(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The parameters whose bad gradients the script has copied to those that the optimizer holds: a half model's.

        None where a backward pass reaches any of the optimizer's own.
        """
        held = set(map(id, parameters_of(optimizer)))
        others = [p for p in self._judge.parameters_of_modules() if not is_made(p) and p.grad is not None]
        if any(id(p) in held for p in others) or all_finite_on_cpu(p.grad for p in others if p.grad is not None):
            return []
        return others

    def _judge_changed(self, optimizer: torch.optim.Optimizer) -> None:
        """Has the script put something into them that was bad before (an average that it keeps), after the scaler has looked?"""
        if found_inf(self.scaler, optimizer) is False and not all_finite_on_cpu(gradients_of(optimizer)):
            scale, since = float(self.scaler.get_scale()), self._cleared_since(optimizer)
            self._judge.are_bad(parameters_of(optimizer), scale, is_held_off=False, since=since)

    def about_to_be_used(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps without a scaler: look, as long as that waits for nothing."""
        self._is_unjudged = False
        self._versions = []  # it may change them by this update (or others by hand after it: master weights)
        if self._log.is_empty or (self.cut is not None and self.cut.holds(parameters_of(optimizer))):
            return  # (those that clipping has spoilt are told where the step is)
        if self._are_finite(gradients_of(optimizer)) and self._are_finite_elsewhere(optimizer):
            self._judge.are_good()
            if not self._is_scaled:
                self._look_for_cleaned(optimizer)
        elif not (self.remade.are_used and self._judge_remade(optimizer)):
            since = self._cleared_since(optimizer)
            is_scaled = self._is_scaled
            scale = float(self.scaler.get_scale()) if is_scaled else None
            parameters = parameters_of(optimizer)
            if copied := self._copied_from(optimizer):
                parameters, since = copied, max(self._cleared.values(), default=0)
            self._judge.are_bad(parameters, scale, is_held_off=False, since=since, is_past_scaler=is_scaled)
        if self.suspects_underflow:
            self.look_for_underflow(optimizer, None)

    def _look_for_cleaned(self, optimizer: torch.optim.Optimizer) -> None:
        """Are these gradients finite because the script has made them so?"""
        if self.healed_in == self._judge.step:
            return
        found = self.cleaned.are_used(optimizer, bool(self._known_finite), self._judge.parameters_of_modules)
        if found == "seen":
            since = self._cleared_since(optimizer)
            self._judge.are_bad(parameters_of(optimizer), None, is_held_off=False, since=since, is_replaced=True)
        elif found:
            self._judge.may_be_cleaned(parameters_of(optimizer), self._cleared_since(optimizer))

    def found_finite(self, gradients: list[Tensor]) -> None:
        """Somebody else has looked at these gradients."""
        self._known_finite.append((gradients, versions_of(gradients)))

    def _are_finite(self, gradients: list[Tensor]) -> bool:
        if self._known_finite:  # and not written to since
            versions = versions_of(gradients)
            then, known = self._known_finite[-1]
            if len(then) == len(gradients) and versions == known and all(map(operator.is_, then, gradients)):
                return True
            found = {id(g): v for many in self._known_finite for g, v in zip(*many, strict=True)}
            gradients = [g for g, v in zip(gradients, versions, strict=True) if found.get(id(g)) != v]
        return not gradients or all_finite_on_cpu(gradients)

    def _are_finite_elsewhere(self, optimizer: torch.optim.Optimizer) -> bool:
        """Those on an accelerator, as far as that is known before they are used."""
        if not HAS_CUDA:
            return True
        may_tell_late = not self._is_scaled and self._judge_of_losses.bad_loss_step != self._judge.step
        since = self._cleared_since(optimizer)
        return self.on_device.are_finite(optimizer, self._judge.step, since, may_tell_late)

    def held_off(self, optimizer: torch.optim.Optimizer, loss_scale: float | None) -> None:
        """The scaler found Inf or NaN in the optimizer's gradients and skipped its step."""
        self._judge_of_losses.read_flags(wait=True)
        since = self._cleared_since(optimizer)
        self._judge.are_bad(parameters_of(optimizer), loss_scale, is_held_off=True, since=since)

    def replaced(self, optimizer: torch.optim.Optimizer, loss_scale: float) -> None:
        """The script has made bad gradients finite, and the scaler is about to divide them."""
        if self.healed_in == self._judge.step:
            return
        since = self._cleared_since(optimizer)
        self._judge.are_bad(parameters_of(optimizer), loss_scale, is_held_off=False, since=since, is_replaced=True)

    def held_off_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """An engine without a loss scale skipped a step: because of these gradients, or of another optimizer's."""
        self._is_unjudged = False
        if self._log.is_empty or self._are_finite(gradients_of(optimizer)):
            return
        if not (self.remade.are_used and self._judge_remade(optimizer)):
            self.held_off(optimizer, None)

    def used_by_hand(self) -> None:
        """Parameters are updated by hand: judge what the last backward call left or returned."""
        events = self._log.kept_since(0)
        call = events[-1] if events else None
        if not isinstance(call, BackwardCall):
            return
        if call.is_functional:
            returned = [(Ref(call.index, i), t) for i, r in enumerate(call.outputs) if (t := r()) is not None]
            if not all_finite_on_cpu(t for _, t in returned):
                targets = tuple(ref for ref, _ in returned)
                report = None if self.on_device.waits_always else self.by_hand.begins_functional
                self._judge.are_bad((), None, is_held_off=False, targets=targets, report=report)
            return
        parameters = self._judge.parameters_of_modules()
        if all_finite_on_cpu(p.grad for p in parameters if p.grad is not None):
            self._judge.are_good()
        else:  # what earlier calls have left there was finite: it was looked at
            self._are_bad_by_hand(parameters, call.index)

    def _are_bad_by_hand(self, parameters: Iterable[Tensor], since: int) -> None:
        """No optimizer was to use them, and no scaler was asked: the scale may be all that is wrong with them."""
        held_off, scaler = self._scale_held_off(), self.scaler
        is_past = held_off is None and scaler is not None and scaler.is_enabled()
        scale = float(scaler.get_scale()) if is_past else held_off
        parameters = list(parameters)
        report = None if self.on_device.waits_always else lambda bad: self.by_hand.begins(bad, parameters)
        self._judge.are_bad(
            parameters, scale, is_held_off=held_off is not None, since=since, is_past_scaler=is_past, report=report
        )

    def _scale_held_off(self) -> float | None:
        """The loss scale of one that takes back what it has spoilt, where no optimizer's step could be held off."""
        takes_back = getattr(self.scaler, "takes_back", False)
        return float(self.scaler.get_scale()) if takes_back else None

    def cleared(self, of: int | None, scaler: Any) -> None:
        """The gradients of an optimizer (by identity; None: those of a module, perhaps everybody's) are cleared.

        Where no optimizer has used them, the loop may drop bad ones by itself: they are bad all the same.
        """
        self._known_finite = []
        if self._log.is_empty:
            return
        if self._is_unjudged:
            events = self._log.kept_since(0)
            self._is_unjudged = False
            is_scaled = scaler is not None and scaler.is_enabled()
            if not is_scaled and any(version_of(p) != version for p, version in self._versions):
                self._judges_at_once = True
            elif any(isinstance(event, BackwardCall) for event in events):  # the next loss may be there already
                parameters = [p for p in self._judge.parameters_of_modules() if p.grad is not None]
                if not all_finite_on_cpu(p.grad for p in parameters if p.grad is not None):
                    scale = float(scaler.get_scale()) if is_scaled else None
                    self._judge.are_bad(parameters, scale, is_held_off=True)
        self._cleared[of] = self._log.next_index

    def _judge_now(self) -> None:
        """Before the loop changes its parameters by these gradients: afterwards the step could not be run again."""
        self._is_unjudged = False
        parameters = self._judge.parameters_of_modules()
        if not all_finite_on_cpu(p.grad for p in parameters if p.grad is not None):
            self._are_bad_by_hand(parameters, max(self._cleared.values(), default=0))

    def look_for_underflow(self, optimizer: torch.optim.Optimizer, loss_scale: float | None) -> None:
        """Somebody suspects that these gradients have lost a part to zero: have the step run again."""
        self.suspects_underflow = False
        if any(isinstance(event, BackwardCall) for event in self._log.record.events):
            self._judge.may_be_lost(parameters_of(optimizer), loss_scale)

    def _cleared_since(self, optimizer: torch.optim.Optimizer) -> int:
        return max(self._cleared.get(id(optimizer), 0), self._cleared.get(None, 0))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_anomaly(error: BaseException) -> bool:
    """Whether `torch.autograd.detect_anomaly` raised this: a derivative was NaN."""
    return isinstance(error, RuntimeError) and torch.is_anomaly_enabled() and "returned nan values" in message_of(error)
