"""Gradients that the script puts into `.grad` itself, made from those of a loss: gradient surgery.

PCGrad and its kind take one gradient for each task, by `torch.autograd.grad` or by a backward pass each, combine them, and
assign what comes out. Which calls of the protocol it went through does not tell whether it carries the loss scale; its
size does, beside the sizes of what it was made from. In iterations that are looked at closely, a few small gradients of
each task are copied, and compared when the assigned ones are to be used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch, Seen
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.record import Line
from ampguard.compat import version_of

MOST_TASKS = 16
"""Gradients of one parameter that are copied in an iteration."""

APART = 16.0
"""By which factor a combination of gradients may be larger or smaller than the largest of them."""

ALIKE = 0.6
"""Cosine of the angle between the assigned gradients and what tasks span; less was made from something else."""

EXACT = 1e-4
EXPLAINED = 1e-5
"""Of its size, what may be left of an assigned gradient beside a sum of multiples of the tasks' gradients."""
ROUNDED = 1e-9
"""What computing that leaves in any case."""


@dataclass(slots=True)
class _Task:
    """One gradient of each parameter, by the parameter's identity; which scale they carry, and where they were made."""

    gradients: dict[int, Tensor]
    scale: DeviceScale | None
    where: Line | None


@dataclass(slots=True)
class _Tasks:
    """The gradients of an optimizer's parameters, for each task. `scale`: what all of them carry."""

    scale: DeviceScale | None
    where: Line | None
    seen: list[Seen]
    tasks: list[_Task] = field(default_factory=list)
    is_mixed: bool = False
    """Some of them carry another scale, or none."""
    are_too_many: bool = False
    are_clipped: bool = False
    """The script has clipped some of them while they carried the scale: what is made of them has no size that tells."""

    def of(self, parameter: Tensor) -> list[_Task]:
        return [task for task in self.tasks if id(parameter) in task.gradients]


@dataclass(frozen=True, slots=True)
class Assigned:
    """What was assigned. `scale`: that of the loss from which it was made; `carried`: whether it is still in it."""

    scale: DeviceScale | None
    where: Line | None
    carried: bool


