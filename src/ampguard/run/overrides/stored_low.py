"""O3 and bf16-true from outside: between two steps, weights hold nothing that the low precision cannot.

The script's parameters stay float32 tensors, because averages of weights, DDP and code outside modules rely on it; what
is in them is float16 or bfloat16. An update is computed in float32, with moments in float32, and rounded as it is
stored: in O3 to the nearest float16, in bf16-true at random, so that small updates are not lost. Weights that the script
itself made float16 are updated in float16, by its own optimizer: there an eps that vanishes is raised.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.step.rounding import stochastic_round_
from ampguard.run.overrides.gradients import parameters_of
from ampguard.run.overrides.ledger import Ledger

EPS = 1e-4
"""Above float16's smallest normal number (6.1e-5): an eps of 1e-8 is 0 in float16, and 0 / (0 + eps) is NaN."""


class StoredLow:
    """Rounds weights as their optimizers store them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rounded: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """Weights that were rounded once, by identity."""
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def before(self, optimizer: Optimizer, weights: list[Tensor], dtype: torch.dtype) -> None:
        """A step is about to be made: it begins from low-precision weights."""
        new = [weight for weight in weights if id(weight) not in self._rounded]
        if new:
            with compat.unseen():
                for weight in new:
                    weight.copy_(weight.to(dtype))
                    self._rounded[id(weight)] = weight
        own = dtype == torch.float16 and any(p.dtype == dtype for p in parameters_of(optimizer))
        for before, after in _raise_eps(optimizer) if own else ():
            self._ledger.done(
                f"eps of {type(optimizer).__name__} raised from {before:g}, {_too_small(before)}, to {after:g}"
            )

    @torch.no_grad()
    def after(self, optimizer: Optimizer, weights: list[Tensor], dtype: torch.dtype) -> None:
        """A step was made. What is computed here is no operation of the script's."""
        with compat.unseen():
            for weight in weights:
                if weight.grad is None:
                    continue
                if dtype == torch.bfloat16:
                    low = torch.empty_like(weight, dtype=dtype)
                    stochastic_round_(low, weight, self._generator(weight.device))
                    weight.copy_(low)
                    continue
                weight.copy_(weight.to(dtype))

    def _generator(self, device: torch.device) -> torch.Generator:
        """Of our own: the script's random numbers are left alone."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]


def _too_small(eps: float) -> str:
    """What such an eps is in float16, in words."""
    return "which is 0 in float16" if float(torch.tensor(eps).half()) == 0 else "which float16 cannot hold exactly"


def _raise_eps(optimizer: Optimizer) -> list[tuple[float, float]]:
    """Raise each eps that vanishes in float16. Returns (before, after) of those that were changed."""
    changed = []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and eps < torch.finfo(torch.float16).smallest_normal:
            group["eps"] = EPS
            changed.append((eps, EPS))
    return changed
