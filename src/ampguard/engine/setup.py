"""What is given to `Amp`: models and optimizers by name, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.errors import SetupError

T = TypeVar("T")


def named(given: Any, kind: type[T], what: str, call: str = "Amp(models, optimizers, precision)") -> dict[str, T]:
    """One thing, several, or a mapping of names to things, as a mapping.

    Things without names get their class as name, with a number where that is not enough; a module its own class, whatever
    is wrapped around it (`torch.compile`, DDP). Raises SetupError.
    """
    if isinstance(given, kind):
        given = [given]
    if isinstance(given, Mapping):
        things = {str(name): thing for name, thing in given.items()}
    elif isinstance(given, Iterable):
        things = _numbered(list(given))
    else:
        things = _numbered([given])
    for name, thing in things.items():
        if not isinstance(thing, kind):
            who = (
                f"{name!r} is a {type(thing).__name__},"
                if isinstance(given, Mapping)
                else f"a {type(thing).__name__} is"
            )
            raise SetupError(
                f"{what}: {who} no {kind.__name__}\n  do    {call}: one, several, or mappings of names to them"
            )
    given_twice = [
        name for name, thing in things.items() if any(thing is things[other] for other in things if other != name)
    ]
    if given_twice:
        raise SetupError(
            f"{what}: {' and '.join(map(repr, given_twice))} are the same {kind.__name__}\n  do    give it once"
        )
    if not things:
        raise SetupError(f"{call} needs at least one {kind.__name__.lower()}; {what} is empty")
    return things


def _numbered(things: list[Any]) -> dict[str, Any]:
    bare = (compat.unwrapped(thing) if isinstance(thing, nn.Module) else thing for thing in things)
    names = [type(thing).__name__ for thing in bare]
    return {
        name if names.count(name) == 1 else f"{name} {names[:i].count(name)}": thing
        for i, (name, thing) in enumerate(zip(names, things, strict=True))
    }


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """The name of each parameter by identity; with the model's name in front where there are several."""
    names: dict[int, str] = {}
    for model_name, model in models.items():
        for name, parameter in compat.named_parameters(compat.unwrapped(model)).items():
            names.setdefault(id(parameter), name if len(models) == 1 else f"{model_name}.{name}")
    return names


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _itself(parameter: Tensor) -> Tensor:
    return parameter


def refuse_strangers(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    parameter_of: Callable[[Tensor], Tensor] = _itself,
) -> dict[str, list[Tensor]]:
    """The flat buffers of each optimizer: tensors that are no model's parameter, but lie in the same memory.

    Raises SetupError for an optimizer that updates anything else, or a parameter that another one updates too.
    `parameter_of` gives the model's parameter for what an optimizer holds.
    """
    own = {id(p) for model in models.values() for p in compat.all_parameters(model)}
    memory = {compat.storage_key(p) for model in models.values() for p in compat.all_parameters(model)} - {0}
    flat: dict[str, list[Tensor]] = {}
    owner: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        others = [p for p in parameters_of(optimizer) if id(parameter_of(p)) not in own]
        strangers = [p for p in others if compat.storage_key(p) not in memory]
        if strangers:
            raise SetupError(_of_no_model(name, strangers, parameters_of(optimizer), models))
        for p in parameters_of(optimizer):
            if owner.setdefault(id(p), name) != name:
                raise SetupError(
                    f"a parameter of shape {tuple(p.shape)} is updated by `{owner[id(p)]}` and by `{name}`: the second "
                    "would step with gradients that the first has cleared\n  do    give it to one optimizer"
                )
        flat[name] = others
    return flat


def _of_no_model(name: str, strangers: Sequence[Tensor], all_: Sequence[Tensor], models: Mapping[str, Any]) -> str:
    shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3]) + (", ..." if len(strangers) > 3 else "")
    return (
        f"{len(strangers)} of {len(all_)} parameters of `{name}` (shapes {shapes}) belong to none of the models given "
        f"({', '.join(f'`{m}`' for m in models)})\n"
        "  why   the model was moved, copied or rebuilt after the optimizer was made, or it is not among the models\n"
        "  do    make the optimizer from the model's present parameters, or give Amp the model they belong to"
    )
