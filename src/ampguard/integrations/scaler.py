"""GradScaler's calls over the engine's step: one read of the gradients, and the factor inside the optimizer's own pass.

What the drop-ins of this package are made of. A step whose gradients are not finite changes nothing in any precision,
gradients that wait for their own step follow the scale when it changes, and a step without gradients says why.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.compat import only_for_others
from ampguard.engine import misuse
from ampguard.engine.announce import Announcer
from ampguard.engine.arguments import refuse_loss, refuse_low_weights
from ampguard.engine.casting import map_tensors, tensors_in
from ampguard.engine.options import is_count, refuse_numbers
from ampguard.engine.other_backwards import OtherBackwards
from ampguard.engine.own_loop import ONLY_WITH_AMP, LoopPrecision
from ampguard.engine.policies.base import ADVICE, BadStep
from ampguard.engine.precision import mode_named
from ampguard.engine.precision.late_optimizers import refuse_late
from ampguard.engine.result import StepResult
from ampguard.engine.setup import parameter_names
from ampguard.engine.step import GradientCheck, LossScale, check_for_update, check_gradients
from ampguard.engine.verdicts import Verdict, Verdicts, nonfinite_names
from ampguard.errors import CheckpointError, NonfiniteError, PrecisionError, SetupError, UsageError
from ampguard.integrations.announcing import scalers_may_scale
from ampguard.integrations.hand_clipping import tell_of_writes
from ampguard.integrations.left_over import are_as_glanced, are_as_marked, glanced_marks_of, marks_of
from ampguard.integrations.updating import (
    Updating,
    checked_again,
    direct_step,
    divide,
    divided_twice,
    held,
    no_gradients,
    stepped_twice,
)
from ampguard.integrations.written_between import WrittenBetween

logger = logging.getLogger("ampguard")

PATIENCE = 25
"""Skipped steps in a row after which the run ends: a scale of 2**16 needs 16 halvings to reach 1."""


class EngineScaler:
    """`scale`, `unscale_`, `step`, `update`, `get_scale`, `state_dict`, as `torch.amp.GradScaler` has them.

    `precision` is one of `ampguard.precision`'s names, or what it returned (O2 and O3 need its `prepare`); without a
    loss scale (fp32, bf16) the calls are the same. `model` lets messages name parameters. After `patience` skipped
    steps in a row NonfiniteError is raised (None: never).
    """

    def __init__(
        self,
        precision: str | LoopPrecision = "fp16",
        *,
        model: nn.Module | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        patience: int | None = PATIENCE,
    ) -> None:
        if patience is not None and not is_count(patience):
            raise SetupError(f"patience={patience}: a whole number of skipped steps in a row, at least 1; None: never")
        refuse_numbers(None, 1, None, init_scale, growth_interval)
        self.precision = _known(precision)
        self._mode = mode_named(self.precision.name)(self.precision.device_type)
        self._is_enabled = self._mode.scales_loss and scalers_may_scale()
        self._model = model
        device = next((p.device for p in compat.all_parameters(model)), None) if model is not None else None
        self._loss_scale = LossScale(device or "cpu", init_scale=init_scale, growth_interval=growth_interval)
        self._announcer = self._new_announcer()
        self._updating: dict[int, Updating] = {}
        self._others = OtherBackwards(self._read_scale, lambda _: True)
        self._between = WrittenBetween(self._others, self._read_scale)
        self._is_stepping = False
        self._found_infs: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._verdicts = Verdicts(patience or sys.maxsize, lambda _: None, _on_bad_step)
        self.result = StepResult()
        """What the last `step` did: skipped or not, loss scale, bad parameters."""
        self.norm: Tensor | None = None
        """Of the last step's true gradients, where it was wanted: a 0-d tensor that nobody has waited for."""

    # --- what GradScaler has ------------------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Whether there is a loss scale."""
        return self._is_enabled

    def scale(self, outputs: Any) -> Any:
        """The loss (or tensors in lists, tuples, dicts) times the loss scale."""
        self._others.scale_was_told = True  # a backward pass of the loop's own may be one of these
        return self._scaled(outputs)

    def _scaled(self, outputs: Any) -> Any:
        losses = list(tensors_in(outputs))
        self._losses += [loss.detach() for loss in losses]
        if not self._is_enabled:
            return outputs
        if losses and losses[0].device != self._loss_scale.value.device:
            self._move_to(losses[0].device)
        wide = map_tensors(lambda t: t.float() if t.dtype.itemsize < 4 and t.is_floating_point() else t, outputs)
        return self._announcer.scale(wide, self._loss_scale.scale)

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None, *, create_graph: bool = False) -> None:
        """`scale(loss).backward()`. The gradients of `optimizer` may wait for its step: they follow the scale."""
        refuse_loss(loss, "the scaler")
        own = self._of(optimizer) if optimizer is not None else None
        if own is not None and self._is_enabled:
            self._between.look(own)
        with self._mode.computing(), self._between.ours():
            self._scaled(loss).backward(create_graph=create_graph)
        if own is not None and self._is_enabled:
            self._note_scaled(own)

    def unscale_(self, optimizer: Optimizer) -> Tensor:
        """Divide its gradients by the loss scale now, to clip or read them. Returns their true norm, a 0-d tensor."""
        own = self._of(optimizer)
        if own.check is not None:
            raise divided_twice(own)
        check = self._checked(own, wants_norm=True)
        self._announcer.unscaled(optimizer, check.found_inf)  # a listener would take an earlier division for another
        divide(own.holding.parameters, check)
        own.check, own.divided_at = check, misuse.calling_line()
        assert check.norm is not None
        return check.norm

    def step(self, optimizer: Optimizer, *, max_norm: float | None = None, wants_norm: bool = False) -> StepResult:
        """Update the parameters, or leave all as it is where a gradient is not finite.

        `max_norm` clips by the global 2-norm of the optimizer's true gradients, unless `unscale_` was called.
        Afterwards the gradients are divided and clipped, as GradScaler leaves them.
        """
        own = self._of(optimizer)
        if own.stepped_at is not None:
            raise stepped_twice(own)
        self._verdicts.settle()
        before = self._loss_scale.value.clone() if self._is_enabled else None
        check = self._checked(own, max_norm is not None or wants_norm) if own.check is None else checked_again(own)
        max_norm = max_norm if own.check is None else None
        names = self._nonfinite(own, check)
        apply = self.precision.apply_update
        self._is_stepping = True
        try:
            self._announcer.step(optimizer, check.found_inf, lambda: apply(optimizer, check, max_norm))
        finally:
            self._is_stepping = False
        own.scaled = []
        own.stepped_at, own.rest = misuse.calling_line(), marks_of(own)
        self._found_infs.append(check.found_inf)
        self.norm = check.norm
        self.result = StepResult(check.norm, check.found_inf, before, names)
        losses, self._losses = self._losses, []
        self._verdicts.add(
            Verdict(self.result, (own.holding.name,), losses, check.found_inf, (id(optimizer),)), wait=False
        )
        return self.result

    @contextlib.contextmanager
    def looking_for_writes(self, optimizer: Optimizer, do: str) -> Iterator[None]:
        """Around what may clip gradients that carry the scale: a warning, once, where it does so without `unscale_`."""
        own = self._of(optimizer)
        before = glanced_marks_of(own) if self._is_enabled else []
        yield
        if before and own.check is None and not are_as_glanced(own, before):
            tell_of_writes(own.holding, self._read_scale(), do)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The loss scale for the next iteration; once, after the last optimizer's step."""
        if not self._found_infs and new_scale is None:
            raise misuse.error(
                "missing-update",
                "update() of the loss scale, but no optimizer was stepped since the last one",
                "call scaler.step(optimizer) before it",
                again=misuse.calling_line(),
            )
        found_infs, self._found_infs = self._found_infs, []
        if self._is_enabled:
            before = self._loss_scale.value.clone()
            if new_scale is None:
                self._loss_scale.update(found_infs)
            else:
                self._loss_scale.value.fill_(new_scale)
            self._announcer.updated()
            self._rescale(self._loss_scale.value / before)
            self._between.updated()
        for own in self._updating.values():
            own.check = own.divided_at = own.stepped_at = None

    def get_scale(self) -> float:
        """The loss scale; 1 where there is none. Waits for the device."""
        self._others.scale_was_told = True
        return self._read_scale()

    def _read_scale(self) -> float:
        return float(self._loss_scale.value) if self._is_enabled else 1.0

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's keys, in O2 the master weights too. Without a loss scale: `scale` is 1, with a mark, so that logs
        can read it."""
        state = {**self._loss_scale.state_dict(), **self.precision.state_dict()}
        return state if self._is_enabled else {**state, "scale": 1.0, "enabled": False}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of this class or of GradScaler; one that was switched off leaves the scale as it is.

        Gradients inside an accumulation window follow the scale. Raises CheckpointError for a bad one, and changes nothing then.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the loss scale was not loaded: a {type(state).__name__} is no state of it\n"
                "  do    pass what scaler.state_dict() returned"
            )
        if not self._is_enabled:
            return
        if not state or state.get("enabled", True) is False:
            logger.info("the saved loss scale was switched off: training begins with %g", self._read_scale())
            return
        before, scale_before = self._loss_scale.state_dict(), self._loss_scale.value.clone()
        try:
            self._loss_scale.load_state_dict(state)
            if "masters" in state:
                self.precision.load_state_dict(state)
        except UsageError as error:
            raise CheckpointError(
                f"the loss scale was not loaded: {error}\n  do    pass what scaler.state_dict() returned"
            ) from None
        except CheckpointError:
            self._loss_scale.load_state_dict(before)
            raise
        self._announcer = self._new_announcer(was_loaded=True)
        self._rescale(self._loss_scale.value / scale_before)

    # --- the steps in between -----------------------------------------------------------------------------------------

    def _new_announcer(self, was_loaded: bool = False) -> Announcer:
        return Announcer(self._loss_scale.value if self._is_enabled else None, was_loaded)

    def _move_to(self, device: torch.device) -> None:
        """The loss says where training happens."""
        state = self._loss_scale.state_dict()
        self._loss_scale = LossScale(device)
        self._loss_scale.load_state_dict(state)
        self._announcer = self._new_announcer(self._announcer.was_loaded)

    def _note_scaled(self, own: Updating) -> None:
        """A backward pass of ours has added to its gradients, and perhaps to those of other optimizers."""
        if not own.is_watched:
            own.is_watched = True
            self._between.follow(own)
            with contextlib.suppress(AttributeError):  # a wrapper around an optimizer may have no hooks
                own.holding.optimizer.register_step_pre_hook(_refusing_direct_steps(weakref.ref(self), own))
        for other in self._updating.values():
            if other is own or other.scaled:
                other.scaled = glanced_marks_of(other)

    def _of(self, optimizer: Optimizer) -> Updating:
        own = self._updating.get(id(optimizer))  # its holding keeps the optimizer, and so the id
        if own is None:
            if self._is_enabled:
                refuse_low_weights({type(optimizer).__name__: optimizer}, self._mode)
                refuse_late(optimizer)
            own = self._updating[id(optimizer)] = Updating(held(optimizer, self._model, self.precision.weight_of))
            own.names = parameter_names({"model": self._model}) if self._model is not None else {}
        if own.holding.has_other_parameters():
            own.holding.refresh()
        return own

    def _checked(self, own: Updating, wants_norm: bool) -> GradientCheck:
        """One look at gradients that carry the scale."""
        holding = own.holding
        if holding.flat and holding.flat_is_stale():
            raise misuse.stale_flat(holding.name)
        if not holding.has_gradients():
            raise no_gradients(holding)
        scale = self._loss_scale.value if self._is_enabled else None
        if wants_norm:
            return check_gradients(holding.parameters, scale)
        may_write = not self._announcer.is_heard()
        return check_for_update([holding.optimizer], holding.parameters, scale, may_write=may_write)

    def _nonfinite(self, own: Updating, check: GradientCheck) -> Callable[[], tuple[str, ...]] | None:
        if self._model is None:
            return None
        names = own.names
        return nonfinite_names(
            own.holding.parameters,
            lambda p: names.get(id(p)) or f"a flat buffer of {p.numel()} elements",
            check.found_inf,
            False,
        )

    @torch.no_grad()
    def _rescale(self, ratio: Tensor) -> None:
        """Gradients inside a window of another optimizer's follow the scale: by powers of two, so nothing is rounded."""
        for own in self._updating.values():
            waits = own.stepped_at is None and own.check is None and own.holding.has_gradients()
            if waits and not are_as_marked(own, own.rest):
                for p in own.holding.parameters:
                    if p.grad is not None:
                        p.grad.mul_(ratio.to(p.grad.device))
                own.scaled = glanced_marks_of(own) if own.scaled else []


