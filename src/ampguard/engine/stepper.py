"""From a loss to updated parameters: scale, backward, unscale, clip, step, update, for any number of optimizers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.compat import only_for_others
from ampguard.engine import closures, misuse
from ampguard.engine.announce import Announcer
from ampguard.engine.holding import Holding
from ampguard.engine.left_over import LeftOver
from ampguard.engine.precision.base import Precision
from ampguard.engine.rules import Rules
from ampguard.engine.step import GradientCheck, LossScale, check_for_update, check_gradients

_hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""One watch on each optimizer's own step: that of the last Amp that it was given to."""


class Stepper:
    """One loss scale for all optimizers. Waits for no device."""

    def __init__(
        self,
        holdings: Sequence[Holding],
        mode: Precision,
        loss_scale: LossScale,
        window: int,
        max_norm: float | None,
    ) -> None:
        self._holdings = holdings
        self._mode = mode
        self._loss_scale = loss_scale
        self._window = window
        self._max_norm = max_norm
        self._left_over = LeftOver(mode.scales_loss, mode.autocast_dtype or mode.weights_dtype, holdings)
        self.rules = Rules(holdings, mode.scales_loss, window, loss_scale.read, self._left_over)
        self._announcer = Announcer(loss_scale.value if mode.scales_loss else None)
        self.found_infs: dict[str, Tensor] = {}
        """The answers of the optimizers that have been stepped since the last update of the scale."""
        self.found_when_unscaled: dict[str, Tensor] = {}
        """By optimizer: whether its gradients were not finite when the loop had them divided; a clamp may hide it since."""
        self._is_stepping = False
        self._watch_optimizers()

    def was_copied(self) -> None:
        """With its holdings: what is known by identity, and hooks, are the original's."""
        for holding in self._holdings:
            holding.refresh()
        self._left_over.follow(self._holdings)
        self.rules.was_copied()
        self._watch_optimizers()

    def _watch_optimizers(self) -> None:
        for holding in self._holdings:
            earlier = _hooks.pop(holding.optimizer, None)
            if earlier is not None:
                earlier.remove()
            with contextlib.suppress(AttributeError):  # a wrapper around an optimizer may have no hooks
                _hooks[holding.optimizer] = holding.optimizer.register_step_pre_hook(self._watch_direct_step(holding))

    @property
    def scale(self) -> Tensor | None:
        """What losses are multiplied by; None in a mode without a loss scale."""
        return self._loss_scale.value if self._mode.scales_loss else None

    def backward(self, losses: Sequence[Tensor], only: Sequence[Holding] | None, **options: Any) -> None:
        """Add the gradients of the losses, scaled, to all parameters or to those of some optimizers."""
        if not torch.is_grad_enabled():  # PyTorch's own backward does not ask; the product with the scale does
            with torch.enable_grad():
                self.backward(losses, only, **options)
            return
        self._left_over.before_backward(losses)
        self.rules.before_backward(only)
        self._mode.before_backward()
        inputs = None if only is None else self._inputs_of(only)
        with self._mode.computing(), self._mode.adding(), self.rules.others.ours():
            torch.autograd.backward([self._scaled(loss) for loss in losses], inputs=inputs, **options)
        self._mode.after_backward()
        self.rules.after_backward(only, [loss.detach() for loss in losses])

    def _inputs_of(self, only: Sequence[Holding]) -> list[Tensor]:
        inputs = [p for holding in only for p in holding.inputs()]
        if not inputs:
            raise misuse.all_frozen([holding.name for holding in only])
        return inputs

    def _scaled(self, loss: Tensor) -> Tensor:
        if self._window > 1:
            loss = loss / self._window
        if self.scale is None:
            return loss
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # times its scale it may be Inf in float16, which looks like a bad loss
        return self._announcer.scale(loss, self._loss_scale.scale)

    def unscale(self, chosen: Sequence[Holding]) -> None:
        """Divide the gradients now."""
        for holding in chosen:
            self.rules.unscale(holding)
            if self.scale is not None and not holding.has_gradients():  # the loop writes its own, without the scale
                self.found_when_unscaled[holding.name] = torch.zeros_like(self.scale)
            elif self.scale is not None:
                check = check_gradients(holding.parameters, self.scale)
                self._announcer.unscaled(holding.optimizer, check.found_inf)
                _multiply(holding.parameters, check.inverse_scale)
                self.found_when_unscaled[holding.name] = check.found_inf

    def check(self, chosen: Sequence[Holding]) -> GradientCheck:
        """One look at all gradients, after the rules were asked; with their norm where it is needed for clipping."""
        self.rules.windows_end(chosen)
        unscaled = [h for h in chosen if self.scale is not None and self.rules.is_unscaled(h)]
        scale = self.scale if len(unscaled) < len(chosen) else None
        if scale is not None:
            for holding in unscaled:  # some of them were unscaled by hand, others not
                _multiply(holding.parameters, scale)
        for holding in chosen:
            self.rules.step(holding)
        share = chosen[0].held / self._window
        if self._window > 1 and share != 1.0:  # the last window of an epoch holds less than the loss was divided by
            scale = scale * share if scale is not None else torch.full_like(self._loss_scale.value, share)
        only = chosen[0].parameters if len(chosen) == 1 else None
        parameters = only or [p for holding in chosen for p in holding.parameters]
        optimizers = [holding.optimizer for holding in chosen]
        may_write = not self._announcer.is_heard()  # who listens divides what it reads by the scale
        check = check_for_update(optimizers, parameters, scale, self._max_norm, may_write=may_write)
        for holding in unscaled:
            found_inf = torch.maximum(check.found_inf, self.found_when_unscaled.pop(holding.name))
            check = dataclasses.replace(check, found_inf=found_inf)
        return check

    def apply(self, chosen: Sequence[Holding], check: GradientCheck) -> None:
        """Step or skip, all alike."""
        for holding in chosen:
            self._apply(holding, check)

    def _apply(self, holding: Holding, check: GradientCheck) -> None:
        optimizer = holding.optimizer
        with self.stepping():
            apply = self._mode.apply
            self._announcer.step(optimizer, check.found_inf, lambda: apply(optimizer, check, self._max_norm))

    def evaluate(self, holding: Holding, closure: Callable[[], Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """A step of an optimizer that computes its losses itself: first norm, whether it was undone, losses."""
        with self.stepping():
            clear = functools.partial(self.clear, [holding])
            return closures.step_with_closure(holding, closure, self._max_norm, clear, self.rules.evaluated)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """An optimizer's own step inside is ours."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def end_iteration(self, chosen: Sequence[Holding], found_inf: Tensor) -> None:
        """Update the scale once all optimizers have stepped, or one steps again: then a new iteration had begun."""
        if self.scale is None:
            return
        if any(h.name in self.found_infs for h in chosen):
            self._update_scale(self.scale, chosen)
        self.found_infs |= {h.name: found_inf for h in chosen}
        if len(self.found_infs) == len(self._holdings):
            self._update_scale(self.scale, chosen)

    def _update_scale(self, scale: Tensor, stepped: Sequence[Holding]) -> None:
        waiting = [h for h in self._holdings if h not in stepped and self.rules.is_held(h)]
        before = scale.clone() if waiting else scale
        self._loss_scale.update(list({id(flag): flag for flag in self.found_infs.values()}.values()))
        self.found_infs = {}
        self._announcer.updated()
        self.rules.updated()
        for holding in waiting:  # their gradients follow the scale: powers of two, so nothing is rounded
            _multiply(holding.parameters, scale / before)
            self.rules.rescaled(holding)

    def clear(self, chosen: Sequence[Holding]) -> None:
        """Forget gradients."""
        for holding in chosen:
            holding.clear()
            self._mode.cleared(holding.optimizer)
            self.found_when_unscaled.pop(holding.name, None)
            self.rules.cleared(holding)

    def restored(self, was_loaded: bool) -> None:
        """The loss scale was set from outside."""
        self.found_when_unscaled.clear()
        self._announcer.restored(was_loaded)

    def restored_unscaled(self, holding: Holding, found_inf: float) -> None:
        """Gradients came from a state that was saved between `amp.unscale_` and the step."""
        self.rules.unscale(holding)
        self.found_when_unscaled[holding.name] = self._loss_scale.value.new_tensor(found_inf)

    def _watch_direct_step(self, holding: Holding) -> Callable[..., None]:
        def before_step(*_: Any) -> None:
            if not self._is_stepping:
                self._mode.refuse_direct_step(holding.name)
                self.rules.direct_step(holding)

        return only_for_others(before_step)


@torch.no_grad()
def _multiply(parameters: Sequence[Tensor], factor: Tensor) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.device))
