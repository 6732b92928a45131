"""What follows a step, and so waits for it to be made: learning-rate schedulers and averages of the weights."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampguard import compat
from ampguard.errors import CheckpointError, SetupError

logger = logging.getLogger("ampguard")


class Followers:
    """Advance with their optimizer's steps, and stand still where one is skipped."""

    def __init__(
        self,
        schedulers: Any,
        averages: Any,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        in_float32: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`in_float32`: inside it the models' weights are float32, as averages have them."""
        self._in_float32 = in_float32
        self.schedulers = _listed(schedulers)
        _refuse_twice("schedulers=", self.schedulers)
        self.averages = [_with_model(average, models) for average in _listed_averages(averages)]
        _refuse_twice("ema=", [average for average, _ in self.averages])
        self._optimizer_of = [_owner(scheduler, optimizers) for scheduler in self.schedulers]
        self._optimizer_of_average = [_trainer(model, optimizers) for _, model in self.averages]
        self._counts: list[int | None] = [None] * len(self.schedulers)
        """How often each scheduler had been stepped when the last step of ours had ended."""
        self._steps_of_others = [0] * len(self.schedulers)

    def stepped(self, optimizers: Iterable[str]) -> None:
        """These optimizers have updated their parameters. An average follows the first one that trains its model."""
        names = set(optimizers)
        for index, (scheduler, owner) in enumerate(zip(self.schedulers, self._optimizer_of, strict=True)):
            if owner in names:
                self._see_steps_of_others(index)
                scheduler.step()
                self._counts[index] = compat.moves_made(scheduler)
        due = [pair for pair, owner in zip(self.averages, self._optimizer_of_average, strict=True) if owner in names]
        if due:
            with self._in_float32():
                for average, model in due:
                    update = getattr(average, "update_parameters", None) or average.update
                    update(model)

    def _see_steps_of_others(self, index: int) -> None:
        """A loop that steps them too goes through their schedule twice as fast. Once may be meant."""
        before, now = self._counts[index], compat.moves_made(self.schedulers[index])
        if before is None or now is None or now <= before:
            return
        self._steps_of_others[index] += 1
        if self._steps_of_others[index] == 2:
            logger.warning(
                "the %s in schedulers= is stepped by something else too, between two calls of amp.step(): its schedule runs "
                "faster than it says. Delete scheduler.step() in the loop, or leave the scheduler out of schedulers=.",
                type(self.schedulers[index]).__name__,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "averages": [_keeper_of(average).state_dict() for average, _ in self.averages],
            "kinds": {
                "schedulers": [_kind(scheduler) for scheduler in self.schedulers],
                "averages": [type(average).__name__ for average, _ in self.averages],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where a scheduler does not take its state; they all have theirs from before then."""
        before = [copy.deepcopy(scheduler.state_dict()) for scheduler in self.schedulers]
        try:
            for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
                scheduler.load_state_dict(saved)
            self._counts = [None] * len(self.schedulers)
        except Exception as error:
            for scheduler, own in zip(self.schedulers, before, strict=True):
                with contextlib.suppress(Exception):
                    scheduler.load_state_dict(own)
            raise CheckpointError(
                f"the checkpoint was not loaded: a scheduler does not take its state ({type(error).__name__}: {error})\n"
                "  do    give Amp the schedulers that the checkpoint was made with"
            ) from error
        for (average, _), saved in zip(self.averages, state["averages"], strict=True):
            _keeper_of(average).load_state_dict(saved)


def _kind(scheduler: Any) -> str:
    inside = scheduler.state_dict().get("_schedulers", ())  # of SequentialLR and ChainedScheduler
    return type(scheduler).__name__ + (f" of {len(inside)}" if inside else "")


def _keeper_of(average: Any) -> Any:
    """What saves an average and takes it back: itself, or the copy of the model that it keeps."""
    if callable(getattr(average, "state_dict", None)) and callable(getattr(average, "load_state_dict", None)):
        return average
    copies = [value for value in getattr(average, "__dict__", {}).values() if isinstance(value, nn.Module)]
    if len(copies) == 1:
        return copies[0]
    raise SetupError(
        f"the {type(average).__name__} in ema= cannot be saved, or put back by a rollback: it has no state_dict() and "
        "load_state_dict()\n"
        "  do    give it both, or use torch.optim.swa_utils.AveragedModel"
    )


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _refuse_twice(option: str, things: list[Any]) -> None:
    for index, thing in enumerate(things):
        if any(thing is other for other in things[:index]):
            raise SetupError(
                f"{option} holds one {type(thing).__name__} twice: it would move twice with every step\n  do    give it once"
            )


def _listed_averages(given: Any) -> list[Any]:
    """A pair (average, model) may stand alone."""
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], nn.Module)
    return [given] if is_pair and not _is_average(given[1]) else _listed(given)


def _is_average(thing: Any) -> bool:
    return callable(getattr(thing, "update_parameters", None)) or callable(getattr(thing, "update", None))


def _owner(scheduler: Any, optimizers: Mapping[str, Optimizer]) -> str:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SetupError(
            "ReduceLROnPlateau needs a metric with every step, which Amp does not know\n"
            "  do    leave it out of schedulers= and call scheduler.step(metric) yourself, after the validation"
        )
    for name, optimizer in optimizers.items():
        if getattr(scheduler, "optimizer", None) is optimizer:
            _refuse_arguments(scheduler)
            return name
    raise SetupError(
        f"the {type(scheduler).__name__} in schedulers= belongs to none of the optimizers given\n"
        "  do    make it from one of them: schedulers= are stepped whenever their optimizer was"
    )


def _refuse_arguments(scheduler: Any) -> None:
    """Those whose calls need something that Amp does not know: timm's the epoch, Swin's the count of updates."""
    step = getattr(scheduler, "step", None)
    try:
        inspect.signature(step).bind()  # type: ignore[arg-type]
    except ValueError:  # nothing is known of it
        return
    except TypeError as error:
        why = f"its step() says: {error}" if callable(step) else "it has no step()"
        raise SetupError(
            f"the {type(scheduler).__name__} in schedulers= is not stepped by a plain scheduler.step(): {why}\n"
            "  do    leave it out of schedulers= and step it yourself, `if result.stepped:` after result = amp.step()"
        ) from None


def _trainer(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> str:
    """The first optimizer that holds any parameter of the model."""
    own = {id(p) for p in compat.all_parameters(model)}
    held = {name: {id(p) for group in o.param_groups for p in group["params"]} for name, o in optimizers.items()}
    return next((name for name, ids in held.items() if ids & own), next(iter(optimizers)))


def _model_of(average: Any, models: Mapping[str, nn.Module]) -> nn.Module:
    """The model that it keeps a copy of, where that is one of several; else the first."""
    kept = (
        compat.own_children(average).values()
        if isinstance(average, nn.Module)
        else getattr(average, "__dict__", {}).values()
    )
    copies = [thing for thing in kept if isinstance(thing, nn.Module)]
    alike = [model for model in models.values() if any(_are_alike(compat.unwrapped(model), kept) for kept in copies)]
    equal = [model for model in alike if any(_are_equal(model, kept) for kept in copies)]
    return next(iter([*equal, *alike, *models.values()]))


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    return type(one) is type(other) and [p.shape for p in compat.all_parameters(one)] == [
        p.shape for p in compat.all_parameters(other)
    ]


def _are_equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(compat.all_parameters(one), compat.all_parameters(other), strict=False)
    return all(a.shape == b.shape and torch.equal(a.detach().to(b.device, b.dtype), b.detach()) for a, b in pairs)


def _with_model(average: Any, models: Mapping[str, nn.Module]) -> tuple[Any, nn.Module]:
    if isinstance(average, tuple) and len(average) == 2:
        average, model = average
    else:
        model = _model_of(average, models) if len(models) > 1 else next(iter(models.values()))
    if not _is_average(average):
        raise SetupError(
            f"ema= takes objects with update_parameters(model) or update(model), not a {type(average).__name__}\n"
            "  do    use torch.optim.swa_utils.AveragedModel, or a pair (average, model) for another model"
        )
    return average, model
