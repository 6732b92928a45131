"""Norms that a script computes by hand of gradients that are still scaled.

In the few iterations that are looked at closely, and only between a backward pass and the next call of the protocol,
the functions by which a magnitude is computed are wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampguard.capture.protocol.moves import Moves
from ampguard.capture.protocol.script_lines import script_line
from ampguard.protocol.events import Read

_METHODS = ("norm", "pow", "__pow__", "square", "abs", "mean", "max", "std", "clamp", "clamp_")
_QUESTIONS = ("isfinite", "isnan", "isinf")
_FUNCTIONS = ((torch, "norm"), (torch, "abs"), (torch, "square"), (torch.linalg, "norm"), (torch.linalg, "vector_norm"))


class ReadWindow:
    """Open between a backward pass and whatever comes next."""

    def __init__(self, moves: Moves, guarded: Callable[..., Any]) -> None:
        self._moves = moves
        self._guarded = guarded
        self._saved: list[tuple[Any, str, Any, Any, bool]] = []
        self._busy = False
        self._seen: list[tuple[Any, Any]] = []
        self._asked_if_finite = False
        """Whether the script asks if something is finite: the answer does not depend on the scale."""

    @property
    def is_open(self) -> bool:
        return bool(self._saved)

    def open(self) -> None:
        """Wrap the functions."""
        if self._saved or torch.compiler.is_compiling():
            return
        places = [(torch.Tensor, name) for name in _METHODS] + list(_FUNCTIONS)
        for owner, name in places:
            original = getattr(owner, name, None)
            if original is None:
                continue
            replacement = self._watch(original)
            self._saved.append((owner, name, original, replacement, name in vars(owner)))
            setattr(owner, name, replacement)
        for owner, name in ((o, n) for n in _QUESTIONS for o in (torch, torch.Tensor)):
            original = getattr(owner, name)
            replacement = self._ask(original)
            self._saved.append((owner, name, original, replacement, name in vars(owner)))
            setattr(owner, name, replacement)

    def close(self, tell: bool = True) -> None:
        """Put them back; tell what was measured, unless the script has asked for the scale meanwhile."""
        for owner, name, original, replacement, was_own in reversed(self._saved):
            if vars(owner).get(name) is not replacement:
                continue
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._saved.clear()
        seen, self._seen = self._seen, []
        asked, self._asked_if_finite = self._asked_if_finite, False
        if tell and not asked and not self._moves.scale_was_read:
            for watch, where in seen:
                breaches = self._moves.machine.feed(Read(watch, where, clips=False))
                self._moves.tell(breaches, self._moves.recorder.steps.count)

    def _ask(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def question(*args: Any, **kwargs: Any) -> Any:
            self._asked_if_finite = True
            return original(*args, **kwargs)

        return question

    def _watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def measure(*args: Any, **kwargs: Any) -> Any:
            if args and not self._busy and not torch.compiler.is_compiling():
                self._guarded(self._note, args[0])
            return original(*args, **kwargs)

        return measure

    def _note(self, subject: Any) -> None:
        recorder = self._moves.recorder
        if not isinstance(subject, Tensor) or recorder.paused or not recorder.active:
            return
        self._busy = True
        try:
            pointer = subject.data_ptr()
            for watch in self._moves.watches.optimizers:
                grads = [p.grad for p in watch.sample if p.grad is not None]
                is_new = all(known is not watch for known, _ in self._seen)
                with contextlib.suppress(RuntimeError):
                    if is_new and any(_is_same(g, subject, pointer) for g in grads):
                        self._seen.append((watch, script_line(sys._getframe(3))))
        finally:
            self._busy = False


def _is_same(gradient: Tensor, subject: Tensor, pointer: int) -> bool:
    """Whether `subject` is the gradient, or another view of all of it (`.data`, `.detach()`)."""
    return gradient is subject or (gradient.shape == subject.shape and gradient.data_ptr() == pointer)
