"""Hooks of the script's on its parameters that clip or divide gradients in the middle of a scaled backward pass.

`p.register_hook(lambda g: g.clamp(-1, 1))` sees the gradient times the loss scale, and so does a hook that divides by
the norm, in `register_post_accumulate_grad_hook` as well. In the iterations that are looked at closely, what goes into
such hooks and what comes out is compared, for the few parameters that stand for all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.graph_hooks import code_of
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import Line

SMALLEST_LIMIT = 1e-3
"""Times the scale: a limit from there on may have been multiplied by the scale."""

SAME_NORM = 1e-3
OTHER_FACTOR = 1e-2
CHOSEN = 1e-5
FEWEST_ROWS = 4
MOST_ROWS = 0.8
"""Of the rows that a limit has shrunk, how many lie on it; weights near 0 may have a limit of their own."""


@dataclass(frozen=True, slots=True)
class HookClip:
    """A hook that clips: whose gradients, where it is written, to which limit, and the limit of what."""

    watch: OptimizerWatch
    where: Line | None
    limit: float
    of: Literal["value", "norm", "unit"]
    """Of each value, of a parameter's norm, or of the norm of each row beside that of its weights (Brock et al. 2021,
    adaptive gradient clipping)."""


@dataclass(frozen=True, slots=True)
class HookDivision:
    """A hook that divides the gradients by the loss scale."""

    watch: OptimizerWatch
    where: Line | None


@dataclass(slots=True)
class _Passage:
    """A parameter's gradient on its way through the script's hooks: before the first, and after each of them."""

    watch: OptimizerWatch
    parameter: Tensor
    hooks: list[Line | None]
    is_complete: bool
    """Behind the hooks that get the gradient alone: these get the parameter, with its gradient added up."""
    arrives: Callable[[Tensor, OptimizerWatch], None]
    """Told of the gradient before each of them."""
    handles: list[Any] = field(default_factory=list)
    seen: list[Tensor | None] = field(default_factory=list)
    """None where a hook has taken the gradient away (an optimizer that steps in backward)."""

    def clips(self) -> HookClip | None:
        """The first hook that clips by value."""
        for where, before, after in self.changes():
            limit = clipped_at(before, after)
            if limit is not None:
                return HookClip(self.watch, where, limit, "value")
        return None

    def divides_by(self, scale: float) -> tuple[Line | None] | None:
        """The line of a hook that divides all of a gradient by the scale."""
        for where, before, after in self.changes():
            factor = shrunk_by(before, after)
            if factor is not None and abs(factor * scale - 1.0) < OTHER_FACTOR:
                return (where,)
        return None

    def changes(self) -> Iterable[tuple[Line | None, Tensor, Tensor]]:
        """Each hook's line, the gradient before it and behind it."""
        pairs = zip(self.hooks, self.seen, self.seen[1:], strict=False)
        return [(where, before, after) for where, before, after in pairs if before is not None and after is not None]

    def see(self, gradient: Tensor) -> None:
        self.arrives(gradient, self.watch)
        with torch.no_grad(), compat.unseen():
            self.seen.append(gradient.detach().clone())

    def see_complete(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            self.seen.append(None)
        else:
            self.see(parameter.grad)


class LeafHooks:
    """Looks at what the script's hooks do to gradients, in one backward pass."""

    def __init__(self, arrives: Callable[[Tensor, OptimizerWatch], None] = lambda gradient, watch: None) -> None:
        """`arrives` is told of each gradient that the script's hooks are about to get."""
        self._arrives = arrives
        self._passages: list[_Passage] = []
        self._put_at: weakref.WeakKeyDictionary[Any, Line] = weakref.WeakKeyDictionary()
        """Where hooks were put on parameters that run no code of the script's: `functools.partial(torch.clamp, max=1)`."""
        self.left: list[Tensor] = []
        """What each of the script's hooks has made of a gradient in the last pass."""

    def note(self, hook: Any, line: Line | None) -> None:
        """The script puts this hook on a parameter, at a line of its own."""
        if line is not None and _line_of(hook) is None:
            with contextlib.suppress(TypeError):  # an object of which there is no weak reference, or no hash
                self._put_at[hook] = line

    def begin(self, watches: Iterable[OptimizerWatch]) -> None:
        """Put a look before and behind the script's hooks. Most scripts have none."""
        self.end()  # a backward pass that raised
        for watch in watches:
            for p in [p for p in watch.sample if p.requires_grad and p.numel() <= SMALL]:  # frozen for a while, perhaps
                before, behind = compat.hooks_of_leaf(p), compat.hooks_behind_leaf(p)
                if before:
                    passage = _Passage(watch, p, [], False, self._arrives)
                    self._passages.append(self._watched(before, passage, p.register_hook))
                if behind:
                    passage = _Passage(watch, p, [], True, self._arrives)
                    self._passages.append(self._watched(behind, passage, p.register_post_accumulate_grad_hook))

    def _watched(self, hooks: Any, passage: _Passage, put: Any) -> _Passage:
        """Looks before, between and behind the hooks: autograd goes by the order in which they were put in."""
        own = dict(hooks)
        passage.hooks = [_line_of(hook) or self._noted(hook) for hook in own.values()]
        see = passage.see_complete if passage.is_complete else passage.see
        passage.handles.append(put(see))
        for identity, hook in own.items():
            del hooks[identity]
            hooks[identity] = hook
            passage.handles.append(put(see))
        return passage

    def _noted(self, hook: Any) -> Line | None:
        try:
            return self._put_at.get(hook)
        except TypeError:
            return None

    @property
    def are_there(self) -> bool:
        """Whether the script has some, on parameters that are looked at in this pass."""
        return bool(self._passages)

    def arrived(self, watch: OptimizerWatch, scale: float) -> list[tuple[Tensor, Tensor]]:
        """Parameters of `watch` with the gradient that has come and that no hook has divided by the scale on its way."""
        mine = [passage for passage in self._passages if passage.watch is watch]
        divided = {id(each.parameter) for each in mine if not each.is_complete and each.divides_by(scale)}
        found = [(each.parameter, each.seen[0]) for each in mine if each.is_complete and each.seen]
        return [(p, gradient) for p, gradient in found if gradient is not None and id(p) not in divided]

    def end(self, scale: float | None = None) -> list[HookClip | HookDivision]:
        """Take them away. Who has clipped, or divided by the scale: one for each optimizer."""
        passages, self._passages = self._passages, []
        self.left = [after for passage in passages for _, _, after in passage.changes()]
        found: dict[OptimizerWatch, HookClip | HookDivision] = {}
        for passage in passages:
            for handle in passage.handles:
                handle.remove()
        for passage in passages if scale is not None and scale > 1.0 else ():
            where = passage.divides_by(scale or 1.0)
            if where is not None:
                found.setdefault(passage.watch, HookDivision(passage.watch, where[0]))
        for passage in passages:
            clip = passage.clips()
            if clip is not None:
                found.setdefault(passage.watch, clip)
        for clip in (*_by_unit(passages), *_by_norm((p.watch, *change) for p in passages for change in p.changes())):
            found.setdefault(clip.watch, clip)
        return list(found.values())


def clip_of(watch: OptimizerWatch, changes: Sequence[tuple[Line | None, Tensor, Tensor]]) -> HookClip | None:
    """The first clip among what hooks have made of gradients (the line, before, behind): by value, or all to one norm."""
    for where, before, after in changes:
        limit = clipped_at(before, after)
        if limit is not None:
            return HookClip(watch, where, limit, "value")
    by_norm = _by_norm((watch, *change) for change in changes)
    return by_norm[0] if by_norm else None


def _line_of(hook: Any) -> Line | None:
    """Where its code begins, if that is the script's."""
    code = code_of(hook)
    return Line(code, code.co_firstlineno) if code is not None and is_script_code(code) else None


def _by_norm(changes: Iterable[tuple[OptimizerWatch, Line | None, Tensor, Tensor]]) -> list[HookClip]:
    """Hooks that have brought gradients to one norm, each by another factor, or to a norm that is a round number.

    One factor for all is no clipping.
    """
    shrunk: dict[tuple[OptimizerWatch, int], list[tuple[Line | None, float, float]]] = {}
    for watch, where, before, after in changes:
        factor = shrunk_by(before, after)
        if factor is not None and where is not None:
            norms = shrunk.setdefault((watch, id(where.code)), [])
            norms.append((where, factor, float(after.double().norm())))
    found = []
    for (watch, _), seen in shrunk.items():
        where, factor, limit = seen[0]
        same = [f for _, f, norm in seen if abs(norm / limit - 1.0) < SAME_NORM]
        are_alike = len(same) == len(seen)
        if are_alike and (any(abs(f / factor - 1.0) > OTHER_FACTOR for f in same) or is_chosen(limit)):
            found.append(HookClip(watch, where, limit, "norm"))
    return found


def _by_unit(passages: Iterable[_Passage]) -> list[HookClip]:
    """Hooks that have brought the rows of gradients to one share of the norms of their weights, each by another factor."""
    rows: dict[tuple[OptimizerWatch, int], tuple[Line, list[Tensor]]] = {}
    for passage in passages:
        for where, before, after in passage.changes():
            shrunk = _shrunk_rows(before, after, passage.parameter) if where is not None else None
            if shrunk is not None and where is not None:
                rows.setdefault((passage.watch, id(where.code)), (where, []))[1].append(shrunk)
    found = []
    for (watch, _), (where, seen) in rows.items():
        factors, shares = torch.cat(seen, dim=1)
        limit = float(shares.median()) if shares.numel() >= FEWEST_ROWS else 0.0
        if not limit or float(factors.max() / factors.min()) < 1.0 + OTHER_FACTOR:
            continue
        if float(((shares / limit - 1.0).abs() < SAME_NORM).double().mean()) >= MOST_ROWS:
            found.append(HookClip(watch, where, limit, "unit"))
    return found


def _shrunk_rows(before: Tensor, after: Tensor, weights: Tensor) -> Tensor | None:
    """Of each row that was multiplied by a factor below 1: (the factor, its norm now over that of the weights), (2, rows).

    A vector is one row. None where something else was done to some row. Waits for the device.
    """
    if (
        not before.shape == after.shape == weights.shape
        or before.is_sparse
        or before.is_complex()
        or not before.numel()
    ):
        return None
    with torch.no_grad(), compat.unseen():
        count = before.shape[0] if before.dim() > 1 else 1
        a, b, w = (t.detach().double().reshape(count, -1) for t in (before, after, weights))
        norm = a.norm(dim=1)
        has_any = (norm > 0) & (w.norm(dim=1) > 0)
        a, b, w, norm = a[has_any], b[has_any], w[has_any], norm[has_any]
        factor = (a * b).sum(1) / norm.square()
        is_of_factor = (b - factor[:, None] * a).norm(dim=1) <= SAME_NORM * b.norm(dim=1)
        if not bool((is_of_factor & (factor > 0) & (factor < 1.0 + SAME_NORM)).all()):
            return None
        is_less = factor < 1.0 - SAME_NORM
        return torch.stack((factor, b.norm(dim=1) / w.norm(dim=1)))[:, is_less]


def is_chosen(norm: float) -> bool:
    """Whether it has no more than two significant digits, as a limit that somebody has written down."""
    return bool(norm) and abs(norm / float(f"{norm:.1e}") - 1.0) < CHOSEN


def shrunk_by(before: Tensor, after: Tensor) -> float | None:
    """The factor below 1 by which all of a gradient was multiplied; None where it was not. Waits for the device."""
    if before.shape != after.shape or before.is_sparse or not before.numel():
        return None
    with torch.no_grad(), compat.unseen():
        a, b = before.double().flatten(), after.double().flatten()
        square = float(a @ a)
        factor = float(a @ b) / square if square else 1.0
        is_factor = 0.0 < factor < 1.0 - SAME_NORM and float((b - factor * a).norm()) <= SAME_NORM * float(b.norm())
    return factor if is_factor else None


def clipped_at(before: Tensor, after: Tensor) -> float | None:
    """The limit, where what was larger than it was set to it and all else left as it was. Waits for the device."""
    if before.shape != after.shape or before.is_sparse or not before.numel():
        return None
    with torch.no_grad(), compat.unseen():
        limit = float(after.abs().max())
        cut = before.abs() > limit
        if not limit or not bool(cut.any()) or not bool(before.isfinite().all()):
            return None
        if bool(cut.all()) and float(before.abs().max() - before.abs().min()) <= SAME_NORM * float(before.abs().max()):
            return None  # of one size, before as behind: they may as well have been multiplied
        return limit if torch.equal(torch.where(cut, before.sign() * limit, before), after) else None
