"""What a communication hook of DistributedDataParallel sends: the hook is run on gradients, up to its first collective.

Nothing is sent. What the hook writes to (its state, globals of its file) is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampguard import compat, numerics
from ampguard.capture.frames import user_line
from ampguard.capture.record import Line
from ampguard.replay.keeping import StateKeeper
from ampguard.replay.operators import facts_of, flat_tensors
from ampguard.replay.sandbox import neutral_thread, quiet

BUCKET_BYTES = 25 << 20
"""As large as DDP makes its own unless it is told otherwise."""

Gradient = tuple[Tensor, Tensor]
"""A parameter and its gradient."""


class Bucket:
    """Stands in for DDP's `GradBucket`: copies of some gradients, one after the other."""

    def __init__(self, gradients: Sequence[Gradient], index: int, is_last: bool) -> None:
        self._parameters = [parameter for parameter, _ in gradients]
        self._buffer = torch.cat([gradient.reshape(-1) for _, gradient in gradients])
        self._index = index
        self._is_last = is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last


@dataclass(frozen=True, slots=True)
class Sent:
    """What a hook hands to its first collective. `op`: the first of the hook's operators whose result is not finite where
    its operands are. `line`: that of the operator, or of the collective, where it is in the script."""

    gradients: Sequence[Gradient]
    tensor: Tensor
    collective: str
    op: str | None
    line: Line | None


def sent_by(hook: Callable[..., Any], state: Any, gradients: Sequence[Gradient]) -> Iterator[Sent]:
    """What is sent of these gradients, bucket by bucket. Stops where the hook sends something of another size."""
    buckets = list(_buckets(gradients))
    for index, part in enumerate(buckets):
        mode = _UntilSent()
        keeper = StateKeeper()
        keeper.keep(hook)
        keeper.keep(state)
        bucket = Bucket(part, index, index == len(buckets) - 1)
        try:
            with neutral_thread(), quiet(), mode:
                hook(state, bucket)
        except _SendsError:
            pass
        finally:
            keeper.restore()
        size = sum(gradient.numel() for _, gradient in part)
        if mode.sent is None or mode.sent.numel() != size or not mode.sent.is_floating_point():
            return
        yield Sent(part, mode.sent.reshape(-1), mode.collective, mode.op, mode.line)


def _buckets(gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
    """Gradients of one type each, the last parameters first, as DDP sends them."""
    for dtype in dict.fromkeys(gradient.dtype for _, gradient in gradients):
        part: list[Gradient] = []
        for parameter, gradient in reversed(gradients):
            if gradient.dtype == dtype:
                part.append((parameter, gradient))
                if sum(g.nbytes for _, g in part) >= BUCKET_BYTES:
                    yield part
                    part = []
        if part:
            yield part


class _SendsError(RuntimeError):
    """The hook has come to a collective."""


class _UntilSent(compat.DispatchMode):
    """Follows a hook's operators, and ends it before anything is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Tensor | None = None
        self.collective = ""
        self.op: str | None = None
        self.line: Line | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if facts_of(func).is_collective:
            tensors = _tensors_in((args, kwargs))
            if self.sent is None and tensors:
                self.sent, self.collective = tensors[0].clone(), str(func)
                self.line = self.line or user_line(stop=sent_by.__code__)
            raise _SendsError(f"{func} would be sent to the other ranks")
        result = func(*args, **(kwargs or {}))
        if self.op is None and not _are_finite([result]) and _are_finite(flat_tensors(args, kwargs or {})):
            self.op, self.line = str(func), user_line(stop=sent_by.__code__)
        return result


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors_in(item)]


def _are_finite(values: Sequence[Any]) -> bool:
    return all(numerics.is_finite(t) for t in values if isinstance(t, Tensor) and t.is_floating_point())
