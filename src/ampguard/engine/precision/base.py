"""float32, and the base of every other mode: each method is harmless."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampguard.engine.precision.weights import LowWeights
from ampguard.engine.step import GradientCheck, apply_update
from ampguard.errors import CheckpointError, SetupError


class Precision:
    """The model computes and is updated in float32. Also called O0.

    A mode may change the models and optimizers once (`convert`), wrap the forward pass (`autocast`), and update in its
    own way (`apply`).
    """

    name = "fp32"
    autocast_dtype: torch.dtype | None = None
    """What autocast computes in; None: autocast is off."""
    weights_dtype: torch.dtype = torch.float32
    """What the models' weights are."""
    keeps_masters = False
    """Whether optimizers update float32 copies of lower weights."""
    scales_loss = False
    """Whether float16 gradients need a loss scale."""

    takes_closures = True
    """Whether an optimizer may compute its losses itself (LBFGS)."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.low_weights: LowWeights | None = None
        """What `convert` has cast."""
        self.notes: list[str] = []
        """What was changed beside the precision itself, to be told to the user."""

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The type of weights that `convert` casts; None where it casts none."""
        return self.weights_dtype if self.weights_dtype != torch.float32 else None

    def refuse_if_unsupported(self, models: Sequence[nn.Module]) -> None:
        """Raise PrecisionError where this device or these models cannot do it. Nothing was changed yet."""

    def convert(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], in_fp32: Sequence[nn.Module]
    ) -> None:
        """Change models and optimizers; what lies inside the modules `in_fp32` stays float32."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For the forward pass and the loss. Where autocast is off, one around it is left."""
        if self.autocast_dtype is None:
            return torch.autocast(self.device_type, enabled=False)
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Global settings of PyTorch's, for forward and backward passes."""
        return contextlib.nullcontext()

    def adding(self) -> contextlib.AbstractContextManager[Any]:
        """For a backward pass, which adds to the gradients that are held."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def evaluation(self, precision: Precision) -> Iterator[None]:
        """For an evaluation in another precision than the training's."""
        with self.in_float32(), precision.autocast():
            yield

    def in_float32(self) -> contextlib.AbstractContextManager[None]:
        """The models' weights are float32 inside, for whoever reads them or calls a model."""
        return contextlib.nullcontext() if self.low_weights is None else self.low_weights.widened(self.master_of)

    def as_trained(self) -> contextlib.AbstractContextManager[None]:
        """The models' weights are those that are trained, inside `in_float32` too: for checkpoints."""
        return contextlib.nullcontext() if self.low_weights is None else self.low_weights.narrowed(self.master_of)

    def master_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """What a model's low-precision weight is in float32, by what is kept for it; None where nothing is."""
        return None

    def average_first(self, wrappers: Sequence[nn.parallel.DistributedDataParallel]) -> None:
        """These average gradients over ranks, each at the end of a backward pass that is not inside its `no_sync()`."""

    def before_forward(self) -> None:
        """A forward pass in training is about to begin."""

    def before_reading(self) -> None:
        """The models' weights are about to be read: by an evaluation, or for a checkpoint."""

    def before_backward(self) -> None:
        """A backward pass is about to begin."""

    def after_backward(self) -> None:
        """A backward pass has ended."""

    def cleared(self, optimizer: Optimizer) -> None:
        """The gradients of what an optimizer holds were forgotten."""

    def apply(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> None:
        """Update the parameters with checked gradients, or leave them as they are."""
        apply_update(optimizer, check, max_norm)

    def refuse_direct_step(self, name: str) -> None:
        """Raise ProtocolError where `optimizer.step()` of the optimizer called `name` would not do the update right."""

    def refuse_new_parameters(self, name: str) -> None:
        """Raise SetupError where parameters cannot be added to the optimizer called `name` any more."""
        if self.weights_dtype != torch.float32:
            raise SetupError(
                f"parameters were added to `{name}`, or replaced in it, after Amp was made, which has cast the model for "
                f"{self.name}\n"
                "  do    give the optimizer all its parameters first; freeze those that learn later (requires_grad_(False))"
            )

    def refuse_added_layers(self, error: RuntimeError) -> None:
        """Raise SetupError where a forward pass may have failed because layers came into the model after it was cast."""
        added = self.low_weights.added_since() if self.low_weights is not None else []
        if added:
            names = ", ".join(f"`{name}`" for name in added[:3]) + (f" and {len(added) - 3} more" if added[3:] else "")
            raise SetupError(
                f"{names}: in the model since Amp was made, which has cast the model for {self.name}, and in float32\n"
                f"  why   {error}\n"
                "  do    put all layers into the model, and their parameters into the optimizer, before Amp(...) is made"
            ) from error

    def parameter_of(self, held: torch.Tensor) -> torch.Tensor:
        """The model's parameter for what the optimizer holds: another one where it holds a master copy."""
        return held

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside models and optimizers."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where `state` is not of this mode; nothing is loaded."""
        if state:
            raise CheckpointError(f"a state of {self.name} holds nothing of its own, this one holds {sorted(state)}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `check_state` has accepted."""
