"""A policy: told of every verdict, in the order of the steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampguard.errors import NonfiniteError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp

logger = logging.getLogger("ampguard")


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step that was not finite. Parameters and optimizer state were not touched by it."""

    step: int
    optimizers: tuple[str, ...]
    parameters: tuple[str, ...] | None
    """Whose gradients were not finite; None where they were not recorded."""
    loss_scale: float
    loss_is_finite: bool
    in_a_row: int
    """Steps of this optimizer skipped one after another, whatever others did in between."""
    patience: int
    put_back: tuple[str, ...] = ()
    """Buffers that the forward pass had made non-finite (running statistics), and that hold their earlier values again."""

    @property
    def is_settling(self) -> bool:
        """Whether it may be no more than a loss scale that is still too high."""
        return self.loss_is_finite and self.loss_scale > 1.0

    def __str__(self) -> str:
        what = "the gradients are not finite" if self.loss_is_finite else "the loss is not finite"
        names = list(self.parameters or ())
        where = f", first in {', '.join(f'`{n}`' for n in names[:3])}" if names and self.loss_is_finite else ""
        more = f" ({len(names)} parameters)" if len(names) > 3 and self.loss_is_finite else ""
        scale = f", loss scale {self.loss_scale:g}" if self.loss_scale != 1.0 else ""
        return f"step {self.step} of {', '.join(f'`{o}`' for o in self.optimizers)}: {what}{where}{more}{scale}"


class Policy:
    """The step was skipped already when `on_bad_step` is called."""

    name = ""
    waits = False
    """Whether it must know of a bad step before the next one begins: then every step waits for the device."""

    def prepare(self, amp: Amp) -> None:
        """An engine is being made: get what is needed, or raise before models and optimizers are changed."""

    def begin(self, amp: Amp) -> None:
        """The first forward pass is about to begin."""

    def saved(self, amp: Amp, state: Mapping[str, Any]) -> None:
        """A state is given away to be saved; its tensors are references. A resumed run goes on from there."""

    def loaded(self, amp: Amp) -> None:
        """Another state was loaded: the training goes on from there."""

    def close(self, amp: Amp, error: BaseException | None = None) -> None:
        """An engine is not used any more: end what runs beside it. `error`: what has ended the training."""

    def on_good_step(self, amp: Amp, step: int) -> None:
        """A step was made."""

    def on_bad_step(self, amp: Amp, bad: BadStep) -> None:
        """A step was skipped. After `patience` in a row, raise whatever the policy: this does not go away."""
        if bad.in_a_row >= bad.patience:
            what = f"{bad.in_a_row} steps in a row were skipped. {bad}"
            raise NonfiniteError(f"{what}\n{advice(NO_SINGLE_BATCH, amp.mode.scales_loss)}", bad.parameters or ())


def advice(why: str, scales_loss: bool) -> str:
    """Why a bad step ends the run, and what to do. `scales_loss`: whether the precision's range may be too small."""
    elsewhere = "; or try precision='bf16', or force_fp32=[...] for the modules that it names" if scales_loss else ""
    do = f"run the script with `ampguard run`: it names the operator, the line and a fix{elsewhere}"
    return f"  why   {why}\n  do    {do}"


NO_SINGLE_BATCH = "skipping does not help any more: it is no single bad batch, and no loss scale that is still settling"
ADVICE = advice(NO_SINGLE_BATCH, scales_loss=True)
