"""Errors that a model raises because of its numbers: it checked them itself, or PyTorch did.

`torch.distributions` refuses parameters that are NaN, samplers refuse such probabilities, a model may assert that its
result is finite. The message names a shape at best; where the number became bad, a replay of the call tells.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.frames import is_user_code, locals_of
from ampguard.compat import cuda_is_capturing as is_capturing
from ampguard.errors import message_of
from ampguard.numerics import is_finite

_OF_NUMBERS = re.compile(
    r"\b(nan|inf|infinity|(non-?|not |un|in)?finite|is_?(nan|inf|finite)|overflow\w*)\b", re.IGNORECASE
)
_OUR_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def is_conversion_refusal(error: BaseException | None) -> bool:
    """PyTorch's refusal to put a constant into a type that cannot hold it (`masked_fill(half, -1e9)`)."""
    return isinstance(error, RuntimeError) and "without overflow" in message_of(error)


def refused_values(error: BaseException) -> list[Tensor]:
    """The tensors with a NaN or +Inf that the raising function had at hand; none where it had only good ones.

    Asked is the innermost frame that holds floating tensors at all. A -Inf alone is a mask, and no reason to raise.
    """
    if not isinstance(error, Exception) or is_capturing():
        return []
    for frame in reversed(_frames(error.__traceback__)):
        here = [v for v in locals_of(frame).values() if isinstance(v, Tensor) and v.is_floating_point()]
        floating = [compat.without_transforms(tensor) for tensor in here]  # whose `vmap` has ended with the error
        if floating:
            return [tensor for tensor in floating if is_refused(tensor)]
    return []


def is_about_numbers(error: BaseException | None) -> bool:
    """Whether an error says, or the script's line that raised it asks, that something is not finite."""
    if not isinstance(error, Exception):
        return False
    line, entry = "", error.__traceback__
    while entry is not None:
        if is_user_code(entry.tb_frame.f_code):
            line = linecache.getline(entry.tb_frame.f_code.co_filename, entry.tb_lineno)
        entry = entry.tb_next
    return _OF_NUMBERS.search(f"{message_of(error)} {line}") is not None


def refused_tensors(error: Exception) -> Iterator[Tensor]:
    """Those with a NaN or +Inf that the functions had at hand through which an error came, from the innermost on."""
    for frame in reversed(_frames(error.__traceback__)):
        for value in locals_of(frame).values():
            if type(value) not in (Tensor, nn.Parameter) or not value.is_floating_point():
                continue
            tensor = compat.without_transforms(value)
            if is_refused(tensor):
                yield tensor


def is_same_error(error: BaseException, before: BaseException | None) -> bool:
    """Whether a replay ended as the call did that it replays."""
    if is_conversion_refusal(before):
        return is_conversion_refusal(error)
    return before is not None and type(error) is type(before) and bool(refused_values(error))


def _frames(entry: TracebackType | None) -> list[FrameType]:
    """From the caller to the function that raised, without our own."""
    found: list[FrameType] = []
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_OUR_ROOT):
            found.append(entry.tb_frame)
        entry = entry.tb_next
    return found


def is_refused(tensor: Tensor) -> bool:
    """Whether it holds NaN or +Inf: a -Inf alone is a mask."""
    if not compat.has_values(tensor) or is_finite(tensor):
        return False
    with torch.no_grad():
        values = tensor.detach()
        return bool((values.isnan() | (values == torch.inf)).any())
