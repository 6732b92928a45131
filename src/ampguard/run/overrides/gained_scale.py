"""A loss scale for scripts that have none: gradients are divided again before anybody sees them.

The loss is multiplied, backward runs, and every `.grad` is divided as backward returns. What stood there before (an
accumulation window) is multiplied first: both are powers of two, so nothing is rounded. Clipping, logging, gradients
changed by hand, several optimizers and several losses then need no care, and the scale may change at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.engine.casting import tensors_in
from ampguard.engine.step.scale import LossScale
from ampguard.run.overrides.inner_gradients import InnerGradients
from ampguard.run.overrides.unscaled_hooks import unscaled_hooks

HALF_LOSS_SCALE = 2.0**15
"""The largest that a float16 loss survives: 65536 is Inf in float16."""


class GainedScale:
    """The scale, and what the guard asks of a scaler: `get_scale`, `is_enabled`."""

    takes_back = True
    """Gradients that the scale alone has spoilt, and that no optimizer holds, come out as 0."""

    def __init__(self) -> None:
        self._state: LossScale | None = None
        self._attempted = self._found_inf = False
        self._halvings = 0
        self._meets_half_losses = False
        self.running = 1.0
        """What the gradients of the backward pass that runs are multiplied by."""
        self.inner = InnerGradients(lambda: self.running)

    @property
    def _scale(self) -> Tensor | None:
        """Where `compat.loss_scale` looks for it."""
        return self._state.value if self._state is not None else None

    def is_enabled(self) -> bool:
        return True

    @property
    def is_in_use(self) -> bool:
        """Whether any loss was multiplied yet."""
        return self._state is not None

    def get_scale(self) -> float:
        return float(self._state.value) if self._state is not None else 1.0

    def lower(self, halvings: int) -> None:
        """Let the scale fall before the next loss is multiplied."""
        self._halvings = max(self._halvings, halvings)

    def see(self, output: Any) -> None:
        """What a model returns, before it is cast: where that is a loss in float16, its gradient is the scale itself."""
        if not self._meets_half_losses:
            self._meets_half_losses = any(
                t.dtype == torch.float16 and t.numel() == 1 and t.requires_grad for t in tensors_in(output)
            )

    def attempted(self, was_finite: bool) -> None:
        """An optimizer was to step."""
        self._attempted = True
        self._found_inf = self._found_inf or not was_finite

    def scaled(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The losses times the scale; after an attempted step the scale is brought up to date first."""
        if self._state is None:
            self._state = LossScale(losses[0].device)
        if self._attempted:
            self._state.update([torch.tensor(float(self._found_inf))])
            self._attempted = self._found_inf = False
        if self._halvings:
            self._state.value.mul_(2.0**-self._halvings)
            self._halvings = 0
        is_half = self._meets_half_losses or any(loss.dtype == torch.float16 for loss in losses)
        if is_half and self.get_scale() > HALF_LOSS_SCALE:
            self._state.value.fill_(HALF_LOSS_SCALE)
        return tuple(self._state.scale(loss) for loss in losses)

    def backward(self, run: Callable[[], Any], leaves: Callable[[], Iterable[Tensor]]) -> Any:
        """`run` a backward pass of scaled losses so that the leaves' gradients come out unscaled."""
        scale = self.get_scale()
        multiply((*leaves(), *self.inner.retained()), scale)
        try:
            with unscaled_hooks((*leaves(), *self.inner.hooked()), scale, multiply):
                self.running = scale
                return run()
        finally:
            self.running = 1.0
            multiply((*leaves(), *self.inner.retained()), 1.0 / scale)
            self.inner.differentiated()


@torch.no_grad()
def multiply(leaves: Iterable[Tensor], factor: float) -> None:
    """Every gradient there is, in place."""
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    plain = [g for g in gradients if g.layout == torch.strided]
    with compat.unseen():
        if plain:
            compat.multiply_all_(plain, factor)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.mul_(factor)
