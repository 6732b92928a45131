"""Parameters that get a gradient in every step and that no optimizer has ever held: they keep the values they began with.

A temperature or the weights of a loss that were forgotten when the optimizer was built; layers in a plain list, which
`parameters()` does not see. Who leaves the larger part of what gets gradients out of the optimizer means it (a backbone under
a probe that is not frozen, a network that only measures), and nothing is said. Nor where the script writes to them itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.judging.plain_leaves import LastingLeaves
from ampguard.capture.protocol.gradients import SMALL, OptimizerWatch
from ampguard.capture.protocol.models import Models, unowned
from ampguard.capture.protocol.moves import Moves
from ampguard.compat import version_of
from ampguard.protocol.events import Breach

FIRST_LOOK, SECOND_LOOK = 2, 4
"""Steps after which plain tensors are looked for: those that are the same in both. Later, less is kept of what a step does."""
JUDGED = 10
"""Steps after which it is said of what has not changed since, at the end of a run; `LIVE_STEPS`: while it goes on."""
LIVE_STEPS = 256
OWN_SHARE = 0.25
"""Of the elements that optimizers train: what hangs in no network (a loss, a tensor of the script's) may have this many."""
INNER_SHARE = 0.02
"""The same of parameters that lie between others of a network that is trained."""
ALIKE = 2
"""Modules in one plain list, at the fewest: a single one is hidden in a list on purpose."""


@dataclass(slots=True)
class _Left:
    """One that was left out, as it was. `inside`: the attribute of a module that hides it."""

    parameter: weakref.ref[Tensor]
    version: int
    value: Tensor | None
    inside: str | None

    @staticmethod
    def of(parameter: Tensor, inside: str | None) -> _Left:
        with compat.unseen():
            value = compat.local_part(parameter.detach()).clone() if parameter.numel() <= SMALL else None
        return _Left(weakref.ref(parameter), version_of(parameter), value, inside)

    def is_left(self, held: set[int], has_ended: bool = False) -> bool:
        """Whether it has a gradient still (until the run has ended), and nobody has written to it. Waits for the device."""
        p = self.parameter()
        if p is None or id(p) in held or version_of(p) != self.version or not (has_ended or _has_gradient(p)):
            return False
        return self.value is None or bool(compat.local_part(p.detach()).equal(self.value))


class NeverHeld:
    """Looks once in the first steps of a run, and now and then whether that is still so."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self._leaves = LastingLeaves()
        self._left: list[_Left] | None = None
        self._thread = 0
        """The thread that has found them, and that alone looks at their gradients."""
        self._by: weakref.ref[OptimizerWatch] | None = None
        """Whose steps are counted."""
        self._is_told = False

    def after_step(self, watch: OptimizerWatch) -> None:
        """A step that is looked at."""
        steps = watch.steps
        if self._left is None and steps in (FIRST_LOOK, SECOND_LOOK) and self._is_the_one(watch):
            with compat.unseen():
                self._leaves.see(self._models.plain_leaves())
                if steps == SECOND_LOOK:
                    self._left, self._thread = self._look(), get_ident()
        elif self._left and self._thread == get_ident():
            with compat.unseen():
                self._judge(watch)

    def run_ends(self) -> None:
        """What was written to since the last look (once an epoch, by hand) is taken back."""
        watch = self._by() if self._by is not None else None
        if not self._left or watch is None:
            return
        held, before = {id(p) for p in self._held()}, len(self._left)
        with compat.unseen():
            self._left = [left for left in self._left if left.is_left(held, has_ended=True)]
            if len(self._left) < before and watch.steps >= JUDGED:
                breach = self._breach(watch) if self._left else None
                self._moves.listener.on_suspicion(("never-held",), breach, watch.first_step or 0)

    def _is_the_one(self, watch: OptimizerWatch) -> bool:
        if self._by is None or self._by() is None:
            self._by = weakref.ref(watch)
        return self._by() is watch

    def _look(self) -> list[_Left]:
        held = self._held()
        self._models.look()
        mine = [p for watch in self._moves.mine() for p in watch.parameters()]
        trained = sum(p.numel() for p in mine if p.grad is not None)
        hidden = dict(_hidden_in(self._models.mine(), {id(p) for p in held}))
        found = [_Left.of(p, inside) for p, inside in hidden.items()]
        others = [p for p in unowned(self._models, held) if p not in hidden and _has_gradient(p)]
        plain = [p for p in self._leaves.lasting() if isinstance(p, nn.Parameter) and p not in hidden]
        own: list[Tensor] = [p for p in plain if _is_new(p, held)]
        own += [p for p in others if self._stands_alone(p)]
        inner = [p for p in others if not self._stands_alone(p)]
        if sum(p.numel() for p in inner) > INNER_SHARE * trained or sum(p.numel() for p in own) > OWN_SHARE * trained:
            return found
        return found + [_Left.of(p, None) for p in (*own, *inner)]

    def _stands_alone(self, parameter: Tensor) -> bool:
        """Whether it belongs to a module that was called by itself and consists of nothing else than its own parameters."""
        roots = [root for root, _ in self._models.roots() if any(p is parameter for p in compat.own_parameters(root))]
        return any(len(compat.all_parameters(root)) == len(compat.own_parameters(root)) for root in roots)

    def _judge(self, watch: OptimizerWatch) -> None:
        assert self._left is not None
        held = {id(p) for p in self._held()}
        before = len(self._left)
        self._left = [left for left in self._left if left.is_left(held)]
        key, first = ("never-held",), watch.first_step or 0
        is_stale = any(other.is_stale for other in self._moves.watches.optimizers)
        if not self._left or is_stale:  # (what a stale optimizer holds in vain is told with what is trained instead)
            self._left = []
            self._moves.listener.on_suspicion(key, None, 0)
            return
        is_one = self._is_the_one(watch) and watch.steps >= JUDGED
        if not is_one or (before == len(self._left) and (self._is_told or JUDGED < watch.steps < LIVE_STEPS)):
            return
        breach = self._breach(watch)
        self._moves.listener.on_suspicion(key, breach, first)
        if watch.steps >= LIVE_STEPS and not self._is_told:
            self._is_told = True
            self._moves.listener.on_told_early(key, breach, first)

    def _breach(self, watch: OptimizerWatch) -> Breach:
        left = [(p, each.inside) for each in self._left or () if (p := each.parameter()) is not None]
        facts: dict[str, Any] = {"parameters": [p for p, _ in left], "never_held": True, "steps": watch.steps}
        facts["hidden_in"] = list(dict.fromkeys(inside for _, inside in left if inside is not None))
        facts["of"] = len(watch.parameters())
        stepped = self._moves.machine.ledger(watch).stepped_at
        return Breach("stale-parameters", watch, None, watch.created, stepped, None, facts)

    def _held(self) -> list[Tensor]:
        return [p for watch in self._moves.watches.optimizers for p in watch.parameters()]


def _is_new(parameter: Tensor, held: list[Tensor]) -> bool:
    return _has_gradient(parameter) and not any(p is parameter for p in held)


def _has_gradient(parameter: Tensor) -> bool:
    """Waits for the device."""
    gradient = parameter.grad
    return gradient is not None and not gradient.is_sparse and bool(compat.local_part(gradient).any())


def _hidden_in(roots: Iterable[nn.Module], held: set[int]) -> Iterator[tuple[Tensor, str]]:
    """Trained parameters of modules in plain containers of a module's, each with the container's name."""
    known = {id(p) for root in roots for p in compat.all_parameters(root)} | held
    for root in roots:
        for prefix, module in compat.named_modules(root):
            for name, value in list(vars(module).items()):
                inside = [m for m in _values(value) if isinstance(m, (nn.Module, nn.Parameter))]
                if name.startswith("_") or len(inside) < ALIKE or isinstance(value, nn.Module):
                    continue
                if any(isinstance(m, nn.Module) and not getattr(m, "training", True) for m in inside):
                    continue
                tensors = [p for m in inside for p in (compat.all_parameters(m) if isinstance(m, nn.Module) else (m,))]
                lost = [p for p in tensors if id(p) not in known and p.requires_grad]
                yield from ((p, f"{prefix}.{name}" if prefix else name) for p in lost if _has_gradient(p))


def _values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