class AssignedGradients:
    """What tasks gave, until the next update."""

    def __init__(self) -> None:
        self.tasks: dict[OptimizerWatch, _Tasks] = {}
        """By optimizer; empty in most iterations."""
        self._returned: dict[int, tuple[weakref.ref[Tensor], int, DeviceScale, Line | None]] = {}
        """What was returned for a parameter of a scaled loss, by the parameter's identity; and its version."""

    def knows(self, watch: OptimizerWatch) -> bool:
        return watch in self.tasks

    def taken(
        self, watches: Iterable[OptimizerWatch], given: tuple[Any, Any], scale: DeviceScale | None, where: Line | None
    ) -> bool:
        """`torch.autograd.grad` has returned gradients for its inputs (`given`: inputs, gradients). False: of no parameter."""
        inputs, results = given
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        by_id = {id(p): g for p, g in zip(inputs, results, strict=False) if isinstance(g, Tensor) and p.is_leaf}
        found = False
        if scale is not None:
            self._returned |= {key: (weakref.ref(g), version_of(g), scale, where) for key, g in by_id.items()}
        for watch in watches:
            mine = [(p, by_id[id(p)]) for p in watch.sample if id(p) in by_id and p.numel() <= SMALL]
            if mine:
                found = True
                tasks = self._of(watch, scale, where)
                for part in _split(mine):
                    self._add(tasks, part, scale, where)
        return found

    def added(self, watches: Iterable[OptimizerWatch], scale: DeviceScale | None, where: Line | None) -> None:
        """A backward pass has left gradients of a scaled loss."""
        for watch in watches:
            mine = [(p, p.grad) for p in watch.sample if type(p.grad) is Tensor and p.numel() <= SMALL]
            if mine:
                tasks = self._of(watch, scale, where)
                tasks.seen = _seen(watch)
                part = {id(p): g for p, g in mine if g is not None and not g.is_sparse}
                self._add(tasks, part, scale, where)

    def clipped(self, watch: OptimizerWatch) -> None:
        """Some of its tasks' gradients were clipped while they carried the scale."""
        if watch in self.tasks:
            self.tasks[watch].are_clipped = True

    def left_by_backward(self, watch: OptimizerWatch, parameter: Tensor) -> list[Tensor]:
        """Copies of a parameter's gradient as the passes of this iteration have left it."""
        tasks = self.tasks.get(watch)
        return [task.gradients[id(parameter)] for task in tasks.of(parameter)] if tasks is not None else []

    def forget(self, watch: OptimizerWatch | None = None) -> None:
        """An iteration is over, or the step of one optimizer."""
        if watch is None:
            self.tasks.clear()
            self._returned.clear()
        else:
            self.tasks.pop(watch, None)

    def _of(self, watch: OptimizerWatch, scale: DeviceScale | None, where: Line | None) -> _Tasks:
        tasks = self.tasks.get(watch)
        if tasks is None:
            tasks = self.tasks[watch] = _Tasks(scale, where, _seen(watch))
        tasks.is_mixed = tasks.is_mixed or tasks.scale is not scale
        tasks.where = where
        return tasks

    @staticmethod
    def _add(tasks: _Tasks, part: dict[int, Tensor], scale: DeviceScale | None, where: Line | None) -> None:
        tasks.are_too_many = tasks.are_too_many or len(tasks.tasks) >= MOST_TASKS
        if not tasks.are_too_many:
            with torch.no_grad(), compat.unseen():
                kept = {key: gradient.detach().clone() for key, gradient in part.items()}
            tasks.tasks.append(_Task(kept, scale, where))

    def to(self, watch: OptimizerWatch, scale: DeviceScale) -> Assigned | None:
        """Whether the gradients that the script has put in place carry `scale`. None: it has put none there, or it cannot
        be told. Waits for the device."""
        as_returned = self._as_returned(watch)
        if as_returned is not None:
            return as_returned
        tasks = self.tasks.get(watch)
        if tasks is None or tasks.is_mixed or tasks.are_too_many or tasks.are_clipped:
            return None
        if not _has_changed(tasks.seen, _seen(watch)):
            return None
        size = float(scale)
        kinds = (True, 1.0), (False, 1.0 / size)
        if tasks.scale is None:
            kinds = (True, size), (False, 1.0)
        apart = min(APART, size**0.5 / 2)
        with torch.no_grad(), compat.unseen():
            ratios = [ratio for p in watch.sample if (ratio := _ratio(p, tasks.of(p))) is not None]
            if not ratios or _is_normalised(watch):
                return None
        found = {carried for carried, usual in kinds if all(1 / apart <= ratio / usual <= apart for ratio in ratios)}
        return Assigned(tasks.scale, tasks.where, found.pop()) if len(found) == 1 else None

    def _as_returned(self, watch: OptimizerWatch) -> Assigned | None:
        """Whether they are what was returned of a scaled loss, put in place as it is: however few elements they have."""
        found = None
        for p in watch.sample if self._returned else ():
            grad = p.grad
            if grad is None:
                continue
            ref, version, scale, where = self._returned.get(id(p), (None, -1, None, None))
            if ref is None or ref() is not grad or version_of(grad) != version:
                return None
            found = Assigned(scale, where, True)
        return found

    def are_mixed(self, watch: OptimizerWatch) -> bool:
        """Whether some of its tasks' gradients carry a scale and others none."""
        tasks = self.tasks.get(watch)
        return tasks is not None and len({task.scale is None for task in tasks.tasks}) == 2

    def partly_scaled(self, watch: OptimizerWatch, scale: float) -> tuple[float, Line | None] | None:
        """Where the script has put sums in place of a gradient that carries `scale` and of one that does not: the factor
        of the latter, and where it was made. Waits for the device."""
        tasks = self.tasks.get(watch)
        if tasks is None or not tasks.is_mixed or tasks.are_too_many or not _has_changed(tasks.seen, _seen(watch)):
            return None
        with torch.no_grad(), compat.unseen():
            found = [plain for p in watch.sample if (plain := _plain_part(p, tasks.of(p), scale)) is not None]
        return found[0] if found else None

    def put_in_place(self, watch: OptimizerWatch, scale: float) -> tuple[float, Line | None] | None:
        """Where the script has put what unscaled gradients make, and nothing else, in the place of one that carried
        `scale`: how large it is beside the largest of them, and where that was made. Waits for the device."""
        tasks = self.tasks.get(watch)
        if tasks is None or tasks.are_too_many or not _has_changed(tasks.seen, _seen(watch)):
            return None
        with torch.no_grad(), compat.unseen():
            found = [
                (ratio, plain[-1].where)
                for p in watch.sample
                if (plain := [task for task in tasks.of(p) if task.scale is None]) and len(plain) < len(tasks.of(p))
                if (ratio := _ratio(p, plain, EXPLAINED)) is not None
            ]
        apart = min(APART, scale**0.5 / 2)
        if not found or not all(1 / apart <= ratio <= apart for ratio, _ in found) or _is_normalised(watch):
            return None
        return found[0]


