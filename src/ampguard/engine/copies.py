"""`copy.deepcopy` of an `Amp`, or of what holds one (a trainer, an average of a module that keeps its engine)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ampguard.engine.setup import parameter_names
from ampguard.errors import SetupError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp


def copied(amp: Amp, memo: dict[int, Any]) -> Amp:
    """With copies of its models and optimizers, and all that goes by identity or by hooks made anew for these.

    Raises SetupError where the models' weights were cast or lie in flat buffers: PyTorch's copies are not so.
    """
    if amp.mode.low_dtype is not None:
        raise refusal(f"in {amp.mode.name} cannot be copied: it has cast this model's weights, and not a copy's")
    if any(holding.flat for holding in amp.holdings.values()):
        raise refusal("over flat buffers cannot be copied: the copy of a model does not lie in the copy of a buffer")
    twin = object.__new__(type(amp))
    memo[id(amp)] = twin
    vars(twin).update({key: copy.deepcopy(value, memo) for key, value in vars(amp).items()})
    for name, holding in twin.holdings.items():
        holding.take_gradients(amp.holdings[name].parameters)
    twin.stepper.was_copied()
    twin._names = parameter_names(twin.models)
    return twin


def refusal(why: str) -> SetupError:
    """An `Amp` that is to be copied or pickled."""
    return SetupError(
        f"an Amp {why}\n"
        "  do    make model, optimizer and Amp anew and give them amp.state_dict(), by amp.load_state_dict(state) or "
        "amp.save(path) and amp.load(path)"
    )
