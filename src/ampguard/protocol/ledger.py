"""What the machine keeps of an optimizer (whose gradients are summed up in it, by what each was divided) and of a scaler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import SupportsFloat

from ampguard.protocol.events import Backward, Breach, Key, Place
from ampguard.protocol.states import Stage

TOLERANCE = 1e-3


@dataclass(slots=True)
class Contribution:
    """The gradients of one backward pass. `scale` is None where its loss was not scaled."""

    scale: SupportsFloat | None
    where: Place
    divided_by: list[SupportsFloat] = field(default_factory=list)

    @property
    def factor(self) -> float:
        """The gradients as they are over what they should be."""
        if len(self.divided_by) == 1 and self.divided_by[0] is self.scale:
            return 1.0
        factor = float(self.scale) if self.scale is not None else 1.0
        for scale in self.divided_by:
            factor /= float(scale)
        return factor

    @property
    def is_right(self) -> bool:
        """Whether they are what they should be (or it cannot be told any more)."""
        return not abs(self.factor - 1.0) >= TOLERANCE


@dataclass(slots=True)
class Ledger:
    """The gradients that one optimizer holds, and what was done with them."""

    stage: Stage = Stage.EMPTY
    parts: list[Contribution] = field(default_factory=list)
    has_leftovers: bool = False
    """Gradients of an earlier step were still there when new ones came."""
    piled_up: int = 0
    """Steps in a row that were made with leftovers."""
    piled_in_all: int = 0
    """Such steps of the run."""
    leftover_from: Place = None
    pending: Breach | None = None
    """A breach that does harm once the optimizer steps."""
    unscaled_at: Place = None
    by_hand: bool = False
    """The last division was the script's own."""
    stepped_at: Place = None
    cleared_at: Place = None
    cleared_part: Contribution | None = None
    """The last gradients that were cleared before they were used."""
    refused: str | None = None
    """As what PyTorch's refusal to unscale these gradients was told: the script may have caught it and stepped with them."""
    wasted: Place = None
    """The last backward pass whose gradients were cleared before anybody used them."""
    wasted_passes: int = 0
    """How many since the last step."""
    usually_wasted: int = 0
    """As many as that at most, between two steps so far."""
    session: Stage = Stage.EMPTY
    """What the scaler itself remembers since its last update: EMPTY, UNSCALED or USED."""
    backwards_since_unscale: int = 0
    backwards_since_step: int = 0
    backwards_per_step: int = 0
    """In the last iteration that was stepped."""
    steps: int = 0
    cleared_steps: int = 0
    """Those behind a backward pass whose gradients were cleared before them."""
    by_scaler: bool = False
    """The scaler has stepped with them, and did not skip it."""
    repeated: int = 0
    """Steps that the script made itself, right behind such a one."""
    idle_steps: int = 0
    """Steps in a row with what an earlier one had left, because no backward pass came in between."""
    empty_steps: int = 0
    """Steps in a row with gradients that were cleared and that no backward pass has added to since."""

    @property
    def steps_without_a_pass(self) -> int:
        """Steps in a row since a backward pass added gradients."""
        return self.idle_steps or self.empty_steps

    @property
    def is_wasteful(self) -> bool:
        """Whether more passes than ever before were cleared unused since the last step."""
        return self.steps > 0 and self.wasted_passes > self.usually_wasted

    def add(self, scale: SupportsFloat | None, where: Place) -> None:
        """A backward pass added gradients."""
        self.by_scaler = False
        if self.stage is Stage.USED:
            self.has_leftovers = True
            self.leftover_from = self.parts[-1].where if self.parts else None
            self.parts = []
        self.parts.append(Contribution(scale, where))
        self.cleared_part = None

    def divide(self, scale: SupportsFloat) -> None:
        for part in self.parts:
            part.divided_by.append(scale)

    def multiply(self, scale: SupportsFloat) -> None:
        """They carry a scale again; what was wrong with them stays wrong."""
        for part in self.parts:
            part.scale = scale if part.is_right else part.factor * float(scale)
            part.divided_by = []

    def clear(self, where: Place) -> None:
        """The gradients are gone."""
        if self.parts and self.stage is not Stage.USED:
            self.cleared_part = self.parts[-1]
            self.wasted = self.cleared_part.where
            self.wasted_passes += 1
        self.cleared_at = where
        self.parts = []
        self.pending = self.refused = None
        self.has_leftovers = False
        self.piled_up = 0

    def use(self, where: Place) -> None:
        """The optimizer has stepped with them."""
        self.stepped_at = where
        self.steps += 1
        self.usually_wasted, self.wasted_passes = max(self.usually_wasted, self.wasted_passes), 0
        self.pending = self.refused = None
        self.piled_up = self.piled_up + 1 if self.has_leftovers else 0
        self.piled_in_all += self.has_leftovers
        self.has_leftovers = False
        if self.backwards_since_step:
            self.backwards_per_step = self.backwards_since_step
        self.backwards_since_step = 0

    def worst(self) -> Contribution | None:
        """The part whose factor is farthest from 1."""
        return max(self.parts, key=lambda part: abs(math.log2(part.factor)) if part.factor > 0 else 0.0, default=None)


@dataclass(slots=True)
class Session:
    """What happened with a scaler since its last update."""

    touched: list[Key] = field(default_factory=list)
    stepped: list[Key] = field(default_factory=list)
    updated_at: Place = None
    loaded_at: Place = None
    """Where its state was loaded since."""
    updates: int = 0
    last_backward: Backward | None = None
    """The last backward pass before the last update."""


def scaler_of(scale: object) -> Key | None:
    """Whose scale it is, where it says so."""
    return getattr(scale, "watch", None)