def _seen(watch: OptimizerWatch) -> list[Seen]:
    return [(g, version_of(g) if g is not None else -1) for g in [p.grad for p in watch.sample]]


def _has_changed(before: list[Seen], now: list[Seen]) -> bool:
    return any(a is not b or v != w for (a, v), (b, w) in zip(before, now, strict=False))


def _split(mine: list[tuple[Tensor, Tensor]]) -> list[dict[int, Tensor]]:
    """One part, or (`is_grads_batched`) one for each row."""
    if all(g.shape == p.shape for p, g in mine):
        return [{id(p): g for p, g in mine}]
    rows = {len(g) if g.dim() == p.dim() + 1 else 0 for p, g in mine}
    count = rows.pop() if len(rows) == 1 else 0
    return [{id(p): g[i] for p, g in mine} for i in range(min(count, MOST_TASKS + 1))]


def _ratio(parameter: Tensor, tasks: list[_Task], most_left: float = (1 - ALIKE**2) ** 0.5) -> float | None:
    """The size of the gradient in place over that of the largest task's; None where it was not made from them.

    `most_left`: how much of it may be no sum of multiples of theirs.
    """
    found = _in_place_and_made(parameter, tasks)
    if found is None:
        return None
    now, made = found
    largest, norm = float(made.norm(dim=1).max()), float(now.norm())
    if not (0 < largest < float("inf")) or not (0 < norm < float("inf")):
        return None
    return norm / largest if float(_left(now, made).norm()) <= most_left * norm else None


def _plain_part(parameter: Tensor, tasks: list[_Task], scale: float) -> tuple[float, Line | None] | None:
    """The factor of a task's gradient without the scale in a sum with others that carry it, and where it was made."""
    scaled = [task for task in tasks if task.scale is not None and float(task.scale) == scale]
    plain = [task for task in tasks if task.scale is None]
    found = _in_place_and_made(parameter, scaled + plain)
    if found is None or not scaled or not plain or len(scaled) + len(plain) < len(tasks):
        return None
    now, made = found
    norm = float(now.norm())
    if not bool(made.isfinite().all()) or not (0 < norm < float("inf")):
        return None
    left, without = float(_left(now, made).norm()), float(_left(now, made[: len(scaled)]).norm())
    if left > EXPLAINED * norm or without < 2 * max(left, ROUNDED * norm):
        return None
    factors = (torch.linalg.pinv(made.T) @ now).tolist()
    is_usual = any(1 / APART <= abs(factor) <= APART for factor in factors[: len(scaled)])
    for factor, task in zip(factors[len(scaled) :], plain, strict=True):
        if is_usual and 1 / APART <= abs(factor) <= min(APART, scale / APART):
            return factor, task.where
    return None


def _in_place_and_made(parameter: Tensor, tasks: list[_Task]) -> tuple[Tensor, Tensor] | None:
    """The gradient in place, and one row for each task's; None where too few elements tell them apart."""
    grad = parameter.grad
    if grad is None or grad.is_sparse or not tasks or grad.numel() < 8 * len(tasks):
        return None
    rows = [task.gradients[id(parameter)].double().flatten() for task in tasks]
    return grad.detach().double().flatten(), torch.stack(rows)


def _left(now: Tensor, made: Tensor) -> Tensor:
    """What of `now` is no sum of multiples of the rows."""
    left: Tensor = now - made.T @ (torch.linalg.pinv(made.T) @ now)
    return left


def _is_normalised(watch: OptimizerWatch) -> bool:
    """Whether they have a length that somebody has chosen, or only signs: no scale is in them, whatever they were made from."""
    grads = [p.grad.detach().double() for p in watch.parameters() if p.grad is not None and not p.grad.is_sparse]
    norm = float(torch.stack([g.norm() for g in grads]).norm())
    sizes = torch.cat([g.flatten().abs() for g in grads if g.numel() <= SMALL])
    sizes = sizes[sizes > 0]
    if len(sizes) and float(sizes.max() - sizes.min()) <= EXACT * float(sizes.max()):
        return True
    return abs(norm / float(f"{norm:.1e}") - 1.0) < EXACT
