"""What was seen of gradients that are still scaled, in a window behind a backward pass: was it used as if they were not?"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.moves import Moves
from ampguard.capture.protocol.plain_parts import PlainParts
from ampguard.capture.protocol.powers import Powers
from ampguard.capture.protocol.script_hooks import use_in_hook
from ampguard.capture.protocol.script_names import name_in, scales_in, script_frames, spots_of
from ampguard.capture.protocol.script_units import (
    Spot,
    Use,
    computes_with_scale,
    use_of_name,
    use_of_number,
)
from ampguard.capture.record import Line
from ampguard.protocol.events import Breach, Read

NOT_CLIPPED = 1e-3


@dataclass(slots=True, eq=False)
class Number:
    """A number read from a quantity."""

    watch: OptimizerWatch
    power: float
    where: Line | None
    spots: list[Spot]
    is_shown: bool
    in_hook: bool = False
    """A hook has read it, within the backward pass: `spots` are its own."""

    def use(self) -> Use:
        """What the script does with it."""
        find = use_in_hook if self.in_hook else use_of_number
        return find(list(self.spots), self.power)


@dataclass(slots=True, eq=False)
class Clip:
    """Gradients were multiplied by `factor`, which carries S^`power` (None: a number, of which that is unknown)."""

    watch: OptimizerWatch
    factor: Any
    power: float | None
    where: Line | None
    is_division: bool
    limits_values: bool = False
    by_comparison: bool = False
    """They were overwritten, perhaps by what a comparison has chosen (`torch.where(norm > limit, ...)`)."""
    is_limited: bool = False
    """The factor came out of a limit that carries no scale: it clips wherever the product goes (gradients of one sample)."""
    taken_at: Line | None = None
    """Where `torch.autograd.grad` returned them: no optimizer's parameters hold them."""


@dataclass(slots=True)
class Seen:
    """What happened in the window."""

    numbers: list[Number] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    compared: list[tuple[OptimizerWatch, Line | None]] = field(default_factory=list)
    products: list[tuple[weakref.ref[Tensor], Clip]] = field(default_factory=list)
    """Gradients times a factor, as new tensors."""
    plain: PlainParts = field(default_factory=PlainParts)
    in_hooks: set[Line | None] = field(default_factory=set)
    """Where hooks have read or compared something, within the backward pass."""
    asked_if_finite: bool = False
    """The script asks if something is finite: the answer does not depend on the scale."""


