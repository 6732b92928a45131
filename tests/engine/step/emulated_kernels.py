"""What the Triton kernels do, with NumPy on the CPU's memory: to the same tables, and by the same addresses."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from torch import Tensor

CHUNK, BLOCK, PARTS = 64, 16, 32


class Launched:
    """A kernel that is indexed by its grid and then called, as Triton's are."""

    def __init__(self, program: Any) -> None:
        self.program, self.calls = program, 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.calls += 1
            for number in range(grid[0]):
                self.program(number, *args, **options)

        return launch


def memory(address: int, count: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def chunk(number: int, owners: Tensor, starts: Tensor, sizes: Tensor) -> tuple[int, slice, int]:
    owner, start = int(owners[number]), int(starts[number])
    size = int(sizes[owner])
    return owner, slice(start, min(start + CHUNK, size)), size


def look(
    number: int, gradients: Tensor, owners: Tensor, starts: Tensor, sizes: Tensor, parts: Tensor, first: int,
    WANTS_NORM: bool, **_: Any,
) -> None:  # fmt: skip
    owner, where, size = chunk(number, owners, starts, sizes)
    values = memory(int(gradients[owner]), size)[where].astype(np.float64)
    parts[first + number] = float((values**2).sum() if WANTS_NORM else (~np.isfinite(values)).sum())


def conclude(
    _: int, parts: Tensor, count: int, scale: Tensor, answers: Tensor, WANTS_NORM: bool, HAS_SCALE: bool, **__: Any
) -> None:
    assert len(parts) == count
    total, inverse = float(parts.sum()), 1.0 / float(scale) if HAS_SCALE else 1.0
    is_bad = not math.isfinite(total) if WANTS_NORM else total != 0
    answers[1], answers[2] = float(is_bad), inverse
    if WANTS_NORM:
        answers[0] = math.sqrt(total) * inverse if total >= 0 else total


def adam(
    number: int, gradients: Tensor, addresses: Tensor, owners: Tensor, starts: Tensor, sizes: Tensor, tensors: int,
    norm: Tensor, found_inf: Tensor, inverse: Tensor, max_norm: float, clip_eps: float,
    lr: float, beta1: float, rest1: float, log1: float, beta2: float, rest2: float, log2: float, decay: float,
    eps: float, DECOUPLED: bool, CLIPS: bool, **_: Any,
) -> None:  # fmt: skip
    if float(found_inf) != 0:
        return
    owner, where, size = chunk(number, owners, starts, sizes)
    g = memory(int(gradients[owner]), size)[where].astype(np.float64)
    p, m, v = (memory(int(addresses[row * tensors + owner]), size)[where] for row in range(3))
    step = float(memory(int(addresses[3 * tensors + owner]), 1)[0])
    divisor = 1.0 / float(inverse)
    if CLIPS:
        clip = math.inf if not max_norm else (float(norm) + clip_eps) / max_norm
        divisor *= max(clip, 1.0)
    g = g / divisor
    if DECOUPLED:
        p -= lr * decay * p
    else:
        g = g + decay * p
    m[:] = beta1 * m + rest1 * g
    v[:] = beta2 * v + rest2 * g * g
    bias1, bias2 = 1 - math.exp(step * log1), 1 - math.exp(step * log2)
    p -= (lr / bias1) * m / (np.sqrt(v) / math.sqrt(bias2) + eps)


look_kernel, conclude_kernel, adam_kernel = Launched(look), Launched(conclude), Launched(adam)
