"""One optimizer under watch: whose gradients changed in a backward pass, and did anybody else write to them?

Asked of a few of its parameters, by the identity and the version counter of their gradients: nothing is read.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from threading import get_ident

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.record import Line
from ampguard.compat import version_of
from ampguard.numerics import doubles, is_finite

SAMPLE = 3
"""Parameters that stand for all of an optimizer's."""

SMALL = 1 << 16
"""Elements up to which a gradient is copied or looked at."""

FEWEST = 4
"""Elements of a gradient whose direction says something."""

Seen = tuple[Tensor | None, int]


def is_empty(parameter: Tensor) -> bool:
    """Whether nothing of it is here: FSDP1 leaves a rank the names of parameters that other ranks hold."""
    return not torch.nn.parameter.is_lazy(parameter) and parameter.numel() == 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A gradient beside what backward left: in double precision, where no finite one's square leaves the range."""

    square: float
    """Of the gradient's length."""
    ratio: float
    off: float
    """How far the old one is from so many times the new one."""
    length_before: float
    divided: float

    @property
    def divided_by(self) -> float | None:
        """By what it was divided by hand; None where that is not one number."""
        if not self.square or not math.isfinite(self.length_before):
            return None
        return self.ratio * self.divided if self.off <= 1e-2 * self.length_before else None

    @property
    def is_as_before(self) -> bool:
        """Whether it has the values that it had."""
        return bool(self.square) and self.off == 0.0 and self.ratio == 1.0

    @property
    def was_made_finite(self) -> bool:
        """Whether it was not finite, and is now."""
        return not math.isfinite(self.length_before) and math.isfinite(self.square)