class Verdict:
    """Asked once, when the window is closed."""

    def __init__(self, moves: Moves, seen: Seen, found: Powers) -> None:
        self._moves = moves
        self._seen = seen
        self._found = found

    def judge(self) -> None:
        """Tell what was used as if it were not scaled."""
        seen = self._seen
        knows_scale = any(computes_with_scale(s) for s in {s.code: s for n in seen.numbers for s in n.spots}.values())
        told: set[OptimizerWatch] = set()
        uses = [(n, n.use()) for n in _distinct(seen.numbers) if not n.is_shown]
        multiplies = any(use.clips for _, use in uses)
        products = [c for ref, c in seen.products if c.is_limited or self._is_gradient(ref(), c)]
        for clip in seen.clips + products:
            misused = clip.power is not None and clip.power * (-1 if clip.is_division else 1) < 0
            if clip.by_comparison:
                misused = any(watch is clip.watch for watch, _ in seen.compared)
            elif clip.power is None:
                misused = clip.limits_values or multiplies
            if misused and clip.watch not in told and not (knows_scale or self._holds_scale()):
                told |= self._tell_clip(clip)
        if seen.plain.found and not (knows_scale or self._holds_scale()):
            self._tell_plain()
        if seen.asked_if_finite:
            return
        uses = [(n, use.in_view_of(n.where in self._found.cancelled)) for n, use in uses]
        raw = [(n.watch, n.where) for n, use in uses if use.is_raw and not (use.clips and knows_scale)]
        raw += [(n.watch, n.where) for n in seen.numbers if n.is_shown] + self._left_over()
        if not (knows_scale or (seen.compared and self._holds_scale())):
            raw += seen.compared
        for watch, where in raw:
            if watch not in told:
                told.add(watch)
                breaches = self._moves.machine.feed(Read(watch, where, clips=False))
                for breach in breaches:
                    breach.facts["in_hook"] = where in seen.in_hooks
                self._moves.second_looks.tell(breaches, watch)

    def _is_gradient(self, product: Tensor | None, clip: Clip) -> bool:
        """Whether a product has taken the place of a gradient."""
        if product is None or self._found.of_number(clip.factor):
            return False
        return any(p.grad is product for p in clip.watch.parameters())

    def _tell_clip(self, clip: Clip) -> set[OptimizerWatch]:
        """A limit for true gradients was applied to scaled ones: by how much does the update differ?"""
        facts: dict[str, Any] = {"by_hand": True, "by_comparison": clip.by_comparison}
        if not (clip.limits_values or clip.by_comparison):
            factor = _smallest(clip.factor, clip.is_division)
            wanted = min(1.0, factor * self._found.scale)
            if not factor:  # their norm has overflowed: by how much they are wrong, another step will show
                return {clip.watch}
            if abs(factor / wanted - 1.0) < NOT_CLIPPED:
                return set()
            facts |= {"multiplied_by": factor, "should_be": wanted, "update_too_small_by": wanted / factor}
        breaches: Sequence[Breach]
        if clip.taken_at is None:
            breaches = self._moves.machine.feed(Read(clip.watch, clip.where, clips=True))
        else:
            self._moves.close.assigned.clipped(clip.watch)
            facts |= {"scale": self._found.scale, "clips": True, "taken": True}
            breaches = [Breach("clip-before-unscale", clip.watch, None, clip.taken_at, clip.where, self._found.scale)]
        for breach in breaches:
            breach.facts |= facts
        self._moves.second_looks.tell(breaches, clip.watch)
        return {clip.watch}

    def _tell_plain(self) -> None:
        """The scaler is about to divide what carries no scale."""
        told: set[OptimizerWatch] = set()
        scale = self._found.scale
        for part in self._seen.plain.found:
            if part.watch in told or not part.is_in_gradient or not self._moves.machine.stage(part.watch).is_scaled:
                continue
            told.add(part.watch)
            facts = {"scale": scale, "added_by_hand": True, "in_hook": part.in_hook}
            breach = Breach("unscaled-backward", part.watch, None, part.where, None, 1.0 / scale, facts)
            self._moves.second_looks.tell([breach], part.watch)

    def _left_over(self) -> list[tuple[OptimizerWatch, Line | None]]:
        """Norms as tensors that the script's frames still hold, and that it goes on to use as they are."""
        left = []
        for quantity in self._found.known.values():
            tensor = quantity.ref()
            if tensor is None or quantity.is_used or not quantity.power or not quantity.is_reduced:
                continue
            if any(p.grad is tensor for p in quantity.watch.parameters()):
                continue  # put in the place of a gradient of one element
            frames = list(script_frames(sys._getframe(1)))
            for depth, frame in enumerate(frames):
                name = name_in(tensor, frame)
                if name is None:
                    continue
                spots = [Spot(f.f_code, f.f_lineno, scales_in(f, self._found.scale), f.f_lasti) for f in frames[depth:]]
                if use_of_name(spots, name, quantity.power).is_raw:
                    left.append((quantity.watch, quantity.where))
                break
        return left

    def _holds_scale(self) -> bool:
        """Whether a name of the script's frames is the scale: the limit was multiplied by it, before the backward pass."""
        return any(map(computes_with_scale, spots_of(sys._getframe(1), self._found.scale)))


def _distinct(numbers: list[Number]) -> list[Number]:
    """One of those read at the same place."""
    return list({(n.watch, n.power, *((id(s.code), s.line) for s in n.spots)): n for n in numbers}.values())


def _smallest(factor: Any, is_division: bool) -> float:
    """By what gradients were multiplied; the smallest where there is a factor a row. 0: their norm has overflowed in all rows."""
    with compat.unseen():
        factors = torch.as_tensor(factor).detach().to("cpu", torch.float64).abs().flatten()
        if is_division:
            factors = torch.where(factors == 0, 0.0, factors.reciprocal())
        some = factors[(factors > 0) & factors.isfinite()]
        return float(some.min()) if some.numel() else 0.0
