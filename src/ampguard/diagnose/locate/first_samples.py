"""The samples of a batch in which bad values began first.

Samples stay apart, in most operators. Where several layers overflow, for other rows each, an element of a row that was bad in
the first of these layers leads back to it; the first and the last bad row may not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampguard.diagnose.locate.chain import Link
from ampguard.diagnose.locate.on_purpose import makes_infinity_on_purpose
from ampguard.replay.trace import Trace

FEW = 3
"""Bad elements that are all followed anyway."""

MAX_BEGINNINGS = 4
"""Operators that are kept."""


def of_first_samples(trace: Trace, before: int, shape: tuple[int, ...], flat: Tensor, hits: Tensor) -> list[int]:
    """One of the hits for each of the operators at which bad values began first: in a sample of its own that was bad there.

    Samples stay apart, in most operators: layers that overflow for one row each begin in the first of these layers.
    """
    if hits.numel() <= FEW or not shape:
        return []
    if trace.beginnings is None:
        trace.beginnings = _beginnings(trace)
    samples = torch.div(flat[hits], max(1, math.prod(shape[1:])), rounding_mode="floor")
    found: list[int] = []
    for index, size, own in trace.beginnings:
        if index < before and size == shape[0]:
            at = torch.isin(samples, own).nonzero().reshape(-1)
            found += [int(hits[at[0]])] if at.numel() else []
    return found


def _beginnings(trace: Trace) -> list[tuple[int, int, Tensor]]:
    """The first operators of the forward pass that made something bad of what was finite: number, samples, and which were."""
    found: list[tuple[int, int, Tensor]] = []
    for op in trace.ops:
        if not op.is_bad or op.in_backward or any(tensor.bad is not None for tensor in op.inputs):
            continue
        for position, made in enumerate(op.outputs):
            if (
                made.bad is None
                or len(made.shape) < 2
                or makes_infinity_on_purpose(Link(op, position, None, int(made.bad.kinds[0])))
            ):
                continue
            samples = torch.div(made.bad.flat, math.prod(made.shape[1:]), rounding_mode="floor").unique()
            if len(samples) < made.shape[0]:
                found.append((op.index, made.shape[0], samples))
        if len(found) >= MAX_BEGINNINGS:
            break
    return found
