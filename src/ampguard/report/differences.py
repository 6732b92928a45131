"""What another precision does to the outputs of a model's modules: written by a run, read by a comparison."""

from __future__ import annotations

import msgspec


class Difference(msgspec.Struct, frozen=True):
    """The worst that one precision does to one module's output.

    `error`: its relative difference from float32's in the 2-norm, `lost`: the share of elements that are finite in float32
    only; `input_error` and `input_lost`: the same of what it was given then. `step`: the training steps made before.
    """

    module: str
    kind: str
    precision: str
    error: float
    input_error: float
    lost: float
    input_lost: float
    step: int

    @property
    def badness(self) -> tuple[bool, int, float, float]:
        """The larger the worse. Worst is where finite inputs become something else, and there the innermost module."""
        loses = self.lost > 0.0 and self.input_lost == 0.0
        depth = self.module.count(".") + bool(self.module) if loses else 0
        return loses, depth, self.lost, self.error
