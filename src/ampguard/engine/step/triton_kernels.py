"""Triton kernels that look at gradients, and step on them, many tensors at a time. Imported where Triton is.

What they read and write is given by tables: `owners` and `starts` say for each program which tensor, and from which
element on; `sizes` how many elements a tensor has; `addresses` where it lies, each a multiple of 16 bytes. Tensors are
float32 without gaps.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 8192
"""Elements of a tensor that one program takes."""
BLOCK = 1024
"""Elements that it takes at once."""
PARTS = 4096
"""Programs' answers that are added up at once."""


@triton.jit
def _tensor(addresses, number):
    return tl.multiple_of(tl.load(addresses + number).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _asked(gradient, WANTS_NORM: tl.constexpr):
    """What is added up of each element: its square, or 1 where it is Inf or NaN."""
    if WANTS_NORM:
        wide = gradient.to(tl.float64)
        return wide * wide
    return tl.where(tl.abs(gradient) < float("inf"), 0.0, 1.0).to(tl.float64)


@triton.jit(do_not_specialize=["first"])
def look_kernel(
    gradients, owners, starts, sizes, parts, first, WANTS_NORM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up, for each chunk of the gradients, what is asked; into `parts` from `first` on."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    start, size = tl.load(starts + program), tl.load(sizes + owner)
    gradient = _tensor(gradients, owner) + start
    left = tl.minimum(size - start, CHUNK)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    whole = left // BLOCK
    for block in range(whole):
        total += _asked(tl.load(gradient + block * BLOCK + lane), WANTS_NORM)
    rest = whole * BLOCK + lane
    if whole * BLOCK < left:
        total += _asked(tl.load(gradient + rest, mask=rest < left, other=0.0), WANTS_NORM)
    tl.store(parts + first + program, tl.sum(total))


@triton.jit(do_not_specialize=["count"])
def conclude_kernel(
    parts, count, scale, answers, WANTS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr, PARTS: tl.constexpr
):
    """Of all parts: the norm unscaled, whether anything was Inf or NaN, and one over the scale; in this order."""
    lane = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS,), dtype=tl.float64)
    for start in range(0, count, PARTS):
        sums += tl.load(parts + start + lane, mask=start + lane < count, other=0.0)
    total = tl.sum(sums)
    inverse = 1.0
    if HAS_SCALE:
        inverse = 1.0 / tl.load(scale)
    if WANTS_NORM:
        tl.store(answers, (tl.sqrt(total) * inverse).to(tl.float32))
        tl.store(answers + 1, tl.where(total < float("inf"), 0.0, 1.0))
    else:
        tl.store(answers + 1, tl.where(total == 0.0, 0.0, 1.0))
    tl.store(answers + 2, inverse)


@triton.jit
def _adam(
    gradient, parameter, first, second, at, mask,
    divisor, lr, beta1, rest1, beta2, rest2, weight_decay, eps, length, root,
    DECOUPLED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if MASKED:
        g, p = tl.load(gradient + at, mask=mask), tl.load(parameter + at, mask=mask)
        m, v = tl.load(first + at, mask=mask), tl.load(second + at, mask=mask)
    else:
        g, p = tl.load(gradient + at), tl.load(parameter + at)
        m, v = tl.load(first + at), tl.load(second + at)
    g = g / divisor
    if DECOUPLED:
        p -= lr * weight_decay * p
    else:
        g += weight_decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= length * m / (tl.sqrt(v) / root + eps)
    if MASKED:
        tl.store(parameter + at, p, mask=mask)
        tl.store(first + at, m, mask=mask)
        tl.store(second + at, v, mask=mask)
    else:
        tl.store(parameter + at, p)
        tl.store(first + at, m)
        tl.store(second + at, v)


@triton.jit(do_not_specialize=["tensors"])
def adam_kernel(
    gradients, addresses, owners, starts, sizes, tensors,
    norm, found_inf, inverse, max_norm, clip_eps,
    lr, beta1, rest1, log1, beta2, rest2, log2, weight_decay, eps,
    DECOUPLED: tl.constexpr, CLIPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One update of Adam or AdamW on gradients that are divided on the way; none where `found_inf` is 1.

    `addresses`: of all parameters, then of both averages, then of the counts of steps, which this one is in already.
    """
    if tl.load(found_inf) == 0.0:
        program = tl.program_id(0)
        owner = tl.load(owners + program)
        start, size = tl.load(starts + program), tl.load(sizes + owner)
        gradient = _tensor(gradients, owner) + start
        parameter = _tensor(addresses, owner) + start
        first = _tensor(addresses, tensors + owner) + start
        second = _tensor(addresses, 2 * tensors + owner) + start
        step = tl.load(tl.load(addresses + 3 * tensors + owner).to(tl.pointer_type(tl.float32))).to(tl.float64)
        length = (lr / (1.0 - tl.exp(step * log1))).to(tl.float32)
        root = tl.sqrt(1.0 - tl.exp(step * log2)).to(tl.float32)
        divisor = 1.0 / tl.load(inverse)
        if CLIPS:
            divisor = tl.maximum((tl.load(norm) + clip_eps) / max_norm, 1.0) * divisor
        left = tl.minimum(size - start, CHUNK)
        lane = tl.arange(0, BLOCK)
        whole = left // BLOCK
        for block in range(whole):
            _adam(
                gradient, parameter, first, second, block * BLOCK + lane, lane < BLOCK,
                divisor, lr, beta1, rest1, beta2, rest2, weight_decay, eps, length, root,
                DECOUPLED, False,
            )  # fmt: skip
        rest = whole * BLOCK + lane
        if whole * BLOCK < left:
            _adam(
                gradient, parameter, first, second, rest, rest < left,
                divisor, lr, beta1, rest1, beta2, rest2, weight_decay, eps, length, root,
                DECOUPLED, True,
            )  # fmt: skip
