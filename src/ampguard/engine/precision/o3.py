"""O3: the model and its weights in float16. Updates are computed in float32 and rounded, so small ones are lost."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine.precision.base import Precision
from ampguard.engine.precision.weights import LowWeights
from ampguard.engine.step import GradientCheck, RoundedUpdate
from ampguard.errors import PrecisionError, ProtocolError


class O3(Precision):
    """float16 weights without float32 copies; the loss scale keeps the backward pass above zero.

    What an optimizer keeps (moments) is float32: the square of a gradient below 2e-4 is 0 in float16.
    """

    name = "O3"
    weights_dtype = torch.float16
    scales_loss = True
    takes_closures = False

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._updates: dict[int, RoundedUpdate] = {}

    def convert(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], in_fp32: Sequence[nn.Module]
    ) -> None:
        self.low_weights = LowWeights(models, self.weights_dtype, in_fp32)
        self._updates = {id(optimizer): RoundedUpdate(optimizer, "nearest") for optimizer in optimizers}

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """On the CPU PyTorch adds no sparse float16 gradients: those that are held lie aside meanwhile, and are joined then."""
        groups = (group for update in self._updates.values() for group in update.optimizer.param_groups)
        aside = [(p, p.grad) for group in groups for p in group["params"] if _is_sparse_half(p.grad)]
        if compat.several_ranks():  # whose reducer has to see all of a gradient
            aside = []
        for p, _ in aside:
            p.grad = None
        try:
            yield
        except NotImplementedError as error:
            if "sparse" not in str(error):
                raise
            raise PrecisionError(
                f"the backward pass adds sparse gradients in float16, which PyTorch cannot do here ({error}): an embedding "
                "with sparse=True is used twice in one loss\n"
                "  do    keep it in float32, Amp(..., force_fp32=[its path]); or make it with sparse=False"
            ) from error
        finally:
            for p, held in aside:
                p.grad = held if p.grad is None else _joined(held, p.grad)

    def follow_own_steps(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`, called by a loop of its own, computes in float32 too; not with a closure, whose gradients are
        those of the weights themselves."""
        update = self._updates[id(optimizer)]
        under_way: list[_OwnStep] = []

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            frame = sys._getframe(1)
            while under_way and not under_way[-1].is_around(frame):  # it has failed
                under_way.pop().give_up()
            has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
            is_inside = bool(under_way)  # a subclass that calls the step of the class that it extends
            region = None if has_closure or is_inside else update.in_float32(write_back=True)
            under_way.append(_OwnStep(frame, region))

        def after(*_: Any) -> None:
            if under_way:
                under_way.pop().end()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def apply_own(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> bool:
        """As `apply`, with the gradients written back; False where the optimizer is none of these."""
        update = self._updates.get(id(optimizer))
        if update is not None:
            update.apply(check, max_norm, write_back=True)
        return update is not None

    def apply(self, optimizer: Optimizer, check: GradientCheck, max_norm: float | None) -> None:
        self._updates[id(optimizer)].apply(check, max_norm)

    def refuse_direct_step(self, name: str) -> None:
        if self._updates:
            raise ProtocolError(
                f"optimizer.step() of `{name}` in O3: it would compute in float16, where eps and the squares of small "
                "gradients are 0\n"
                "  do    call amp.step(optimizer) instead   (ampguard explain optimizer-underflow)",
                "optimizer-underflow",
            )


def _is_sparse_half(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse and gradient.is_cpu and gradient.dtype is torch.float16


@torch.no_grad()
def _joined(held: Tensor, new: Tensor) -> Tensor:
    """The sum of a sparse gradient and a new one."""
    if not new.is_sparse:
        return new + held.to_dense()
    one, other = held.coalesce(), new.coalesce()
    indices = torch.cat([one.indices(), other.indices()], dim=1)
    values = torch.cat([one.values(), other.values()])
    return torch.sparse_coo_tensor(indices, values, held.shape, check_invariants=False).coalesce()


class _OwnStep:
    """A call of `optimizer.step()`, from the hook before it to the one behind it, which an error leaves out."""

    def __init__(self, frame: FrameType, region: contextlib.AbstractContextManager[None] | None) -> None:
        self._frame: FrameType | None = frame
        self._region = region
        if region is not None:
            region.__enter__()

    def is_around(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def end(self) -> None:
        """Round the parameters to what was computed."""
        self._frame = None
        if self._region is not None:
            self._region.__exit__(None, None, None)

    def give_up(self) -> None:
        """Put the parameters back as they were."""
        self._frame = None
        failed = RuntimeError("the step has failed")
        with contextlib.suppress(RuntimeError):
            if self._region is not None:
                self._region.__exit__(RuntimeError, failed, None)