def _known(precision: str | LoopPrecision) -> LoopPrecision:
    if isinstance(precision, LoopPrecision):
        return precision
    kind = mode_named(precision)
    if kind.weights_dtype != torch.float32 and kind.name not in ONLY_WITH_AMP:
        raise PrecisionError(
            f"precision {kind.name!r} changes the model and the optimizer, which the scaler cannot do by its name\n"
            f"  do    p = ampguard.precision({kind.name!r}); p.prepare(model, optimizer); give the scaler precision=p"
        )
    return LoopPrecision(precision)


def _refusing_direct_steps(scaler: weakref.ref[EngineScaler], own: Updating) -> Callable[..., None]:
    def before_step(*_: Any) -> None:
        its = scaler()
        if its is None or its._is_stepping or not own.scaled or own.check is not None:
            return
        if are_as_glanced(own, own.scaled) and its._read_scale() != 1.0:  # nobody has divided or replaced them
            do = "leave it out: the scaler's own call steps, at the end of each accumulation window"
            raise direct_step(own.holding.name, its._read_scale(), do)

    return only_for_others(before_step)


def _on_bad_step(bad: BadStep) -> None:
    if bad.in_a_row >= bad.patience:
        raise NonfiniteError(f"{bad.in_a_row} steps in a row were skipped. {bad}\n{ADVICE}", bad.parameters or ())
    if bad.is_settling:
        logger.info("%s: skipped, the loss scale is halved", bad)
    else:
        logger.warning("%s: skipped (%d in a row)", bad, bad.in_a_row)
