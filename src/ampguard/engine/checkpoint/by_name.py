"""Weights and optimizer state under the names that the models give them, as torch.distributed.checkpoint wants them.

PyTorch makes the state of an optimizer that has none by a step without effect. That step must not stay: it counts as one,
and a parameter that no loss has reached yet has no state, in the run that goes on either.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard.engine.checkpoint.optimizers import load_optimizer
from ampguard.engine.setup import parameters_of

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp


def present_state(amp: Amp) -> dict[str, Any]:
    """What is to be saved."""
    state = _state(amp)
    for optimizer, groups in _groups_of(amp, state):
        if not optimizer.state:
            for name in _names(groups):
                state["optimizers"]["state"].pop(name, None)
    return state


def to_load_into(amp: Amp, known: Collection[str]) -> dict[str, Any]:
    """Tensors of their own, for all that a checkpoint may hold; `known`: the names of what it holds."""
    with _without_state(amp):
        state = _apart(_state(amp))
    of_parameters = state["optimizers"]["state"]
    for name in list(of_parameters):
        if not any(f"optimizers.state.{name}.{entry}" in known for entry in of_parameters[name]):
            del of_parameters[name]
    return {"models": state["models"], "optimizers": state["optimizers"]}


def load(amp: Amp, state: Mapping[str, Any]) -> None:
    """Give models and optimizers what was loaded."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(_all_models(amp), state["models"])
    of_parameters = state["optimizers"]["state"]
    for optimizer, groups in _groups_of(amp, state):
        numbers = {name: number for number, name in enumerate(_names(groups))}
        saved = {
            "state": {number: of_parameters[name] for name, number in numbers.items() if name in of_parameters},
            "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
        }
        load_optimizer(optimizer, saved)


def _state(amp: Amp) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    is_new = [optimizer for optimizer in amp.optimizers.values() if not optimizer.state]
    with amp.stepper.stepping(), _without_gradients(is_new):
        models, optimizers = get_state_dict(_all_models(amp), list(amp.optimizers.values()))
    for optimizer in is_new:
        optimizer.state.clear()
    return {"models": models, "optimizers": optimizers}


def _all_models(amp: Amp) -> nn.Module:
    """One module that holds all models, so that every parameter has one name."""
    return nn.ModuleDict({f"model_{number}": model for number, model in enumerate(amp.models.values())})


def _groups_of(amp: Amp, state: Mapping[str, Any]) -> Iterator[tuple[Optimizer, list[dict[str, Any]]]]:
    """Each optimizer, with its groups in the state, where those of all stand one behind another."""
    groups = iter(state["optimizers"]["param_groups"])
    for optimizer in amp.optimizers.values():
        yield optimizer, [next(groups) for _ in optimizer.param_groups]


def _names(groups: list[dict[str, Any]]) -> list[str]:
    return [name for group in groups for name in group["params"]]


@contextlib.contextmanager
def _without_state(amp: Amp) -> Iterator[None]:
    before = {name: optimizer.state for name, optimizer in amp.optimizers.items()}
    try:
        for optimizer in amp.optimizers.values():
            optimizer.state = defaultdict(dict)
        yield
    finally:
        for name, optimizer in amp.optimizers.items():
            optimizer.state = before[name]


@contextlib.contextmanager
def _without_gradients(optimizers: list[Optimizer]) -> Iterator[None]:
    """PyTorch makes no state where there are gradients."""
    held = [(p, p.grad) for optimizer in optimizers for p in parameters_of(optimizer) if p.grad is not None]
    try:
        for p, _ in held:
            p.grad = None
        yield
    finally:
        for p, gradient in held:
            p.grad = gradient


def _apart(value: Any) -> Any:
    """Tensors to load into that are not yet the model's: a file that ends half way must leave it as it is."""
    if isinstance(value, dict):
        return {key: _apart(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_apart, value))
    return value.detach().clone() if isinstance(value, Tensor) else value
