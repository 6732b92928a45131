"""What a half-migrated loop still does beside an `Amp`: a GradScaler that scales too, an autocast region in float16."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ampguard import compat
from ampguard.engine import misuse
from ampguard.engine.holding import Holding

logger = logging.getLogger("ampguard")

LOOKS_INTO_GRAPH = 3
"""Backward passes whose graph is looked through for float16, at most."""

_alive: weakref.WeakSet[LeftOver] = weakref.WeakSet()
"""Of each Amp: while there is one, a GradScaler that is stepped and has scaled nothing was left over."""


class LeftOver:
    """Finds the GradScaler of the loop by what it has done; never at a step where nothing is odd.

    Of the odd steps of a kind (a loop that clips by hand is odd in every step) the first is looked at, the second, the
    fourth, the eighth and so on.
    """

    def __init__(self, scales_loss: bool, computes_in: torch.dtype, holdings: Sequence[Holding]) -> None:
        self.follow(holdings)
        self._may_compute_in_float16 = scales_loss or computes_in == torch.float16
        self._odd: dict[str, int] = {}
        self._looks = 0
        self._began = compat.follow_scalers(_explain_unused)

    def follow(self, holdings: Sequence[Holding]) -> None:
        """These are the optimizers of an Amp."""
        self.optimizers = frozenset(id(holding.optimizer) for holding in holdings)
        """By identity: the Amp keeps them alive."""
        _alive.add(self)

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Raises ProtocolError where a GradScaler has multiplied a loss; warns of float16 in a mode without a loss scale."""
        factors = [factor for loss in losses for factor in compat.tensor_factors(loss)]
        if factors and self.is_worth_a_look("factor"):
            scaler = compat.scaler_with(factors)
            if scaler is not None:
                raise misuse.scaled_already(_scale(scaler))
        if not self._may_compute_in_float16 and self._looks < LOOKS_INTO_GRAPH:
            self._looks += 1
            self._look_for_float16(losses)

    def _look_for_float16(self, losses: Sequence[Tensor]) -> None:
        node = compat.first_node_of(losses, torch.float16)
        if node is not None:
            self._looks = LOOKS_INTO_GRAPH
            logger.warning(
                "the loss comes out of float16 (%s), and this precision has no loss scale: gradients below 6e-8 are lost. "
                "Delete the loop's own torch.autocast(..., dtype=torch.float16), or use Amp(precision='fp16').",
                node,
            )

    def multiplied(self, holding: Holding) -> float | None:
        """By which scale of a GradScaler these gradients were multiplied and not divided; None: by none that is known.

        A GradScaler that has been updated since it began takes care of other optimizers.
        """
        if not self.is_worth_a_look(f"multiplied {holding.name}"):
            return None
        for scaler in compat.scalers_since(self._began):
            if not compat.has_been_updated(scaler) and not compat.has_divided(scaler, holding.optimizer):
                return _scale(scaler)
        return None

    def divided(self, holding: Holding) -> float | None:
        """By which scale of a GradScaler these gradients were divided. (It divides without changing their versions.)"""
        scalers = compat.scalers_since(self._began)
        return next((_scale(s) for s in scalers if compat.has_divided(s, holding.optimizer)), None)

    def is_worth_a_look(self, kind: str) -> bool:
        """Whether this odd thing is the first of its kind, the second, the fourth and so on."""
        self._odd[kind] = count = self._odd.get(kind, 0) + 1
        return count & (count - 1) == 0


def _scale(scaler: object) -> float:
    scale = compat.loss_scale(scaler)
    return float(scale) if scale is not None else 1.0


def _explain_unused(call: str, optimizer: object | None) -> Exception | None:
    """What a GradScaler raises that is asked to unscale or step an Amp's optimizer, or to update, and has scaled nothing."""
    is_ours = any(optimizer is None or id(optimizer) in left_over.optimizers for left_over in _alive)
    return misuse.left_over_scaler(call) if is_ours else None
