"""What a call of `amp.step` did."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class StepResult:
    """Every property but `accumulating` waits for the device where the numbers are not on the CPU.

    So a loop that reads none of them in a step does not wait in it.
    """

    __slots__ = ("_found_inf", "_names", "_norm", "_scale", "accumulating")

    def __init__(
        self,
        norm: Tensor | None = None,
        found_inf: Tensor | None = None,
        scale: Tensor | None = None,
        names: Callable[[], tuple[str, ...]] | None = None,
    ) -> None:
        self._norm = norm
        self._found_inf = found_inf
        self._scale = scale
        self._names = names
        self.accumulating = found_inf is None
        """Whether the call was inside an accumulation window: gradients were kept, no optimizer stepped."""

    def arrived(self, found_inf: Tensor) -> None:
        """The verdict is on the host now."""
        self._found_inf = found_inf

    @property
    def skipped(self) -> bool:
        """Whether gradients were not finite, so that parameters and optimizer state stayed as they were."""
        return self._found_inf is not None and bool(self._found_inf)

    @property
    def stepped(self) -> bool:
        """Whether the optimizers have updated their parameters."""
        return not self.accumulating and not self.skipped

    @property
    def grad_norm(self) -> float | None:
        """2-norm over all gradients, unscaled, before clipping.

        None inside an accumulation window, and without `Amp(max_grad_norm=...)`; `max_grad_norm=math.inf` measures and
        clips nothing.
        """
        return None if self._norm is None else float(self._norm)

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied by; 1 without a loss scale."""
        return 1.0 if self._scale is None else float(self._scale)

    @property
    def scale(self) -> float:
        """`loss_scale`, by the name that `GradScaler.scale` gives it."""
        return self.loss_scale

    @property
    def nonfinite(self) -> tuple[str, ...] | None:
        """Names of the parameters whose gradients were not finite.

        None where they were not recorded: on an accelerator that takes a further read of the gradients in every step,
        which `Amp(name_nonfinite=True)` asks for.
        """
        if self._names is None:
            return () if not self.skipped else None
        return self._names() if self.skipped else ()

    def __repr__(self) -> str:
        if self.accumulating:
            return "StepResult(accumulating)"
        norm = "" if self._norm is None else f", grad_norm={self.grad_norm:.4g}"
        return f"StepResult(skipped={self.skipped}{norm}, loss_scale={self.loss_scale:g})"