class OptimizerWatch:
    """An optimizer by its weak reference, and what its sampled gradients were when last seen."""

    __slots__ = (
        "__weakref__",
        "at_rest",
        "before",
        "by_scaler",
        "candidates",
        "cleans",
        "copy",
        "created",
        "divided",
        "divided_at",
        "divides_by_hand",
        "divides_in_hook",
        "first_step",
        "had_gradient",
        "hidden",
        "is_stale",
        "is_used",
        "looks_left",
        "lost_one",
        "number",
        "odd",
        "piled_on",
        "piled_since",
        "ref",
        "resumed_at",
        "sample",
        "scaled_by",
        "set_by_hand",
        "stepped",
        "steps",
        "sums_on_purpose",
        "taken",
        "thread",
        "usually_touched",
        "versions",
        "was_bad",
        "was_skipped",
        "weights",
        "without_since",
    )

    def __init__(self, optimizer: Optimizer, number: int, created: Line | None) -> None:
        self.ref = weakref.ref(optimizer)
        self.number = number
        self.created = created
        self.steps = 0
        """Attempted; `taken`: those that were not skipped."""
        self.taken = 0
        self.is_stale = False
        """It was told that it holds other tensors than those which are trained."""
        self.resumed_at: Line | None = None
        self.piled_since: int | None = None
        """The first iteration that stepped on top of gradients of an earlier one."""
        self.piled_on: dict[int, weakref.ref[Tensor]] = {}
        """What gradients these were, by the identity of their parameters."""
        self.sums_on_purpose: bool | None = None
        """Whether its weights are a function of the sum of all gradients; None: nobody has looked."""
        self.lost_one = False
        """A parameter that stands for others had gradients and has none any more."""
        self.looks_left = 0
        """All of its gradients are gone: who else is trained is to be seen in so many steps."""
        self.stepped = False
        """Its own step ran (inside the scaler's: the scaler did not skip it)."""
        self.was_skipped = False
        self.candidates: list[Tensor] | None = None
        """Parameters that have not been seen with a gradient; None before the first look."""
        self.first_step: int | None = None
        """The iteration in which it stepped first."""
        self.had_gradient: set[int] = set()
        """Parameters, by identity, that have had a gradient when they were looked at."""
        self.without_since: dict[int, int] = {}
        """The parameters that had no gradient when last looked at, by identity, and the iteration since which."""
        self.versions: tuple[int, dict[int, int]] = (0, {})
        """The iteration in which all parameters were last looked at, and their versions behind it, by identity."""
        self.copy: tuple[Tensor, Tensor] | None = None
        """A parameter and a copy of its gradient right after backward, in iterations that are looked at closely."""
        self.divided = 1.0
        """By what somebody had divided it already when the copy was made (before it was clipped)."""
        self.divided_at: Line | None = None
        """Where the script was last seen to divide gradients by the scale itself."""
        self.divides_by_hand = False
        """The script was seen to divide its gradients by the scale, in an iteration that was looked at closely."""
        self.divides_in_hook = False
        """Hooks on its parameters were seen to divide by the scale, in the middle of the backward pass."""
        self.weights: list[tuple[Tensor, int, Tensor | None]] = []
        """Sampled parameters as they were when the gradients were unscaled, small ones with their values."""
        self.by_scaler = False
        """Its last step went through a scaler."""
        self.scaled_by: Hashable | None = None
        """The watch of the scaler that was seen to divide its gradients last."""
        self.cleans = False
        """The script was seen to write to its gradients what they were: it may put numbers in the place of Inf and NaN."""
        self.was_bad = False
        """One of them was not finite behind the backward pass, where that is looked at because of it."""
        self.hidden = 0
        """Steps in which such a gradient was finite when the scaler came to look."""
        self.set_by_hand = False
        """The script has put its gradients in place itself: no backward pass will tell when there are new ones."""
        self.before: list[Seen] | None = None
        self.at_rest: list[tuple[int, int]] | None = None
        self.usually_touched: bool | None = None
        """Whether somebody writes to its gradients between backward and their division, as far as the loop was followed."""
        self.odd: tuple[int, int] | None = None
        """The first and the last of iterations in a row in which something unusual was done to its gradients."""
        self.sample: list[Tensor] = []
        self.thread = get_ident()
        """Whose it is: only that thread may look at its gradients. 0 where that is not known yet."""
        self.is_used = False
        """That thread has cleared or stepped it, not just made it."""
        self.resample()

    def claim(self, thread: int) -> None:
        """A thread clears or steps it: it is that thread's now."""
        if self.thread != thread:
            self.before = self.at_rest = self.copy = None
            self.thread = thread
        self.is_used = True

    def disown(self, thread: int) -> None:
        """A second thread, `thread`, begins a backward pass: what nobody has used yet may be its own."""
        if not self.is_used and self.thread != thread:
            self.thread = 0

    def parameters(self) -> list[Tensor]:
        """All tensors that the optimizer holds."""
        optimizer = self.ref()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def trained(self) -> list[Tensor]:
        """Those that want a gradient; all of them where none does (flat buffers whose gradients are set by hand)."""
        held = self.parameters()
        return [p for p in held if p.requires_grad and p.is_leaf and not is_empty(p)] or held

    def resample(self) -> None:
        """Choose those that stand for all: spread evenly, with a gradient where any has one."""
        found = self.trained()
        found = [p for p in found if p.grad is not None] or found
        last = len(found) - 1
        self.sample = (
            [found[i] for i in sorted({round(last * k / (SAMPLE - 1)) for k in range(SAMPLE)})] if found else []
        )

    def before_backward(self) -> bool:
        """Note the gradients. True where there are none."""
        for p in self.sample:
            if p.grad is not None:
                self.before = [(g, version_of(g) if g is not None else -1) for g in [p.grad for p in self.sample]]
                return False
        self.before = None
        return True

    def after_backward(self) -> bool:
        """Whether the backward pass changed any. How it left them is remembered, for `is_untouched`."""
        before, self.before = self.before, None
        self.rest()
        if self.cleans:
            self.look_for_bad()
        if before is None:
            with_grad = [p for p in self.sample if p.grad is not None]
            self.lost_one = self.lost_one or (self.steps > 0 and 0 < len(with_grad) < len(self.sample))
            return bool(with_grad)
        return any(
            (new := p.grad) is not old or (new is not None and version_of(new) != version)
            for p, (old, version) in zip(self.sample, before, strict=False)
        )

    def glance(self) -> tuple[Tensor | None, int]:
        """One gradient, and how often it was written to."""
        grad = self.sample[0].grad if self.sample else None
        return grad, -1 if grad is None else version_of(grad)

    def has_gradients(self) -> bool:
        """Whether any of the sampled parameters has a gradient."""
        return any(p.grad is not None for p in self.sample)

    def rest(self) -> None:
        """What was just done to the gradients is known."""
        grads = [p.grad for p in self.sample]
        self.at_rest = [(id(g), version_of(g) if g is not None else -1) for g in grads]

    def is_untouched(self) -> bool:
        """Whether nobody has written to the sampled gradients since they were last at rest."""
        if self.at_rest is None:
            return False
        for p, (identity, version) in zip(self.sample, self.at_rest, strict=False):
            grad = p.grad
            if id(grad) != identity or (grad is not None and version_of(grad) != version):
                return False
        return True

    def look_for_bad(self) -> None:
        """Behind a backward pass. What is not finite spreads to what lies before it: the first parameter tells."""
        self.was_bad = self.was_bad or not self.is_first_finite()

    def is_first_finite(self) -> bool:
        """Whether the first small gradient is, where that need not be waited for."""
        grads = (p.grad for p in self.sample if p.numel() <= SMALL and p.grad is not None and p.grad.is_cpu)
        first = next((grad for grad in grads if not grad.is_sparse), None)
        with torch.no_grad(), compat.unseen():
            return first is None or is_finite(first.detach())

    def are_bad(self) -> bool:
        """Whether any gradient is not finite. Waits for the device."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        with compat.unseen():
            return not all(is_finite(grad.detach()) for grad in grads)

    def keep_copy(self, divided: float = 1.0) -> None:
        """Copy one small gradient, to tell later by what somebody has divided it."""
        self.divided = divided
        with_grad = [p for p in self.sample if p.grad is not None and not p.grad.is_sparse and p.numel() <= SMALL]
        if with_grad:
            smallest = min(with_grad, key=lambda p: (p.numel() < FEWEST, p.numel()))
            assert smallest.grad is not None
            with compat.unseen():
                self.copy = (smallest, compat.local_part(smallest.grad.detach()).clone())

    def compared(self) -> Comparison | None:
        """The gradient as it is now, beside the copy of what backward left; None where there is none. Waits for the device,
        once."""
        if self.copy is None:
            return None
        parameter, old = self.copy
        new = compat.local_part(parameter.grad) if parameter.grad is not None else None
        if new is None or new.shape != old.shape:
            return None
        with torch.no_grad(), compat.unseen():
            a, b = doubles(old), doubles(new)
            across, length = a @ b, b @ b
            ratio = across / length
            square, by, off, before = torch.stack([length, ratio, (a - ratio * b).norm(), a.norm()]).tolist()
        return Comparison(square, by, off, before, self.divided)

    def divided_by(self) -> float | None:
        """By what the gradient was divided by hand; None where that is not one number. Waits for the device."""
        compared = self.compared()
        return compared.divided_by if compared is not None else None

    def shrunk_by(self) -> float | None:
        """By what the gradient's length was divided, where its direction has changed as well. Waits for the device."""
        if self.copy is None or self.divided_by() is not None:
            return None
        parameter, old = self.copy
        new = compat.local_part(parameter.grad) if parameter.grad is not None else None
        if new is None or new.shape != old.shape or old.numel() < FEWEST:
            return None
        with torch.no_grad(), compat.unseen():
            length = float(doubles(new).norm())
            return float(doubles(old).norm()) / length * self.divided if length else None

    def keep_weights(self) -> None:
        """Note the sampled parameters, to tell later whether the script has moved them itself."""
        with compat.unseen():
            weights = [(p, version_of(p), compat.local_part(p.detach())) for p in self.sample]
            self.weights = [(p, version, w.clone() if p.numel() <= SMALL else None) for p, version, w in weights]

    def weights_moved(self) -> bool:
        """Whether somebody wrote to them since (SAM's ascent, also by `.data`). Waits for the device."""
        with compat.unseen():
            return any(
                version_of(p) != version
                or (old is not None and not bool(torch.equal(compat.local_part(p.detach()), old)))
                for p, version, old in self.weights
            )

    def are_zero(self) -> bool:
        """Whether all small sampled gradients are zero (they were cleared in place). Waits for the device."""
        grads = [p.grad for p in self.sample if p.grad is not None and p.grad.numel() <= SMALL]
        with compat.unseen():
            return bool(grads) and not any(bool(compat.local_part(g.detach()).any()) for g in grads)
