"""`Amp`: autocast, loss scale, clipping, step and checkpoints as one object that cannot be used in a wrong order."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine import arguments, closures, copies, options
from ampguard.engine.all_ranks import RanksOfModels
from ampguard.engine.checkpoint import files, sharded
from ampguard.engine.checkpoint.state import Checkpoint
from ampguard.engine.followers import Followers
from ampguard.engine.given_up import GivenUp
from ampguard.engine.holding import Holding
from ampguard.engine.policies import BadStep, Policy, policy_named
from ampguard.engine.precision import mode_named
from ampguard.engine.replaced import refuse_replaced
from ampguard.engine.result import StepResult
from ampguard.engine.setup import named, parameter_names, refuse_strangers
from ampguard.engine.statistics import Statistics
from ampguard.engine.step import LossScale
from ampguard.engine.stepper import Stepper
from ampguard.engine.verdicts import Verdict, Verdicts, nonfinite_names
from ampguard.errors import ProtocolError, SetupError

logger = logging.getLogger("ampguard")

PATIENCE, PATIENCE_WITH_SCALE = 10, 25
"""Skipped steps in a row after which the run ends: a scale of 2**16 needs 16 halvings to reach 1."""


class Amp:
    """Mixed precision for a training loop of one's own.

        amp = ampguard.Amp(model, optimizer, precision="fp16", max_grad_norm=1.0)
        for x, y in loader:
            with amp.autocast():
                loss = criterion(model(x), y)
            amp.backward(loss)
            amp.step()

    Models and optimizers are one, several, or mappings of names to them. docs/engine.md says what each option does.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
        precision: str = "fp16",
        *,
        max_grad_norm: float | None = None,
        force_fp32: str | Sequence[str] = (),
        eval_precision: str | None = None,
        accumulate: int = 1,
        on_nonfinite: str | Policy = "skip",
        patience: int | None = None,
        schedulers: Any = None,
        ema: Any = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        name_nonfinite: bool = False,
        **mode_options: Any,
    ) -> None:
        self.models = named(models, nn.Module, "models")
        self.optimizers = named(optimizers, Optimizer, "optimizers")
        arguments.refuse_converted(self.models, self.optimizers)
        flat = refuse_strangers(self.models, self.optimizers)
        options.refuse_numbers(max_grad_norm, accumulate, patience, init_scale, growth_interval)
        roots = list(self.models.values())
        all_parameters = [p for model in roots for p in compat.all_parameters(model)]
        device = all_parameters[0].device if all_parameters else torch.device("cpu")
        kind = mode_named(precision)
        evaluation = mode_named(eval_precision, "eval_precision") if eval_precision is not None else kind
        self.mode = options.made_mode(kind, device.type, mode_options, _options())
        self.evaluation = self.mode if evaluation is kind else evaluation(device.type)
        for mode in {self.mode, self.evaluation}:
            mode.refuse_if_unsupported(roots)
        arguments.refuse_combinations(self.mode, self.evaluation, flat)
        arguments.refuse_closures(self.optimizers, self.mode)
        arguments.refuse_low_weights(self.optimizers, self.mode)
        arguments.refuse_wide_weights(self.models, self.mode)
        self.policy = policy_named(on_nonfinite)
        self.followers = Followers(schedulers, ema, self.models, self.optimizers, self.mode.in_float32)
        self.loss_scale = LossScale(device, init_scale=init_scale, growth_interval=growth_interval)
        self.accumulate = accumulate
        self._names = parameter_names(self.models)
        self._name_nonfinite = name_nonfinite or self.policy.waits
        self.policy.prepare(self)
        self.ranks = RanksOfModels(roots)
        self.ranks.refuse_converting(self.mode)

        forced = arguments.force_patterns(
            self.models, force_fp32, self.mode
        )  # from here on, models and optimizers are changed
        self.mode.convert(roots, list(self.optimizers.values()), forced)
        arguments.note_converted(self.models, self.optimizers, self.mode)
        self.holdings = {
            name: Holding(name, optimizer, flat[name], all_parameters, self.mode.parameter_of)
            for name, optimizer in self.optimizers.items()
        }
        self.stepper = Stepper(list(self.holdings.values()), self.mode, self.loss_scale, accumulate, max_grad_norm)
        patience = patience or (PATIENCE_WITH_SCALE if self.mode.scales_loss else PATIENCE)
        all_agree = self.ranks.all_agree if self.policy.waits else bool
        self.verdicts = Verdicts(patience, self._stepped, self._skipped, all_agree)
        self._has_begun = False
        self._given_up = GivenUp()
        self._checkpoint = Checkpoint(self)
        self.statistics = Statistics(self.models)
        for note in self.mode.notes:
            logger.warning("precision %s: %s", self.mode.name, note)

    # --- forward and backward -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def autocast(self, training: bool | None = None) -> Iterator[None]:
        """Around the forward pass and the loss. In evaluation (all models in eval mode) `eval_precision` holds."""
        if not isinstance(training, (bool, NoneType)):
            raise SetupError(
                f"amp.autocast(training={training!r}): True or False, whether this is a forward pass of training\n"
                "  do    leave it out: the models' own training mode says it; another precision is a matter of Amp(...)"
            )
        if not self._has_begun:
            self._has_begun = True
            self.policy.begin(self)
        if training is None:
            training = any(model.training for model in self.models.values())
        if training:
            if self.mode.low_dtype is not None:  # before the forward pass meets weights that were not cast
                self.follow_groups()
            for holding in self.holdings.values():
                holding.refuse_moved(self.name_of)
            self.mode.before_forward()
            self.statistics.before_forward()
        else:
            self.mode.before_reading()
        is_other = not training and self.evaluation is not self.mode
        region = self.mode.evaluation(self.evaluation) if is_other else self.mode.autocast()
        with (self.evaluation if is_other else self.mode).computing(), region:
            try:
                yield
            except RuntimeError as error:
                if not is_other:
                    self.mode.refuse_added_layers(error)
                raise

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        optimizers: Optimizer | str | Sequence[Optimizer | str] | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of the loss (or of a sum of losses), scaled, and divided by `accumulate`.

        With `optimizers`, only their parameters get gradients: for a generator's loss that runs through the
        discriminator.
        """
        losses = arguments.listed_losses(loss)
        self.follow_groups()
        only = None if optimizers is None else self._chosen_of(optimizers)
        if self._given_up.holds(losses):
            self._leave_out(only)
            return
        if self.mode.keeps_masters:
            self.mode.average_first(self.ranks.wrappers())
        try:
            self.stepper.backward(losses, only, retain_graph=retain_graph, create_graph=create_graph)
        except RuntimeError as error:
            if not self._given_up.has_broken(error, losses):
                raise
            self._leave_out(only)

    def _leave_out(self, only: Sequence[Holding] | None) -> None:
        """A loss of a batch that was given up: the next step of these optimizers is none."""
        reached = list(self.holdings.values()) if only is None else only
        self.stepper.clear(reached)
        for holding in reached:
            holding.leaves_out = True

    # --- step ---------------------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer | str | None = None) -> None:
        """Divide the gradients now, for a loop that wants to read or change them before `step`."""
        self.stepper.unscale(self._chosen(optimizer))

    def step(
        self,
        optimizer: Optimizer | str | None = None,
        closure: Callable[[], Any] | None = None,
        *,
        last: bool = False,
    ) -> StepResult:
        """Unscale, clip, step, clear the gradients, and update the scale after the last optimizer of an iteration.

        Without `optimizer` all step together: with one norm, and either all or none. Inside an accumulation window
        the call only counts; `last=True` ends the window early, and the mean is over what it holds: together with the
        last micro-step, or after a loop whose last step was counted (`if result.accumulating`).
        """
        chosen = self._chosen(optimizer)
        arguments.refuse_missing_closure(self.optimizers, [h.name for h in chosen], closure)
        if any(holding.leaves_out for holding in chosen):
            return self._left_out(chosen)
        if closure is not None:
            return self._step_with_closure(chosen, closure)
        if any(holding.misses_more and holding.has_gradients() for holding in chosen):
            holdings, is_scaled = list(self.holdings.values()), self.stepper.scale is not None
            refuse_replaced(self.models, holdings, self._names, self.mode.parameter_of, is_scaled)
        if self.accumulate > 1 and not last:
            for holding in chosen:
                self.stepper.rules.in_window(holding)
            if any(holding.held < self.accumulate for holding in chosen):
                for holding in chosen:
                    holding.count()
                return StepResult(scale=self._present_scale())
        if not compat.cuda_is_capturing():
            self.verdicts.settle()
        before = self._present_scale()
        try:
            check = self.stepper.check(chosen)
        except ProtocolError as error:
            if error.cause == "no-gradients":  # perhaps because the model has other parameters by now
                refuse_strangers(self.models, self.optimizers, self.mode.parameter_of)
            raise
        parameters = (p for h in chosen for p in h.parameters)  # seldom asked for
        names = nonfinite_names(parameters, self.name_of, check.found_inf, self._name_nonfinite)
        self.stepper.apply(chosen, check)
        self.stepper.end_iteration(chosen, check.found_inf)
        result = StepResult(check.norm, check.found_inf, before, names)
        return self._judged(result, chosen, check.found_inf, self.stepper.rules.losses_of(chosen))

    def _left_out(self, chosen: Sequence[Holding]) -> StepResult:
        """The batch was given up since its backward pass: all went back to an earlier state."""
        self.stepper.clear(chosen)
        return StepResult(None, torch.ones(()), self._present_scale())

    def _present_scale(self) -> Tensor | None:
        """A copy: the next update writes to the scale in place."""
        scale = self.stepper.scale
        return scale.clone() if scale is not None else None

    def _step_with_closure(self, chosen: Sequence[Holding], closure: Callable[[], Any]) -> StepResult:
        if len(chosen) != 1:
            raise SetupError("a closure is for one optimizer: amp.step(optimizer, closure)")
        if self.accumulate > 1:
            raise SetupError("a closure computes its own loss: accumulate inside it, and leave Amp(accumulate=) out")
        if not self.mode.takes_closures:
            raise closures.refusal(chosen[0].name, self.mode)
        self.verdicts.settle()
        norm, undone, losses = self.stepper.evaluate(chosen[0], closure)
        return self._judged(StepResult(norm, undone), chosen, undone, losses)

    def _judged(
        self, result: StepResult, chosen: Sequence[Holding], flag: Tensor, losses: Sequence[Tensor]
    ) -> StepResult:
        self.stepper.clear(chosen)
        self.statistics.end_window()
        if compat.cuda_is_capturing():  # nothing has run yet; each replay is a step, of which nobody is told
            return result
        self.verdicts.add(Verdict(result, tuple(h.name for h in chosen), losses, flag), self.policy.waits)
        return result

    def _stepped(self, verdict: Verdict) -> None:
        self._given_up.end()
        self.followers.stepped(verdict.optimizers)
        self.policy.on_good_step(self, self.verdicts.steps)

    def _skipped(self, bad: BadStep) -> None:
        self.policy.on_bad_step(self, dataclasses.replace(bad, put_back=tuple(self.statistics.put_back())))

    def zero_grad(self, optimizer: Optimizer | str | None = None) -> None:
        """Forget gradients, inside a window too. `step` does this by itself."""
        self.follow_groups()
        self.stepper.clear(self._chosen(optimizer))

    # --- state --------------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if "_checkpoint" in vars(self):  # it was made: what its parts were given is not asked for again
            arguments.refuse_late_option(name, value, _options())
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise arguments.unknown_call(name, vars(Amp))

    def __deepcopy__(self, memo: dict[int, Any]) -> Amp:
        """With its models and optimizers, as `copy.deepcopy((model, optimizer, amp))` copies each of them once."""
        return copies.copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise copies.refusal("cannot be pickled")

    @property
    def steps(self) -> int:
        """Steps that were made (skipped ones do not count)."""
        return self.verdicts.steps

    def get_scale(self) -> float:
        """The loss scale; 1 where there is none. Waits for the device."""
        self.stepper.rules.others.scale_was_told = True
        return float(self.stepper.scale) if self.stepper.scale is not None else 1.0

    def settle(self) -> None:
        """Wait for the last step's verdict: schedulers and averages are up to date then. On the CPU they always are."""
        self.verdicts.settle()

    def close(self) -> None:
        """Settle the last step, and end what runs beside the engine: `heal`'s own guard, which writes its report then.

        `with ampguard.Amp(...) as amp:` does it too. A closed engine still trains, and heals no more.
        """
        self.settle()
        self.policy.close(self)

    def __enter__(self) -> Amp:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            self.policy.close(self, error)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit for bit, inside an accumulation window too.

        Tensors are references, as in PyTorch's state_dict: save or copy them before training goes on. Raises
        PoisonedStateError where parameters, statistics or optimizer state hold NaN or Inf.
        """
        state = self.present_state()
        self.policy.saved(self, state)
        return state

    def present_state(self) -> dict[str, Any]:
        """As `state_dict`, for a policy's own use: it is not told that a checkpoint is being made."""
        self.verdicts.settle()
        with self.mode.as_trained():
            return self._checkpoint.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Raises CheckpointError before anything is changed."""
        self._load(state)
        self.policy.loaded(self)

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """As `load_state_dict`, but the random streams and the count of skipped steps go on.

        Optimizers that are still to step on gradients of the present batch leave it out, and so do those that its
        other losses are for, which were not differentiated yet. Gradients that the state holds are dropped: they were
        waiting for an optimizer that is not going to step on them.
        """
        waiting = [holding for holding in self.holdings.values() if holding.has_gradients()]
        self._load(state, rng=False, skips=False)
        self.stepper.clear(list(self.holdings.values()))
        self._leave_out(waiting)
        self._given_up.begin()

    def load_without_streams(self, state: Mapping[str, Any]) -> None:
        """As `load_state_dict`, but the random streams go on: the state is another process's."""
        self._load(state, rng=False)
        self.policy.loaded(self)

    def _load(self, state: Mapping[str, Any], rng: bool = True, skips: bool = True) -> None:
        with self.mode.as_trained():
            self._checkpoint.load(state, rng, skips)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file: whole, or not at all."""
        files.save(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that `save` wrote."""
        self.load_state_dict(files.load(path))

    def save_sharded(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint through torch.distributed.checkpoint; every rank has to call this, and writes its part.

        It can be loaded with another number of ranks. The random streams are not in it.
        """
        with self.mode.as_trained():
            sharded.save_sharded(self, folder)

    def load_sharded(self, folder: str | os.PathLike[str]) -> None:
        """Go on from `save_sharded`; every rank has to call this."""
        with self.mode.as_trained():
            sharded.load_sharded(self, folder)
        self.statistics.forget()
        self.policy.loaded(self)

    def follow_groups(self) -> None:
        """The loop may have added parameters to an optimizer, replaced some or taken some away.

        Raises SetupError for one of no model, and for a new one where the mode has cast the weights.
        """
        changed = [holding for holding in self.holdings.values() if holding.has_other_parameters()]
        if not changed:
            return
        for holding in changed:
            if holding.has_new_parameters():
                self.mode.refuse_new_parameters(holding.name)
        refuse_strangers(self.models, self.optimizers, self.mode.parameter_of)
        for holding in changed:
            holding.follow_groups()
        self._names = parameter_names(self.models)

    def poisoned_buffers(self) -> list[str]:
        """Names of the models' buffers that hold NaN or Inf, and did not when training began. Waits for the device."""
        return self._checkpoint.poisoned_buffers()

    def nonfinite_from_start(self, model: str) -> list[str]:
        """What of a model held NaN or Inf when training began: masks, say."""
        return self._checkpoint.known_of(model)

    def name_of(self, parameter: Tensor) -> str:
        """What the model calls a parameter that an optimizer holds."""
        name = self._names.get(id(self.mode.parameter_of(parameter)))
        return name or f"a flat buffer of {parameter.numel()} elements"

    def _chosen_of(self, optimizers: Optimizer | str | Sequence[Optimizer | str]) -> list[Holding]:
        several: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        return [holding for optimizer in several for holding in self._chosen(optimizer)]

    def _chosen(self, optimizer: Optimizer | str | None) -> list[Holding]:
        if optimizer is None:
            return list(self.holdings.values())
        for name, holding in self.holdings.items():
            if optimizer is holding.optimizer or optimizer == name:
                return [holding]
        raise arguments.unknown_optimizer(optimizer, list(self.holdings))


def _options() -> list[str]:
    return list(inspect.signature(Amp).parameters)
