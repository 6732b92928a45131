"""What can happen to gradients, told to the machine as values, and what the machine answers.

Optimizers and scalers are opaque keys, places are opaque too (a line of a script, or nothing). A loss scale is
anything that `float()` understands: the same object means the same scale, and only different objects are compared,
so that a scale that lives on a device is read only where it may have changed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

Key = Hashable
Place = Any


@dataclass(slots=True)
class Backward:
    """A loss was differentiated. `scale` is None where it was not scaled; `reached`: whose gradients it changed.

    `also_plain`: the loss was a sum of a scaled and an unscaled part.
    """

    reached: tuple[Key, ...]
    scale: SupportsFloat | None = None
    where: Place = None
    also_plain: bool = False


@dataclass(slots=True)
class Unscale:
    """A scaler divides an optimizer's gradients. `inside_step`: because its step asks for it."""

    optimizer: Key
    scaler: Key
    scale: SupportsFloat
    where: Place = None
    inside_step: bool = False


@dataclass(slots=True)
class Divided:
    """The script itself has divided an optimizer's gradients by a scaler's scale; the scaler knows nothing of it."""

    optimizer: Key
    scaler: Key
    scale: SupportsFloat
    where: Place = None


@dataclass(slots=True)
class Rescale:
    """True gradients of an optimizer were multiplied by the scale again: further backward passes are to add to them."""

    optimizer: Key
    scaler: Key
    scale: SupportsFloat
    where: Place = None


@dataclass(slots=True)
class Read:
    """A norm of gradients was computed; with `clips`, they were made smaller by it."""

    optimizer: Key
    where: Place = None
    clips: bool = True


@dataclass(slots=True)
class Step:
    """An optimizer has stepped: through a scaler (then maybe `skipped`), or directly (`scaler` is None).

    `unscales_with`: the scale by which the step itself divides, in an optimizer that unscales as it steps.
    `is_untouched`: nobody but the known calls has written to the gradients since their backward pass.
    """

    optimizer: Key
    scaler: Key | None = None
    where: Place = None
    skipped: bool = False
    unscales_with: SupportsFloat | None = None
    is_untouched: bool = True
    found_inf: bool | None = None
    by_closure: bool = False
    """A closure has made new gradients in the scaler's step, after that had unscaled."""
    was_divided: bool = False
    """The scaler was seen to divide in this step. It remembers what it has divided by the object that it was given, so a
    wrapper around an optimizer is another one to it."""


@dataclass(slots=True)
class Update:
    """A scaler's scale is updated: what it knew of its optimizers is forgotten."""

    scaler: Key
    where: Place = None


@dataclass(slots=True)
class Clear:
    """An optimizer's gradients were set to zero or to None."""

    optimizer: Key
    where: Place = None


@dataclass(slots=True)
class Refused:
    """PyTorch raised: `call` is the method, `reason` one of `REASONS`."""

    call: str
    reason: str
    scaler: Key
    optimizer: Key | None = None
    where: Place = None
    found_inf: bool | None = None
    weights_moved: bool = False
    """The parameters were written to since the optimizer's gradients were unscaled, by no optimizer's step."""
    window: int | None = None
    """By which whole number the loss was divided whose gradients were added to unscaled ones."""


Event = Backward | Unscale | Divided | Rescale | Read | Step | Update | Clear | Refused

REASONS = {
    "never-scaled": "Attempted {call} but _scale is None",
    "unscaled-before": "unscale_() has already been called on this optimizer since the last update().",
    "unscaled-after-step": "unscale_() is being called after step().",
    "stepped-before": "step() has already been called since the last update().",
    "no-checks-for-optimizer": "No inf checks were recorded for this optimizer.",
    "no-checks-before-update": "No inf checks were recorded prior to update.",
    "half-gradients": "Attempting to unscale FP16 gradients.",
    "closure": "Closure use is not currently supported if GradScaler is enabled.",
}
"""What PyTorch says for each reason."""


def reason_of(message: str) -> str | None:
    """Which of PyTorch's protocol errors this message is; None for any other error."""
    if "but _scale is None" in message:
        return "never-scaled"
    return next((reason for reason, text in REASONS.items() if text in message), None)


@dataclass(slots=True)
class Breach:
    """The protocol was broken: `cause` is a code of DIAGNOSIS.md.

    `first` and `again` are the two places; `factor` says by how much the gradients are wrong (the wrong over the
    right ones), where that is one number.
    """

    cause: str
    optimizer: Key | None = None
    scaler: Key | None = None
    first: Place = None
    again: Place = None
    factor: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
