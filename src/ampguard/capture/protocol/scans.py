"""Looking at every parameter of an optimizer, rarely: which have never had a gradient, and why.

In the first steps and then at powers of two; in between, only parameters that have had none are asked.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.flags import is_immediate
from ampguard.capture.frames import locals_of
from ampguard.capture.judging.plain_leaves import LastingLeaves
from ampguard.capture.protocol.frozen import FrozenSince, is_frozen
from ampguard.capture.protocol.gradients import OptimizerWatch, is_empty
from ampguard.capture.protocol.models import (
    Models,
    hold_flat,
    left_buffer,
    look_alike,
    orphans,
    share_memory,
    unowned,
    unowned_plain,
    wrapped_around,
)
from ampguard.capture.protocol.moves import Moves
from ampguard.capture.protocol.script_lines import is_script_code, script_line
from ampguard.capture.protocol.still_frozen import StillFrozen
from ampguard.capture.protocol.unused import replaced_by_tying, unused_facts
from ampguard.compat import version_of
from ampguard.errors import message_of
from ampguard.protocol.events import Breach, Clear

EARLY_STEPS = 3
LOOKS = frozenset(
    [1 << k for k in range(40)]
    + [n * 10**k - late for k in range(1, 12) for n in (1, 2, 5) for late in (0, 1)]
    + [n * 500 - late for n in range(1, 40) for late in (0, 1)]
    + [n * 1000 - late for n in range(20, 2000) for late in (0, 1)]
)
"""Iterations that are looked at closely, besides the first: powers of two, and those in which scripts log and evaluate
(`step % 50 == 0`, `(step + 1) % 50 == 0`), which no power of two falls on. What begins late is not to wait for long."""

ASKED_EACH_STEP = 64
UNUSED_STEPS = 8
"""Steps after which a parameter without any gradient is called unused, at the end of a run. Less says nothing: a batch
may miss a branch; in a long run it is said live after `LIVE_STEPS`, when most warm-ups and rare tasks would have shown,
and taken back where a part of the model joins later still."""

LIVE_STEPS = 256
MAX_COLLECTIONS = 3
"""Of garbage, in a run: each takes as long as all of its objects ask for."""

STALE_STEPS = 2
RESCAN_STEPS = 32
"""A layer may be replaced at any time."""


DDP_REFUSES = "Expected to have finished reduction in the prior iteration"
"""What DistributedDataParallel says where it still waits for gradients."""


class Scans:
    """One look at an optimizer after its step, while the gradients are still there."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self._told: set[tuple[str, int]] = set()
        self._collections = 0
        self._versions = compat.by_tensor()
        """Of parameters that were put around frozen ones and that no optimizer holds, when first seen."""
        self._frozen = FrozenSince(moves)
        self.still_frozen = StillFrozen(moves, models)
        self._suspected: dict[OptimizerWatch, list[weakref.ref[Tensor]]] = {}
        """Parameters that were suspected of being unused: the optimizer may be gone, and another one train them later."""
        self._leaves = LastingLeaves()
        self._before: tuple[OptimizerWatch, list[tuple[Tensor, Tensor]]] | None = None
        """Parameters of an optimizer that is about to step, each with its values."""
        moves.is_stale = self.is_stale
        self.asked: list[OptimizerWatch] = []
        """Whose parameters without a gradient are asked once more after each backward pass before their next step."""

    def after_backward(self) -> None:
        """Has a parameter that had no gradient at the step got one now? Then the script drops it in between."""
        for watch in self.asked:
            candidates = watch.candidates or []
            is_scanned = watch.looks_left > 0 or _is_scanned(watch.steps + 1)
            if is_scanned and orphans(self._models, candidates or watch.trained()):
                self._leaves.see(self._models.plain_leaves())
            if len(candidates) < len(watch.trained()):
                self._had_gradients(watch, [p for p in candidates if p.grad is not None])

    def before_step(self, optimizer: Optimizer) -> None:
        """Keep a few of the parameters of one that has had no gradient at all: its step may compute its own (Newton's)."""
        watch = next((watch for watch in self.asked if watch.ref() is optimizer), None)
        if watch is not None and len(watch.candidates or ()) == len(watch.trained()):
            self._before = watch, [(p, p.detach().clone()) for p in watch.sample]

    def _moves_itself(self, watch: OptimizerWatch) -> bool:
        """Whether its step has just changed parameters that have no gradient."""
        before, self._before = self._before, None
        return before is not None and before[0] is watch and any(not torch.equal(p, old) for p, old in before[1])

    def _clear_of_suspicion(self) -> None:
        """A parameter of an optimizer that is gone may have a gradient now: who made the optimizer anew trains it."""
        gone = [watch for watch in self._suspected if watch.ref() is None]
        for watch in gone:
            if any((p := ref()) is not None and p.grad is not None for ref in self._suspected[watch]):
                del self._suspected[watch]
                self._moves.listener.on_suspicion(("unused", watch), None, 0)

    def after_step(self, watch: OptimizerWatch) -> None:
        """Look, where it is time to."""
        if self._before is not None and self._moves_itself(watch):
            watch.had_gradient |= {id(p) for p in watch.candidates or ()}
        if self.asked:
            self.asked = [other for other in self.asked if other is not watch]
        steps = watch.steps
        if _is_scanned(steps) or watch.lost_one or watch.looks_left:
            self._scan(watch)
        elif watch.candidates:
            self._ask_some(watch, steps)

    def _ask_some(self, watch: OptimizerWatch, steps: int) -> None:
        """Has one of them got a gradient after all? Some of them in turn."""
        candidates = watch.candidates
        assert candidates is not None
        first = steps * ASKED_EACH_STEP % len(candidates) if len(candidates) > ASKED_EACH_STEP else 0
        self._had_gradients(watch, [p for p in candidates[first : first + ASKED_EACH_STEP] if p.grad is not None])

    def _had_gradients(self, watch: OptimizerWatch, found: list[Tensor]) -> None:
        """These candidates are none."""
        if not found:
            return
        watch.had_gradient |= {id(p) for p in found}
        watch.candidates = [p for p in watch.candidates or () if id(p) not in watch.had_gradient]
        if watch.candidates:
            self._judge(watch)
        else:
            self._moves.listener.on_suspicion(("unused", watch), None, 0)

    def _scan(self, watch: OptimizerWatch) -> None:
        if self._suspected:
            self._clear_of_suspicion()
        trained = watch.trained()
        held = {id(p) for p in watch.parameters()}
        if not all(id(p) in held for p in watch.sample):  # it was given other tensors: what is known is not about them
            self._moves.machine.feed(Clear(watch))
        ledger = self._moves.machine.ledger(watch)
        is_idle = ledger.idle_steps > 0
        # What no backward pass has ever reached has its gradients from the script: zeros are those of a loss that is 0.
        are_zeros = 0 < ledger.empty_steps < ledger.steps and _have_zeros(trained)
        without = [p for p in trained if (p.grad is None or is_idle or are_zeros) and not is_empty(p)]
        before, now = watch.without_since, self._moves.attempt
        watch.without_since = {
            id(p): before[id(p)] if id(p) in before else left_at(watch, p, trained, now) for p in without
        }
        watch.versions = now, {id(p): version_of(p) for p in trained}
        if watch.first_step is None:
            watch.first_step = now
        if not is_idle and len(watch.had_gradient) != len(trained):
            watch.had_gradient |= {id(p) for p in trained if p.grad is not None}
        watch.candidates = [p for p in without if id(p) not in watch.had_gradient and (p.grad is None or is_idle)]
        self._look_again(watch, are_gone=len(without) == len(trained) and not watch.candidates)
        if watch.candidates or watch.looks_left:
            self.asked.append(watch)
        if watch.steps <= EARLY_STEPS or watch.lost_one:
            watch.resample()
            watch.rest()
        if watch.lost_one:  # the routine has known the gradients of others
            self._moves.routine.spoil()
        watch.lost_one = False
        self.still_frozen.look(watch)
        if watch.steps >= STALE_STEPS and not without:
            self._look_for_moved(watch)
            if is_time_to_look(watch.steps):
                self._look_for_wrapped(watch)
        if watch.steps < STALE_STEPS or not without:
            if not watch.candidates:
                self._moves.listener.on_suspicion(("unused", watch), None, 0)
            return
        self._models.look()
        stale = self.stale(watch, without)
        if stale is not None:
            if ("stale", id(watch)) not in self._told:
                self._tell_stale(watch, stale)
        elif watch.candidates:
            self._judge(watch)
        else:
            self._moves.listener.on_suspicion(("unused", watch), None, 0)
            if len(without) == len(trained):
                self._frozen.look(watch)

    def _look_again(self, watch: OptimizerWatch, are_gone: bool) -> None:
        """Weights outside modules are seen among what operators are given, and lasting where two steps in turn show them."""
        if watch.looks_left:
            watch.looks_left -= 1
        elif are_gone and watch.steps > EARLY_STEPS and orphans(self._models, watch.trained()):
            watch.looks_left = STALE_STEPS

    def _tell_stale(self, watch: OptimizerWatch, stale: Breach) -> None:
        self._told.add(("stale", id(watch)))
        watch.is_stale = True
        self._moves.told_untrained |= {id(p) for p in stale.facts["parameters"]}
        self._moves.tell([stale], stale.facts["since"])

    def is_stale(self, watch: OptimizerWatch, since: int) -> bool:
        """Whether an optimizer whose gradients are not cleared holds tensors that nobody trains any more: a layer was replaced
        in the middle of the run, and the model's `zero_grad` passes by what it had. It is told then, of that iteration."""
        if watch.is_stale:
            return True
        self._models.look()
        left = orphans(self._models, [p for p in watch.trained() if p.grad is not None])
        stale = self.stale(watch, left) if left else None
        if stale is None or ("stale", id(watch)) in self._told:
            return False
        stale.facts["since"] = since
        self._tell_stale(watch, stale)
        return True

    def _look_for_moved(self, watch: OptimizerWatch) -> None:
        """Have parameters left the flat buffer that the optimizer holds? It has a gradient all the same."""
        flat = [p for p in watch.parameters() if p.dim() == 1]
        if not flat or ("stale", id(watch)) in self._told:
            return
        self._models.look()
        held = [p for other in self._moves.watches.optimizers for p in other.parameters()]
        moved = left_buffer(self._models, held, flat)
        if moved:
            self._told.add(("stale", id(watch)))
            facts = {"parameters": moved, "moved_out": True, "of": len(watch.parameters())}
            stepped = self._moves.machine.ledger(watch).stepped_at
            since = watch.first_step if watch.steps == STALE_STEPS else None
            step = self._moves.attempt if since is None else since
            self._moves.tell([Breach("stale-parameters", watch, None, watch.created, stepped, None, facts)], step)

    def _look_for_wrapped(self, watch: OptimizerWatch) -> None:
        """Have frozen layers that it holds been wrapped in adapters that nobody holds? The rest of it has gradients."""
        if ("stale", id(watch)) in self._told or all(p.requires_grad for p in watch.parameters()):
            return
        self._models.look()
        stale = self._wrapped(watch)
        if stale is not None:
            self._told.add(("stale", id(watch)))
            self._moves.tell([stale], stale.facts["since"])

    def _wrapped(self, watch: OptimizerWatch, is_refused: bool = False) -> Breach | None:
        """Whether trained parameters that no optimizer holds were put around frozen ones that this one holds.

        What the script itself updates is written to between two looks.
        """
        held = [p for other in self._moves.watches.optimizers for p in other.parameters()]
        added, inside = wrapped_around(self._models, held, watch.parameters())
        rested = [p for p in added if self._versions.get(p) == version_of(p)]
        self._versions.update((p, version_of(p)) for p in added)
        added = added if is_refused else rested
        if not added:
            return None
        ledger = self._moves.machine.ledger(watch)
        first = watch.first_step if watch.first_step is not None else self._moves.attempt
        facts: dict[str, Any] = {"parameters": added, "lost": [tuple(p.shape) for p in inside], "wrapped": True}
        facts |= {"of": len(watch.parameters()), "since": first}
        return Breach("stale-parameters", watch, None, watch.created, ledger.stepped_at, None, facts)

    def _judge(self, watch: OptimizerWatch) -> None:
        assert watch.candidates is not None
        # Those that have joined the optimizer late, or were unfrozen, have been without a gradient since then.
        step = min(watch.without_since.get(id(p), self._moves.attempt) for p in watch.candidates)
        none_at_all = len(watch.candidates) == len(watch.trained())
        late = step - (watch.first_step or 0)
        is_long = watch.steps >= EARLY_STEPS if none_at_all else self._finite_steps(watch) - late >= UNUSED_STEPS
        if is_long:
            breach = self._without(watch, none_at_all, watch.steps - late)
            self._moves.listener.on_suspicion(("unused", watch), breach, step)
            self._suspected[watch] = [weakref.ref(p) for p in watch.candidates]
            if watch.steps >= LIVE_STEPS and ("unused", id(watch)) not in self._told:
                self._told.add(("unused", id(watch)))
                self._moves.routine.spoil()
                self._moves.name_scaler(breach)
                self._moves.listener.on_told_early(("unused", watch), breach, step)

    def _finite_steps(self, watch: OptimizerWatch) -> int:
        """Its steps up to the one since which losses are bad: what follows says nothing of who is used (a gate gives NaN)."""
        judge = self._moves.recorder.judge
        if judge.bad_since is None or (judge.last_good_step or 0) >= judge.bad_since:
            return watch.steps
        return min(watch.steps, judge.bad_since - (watch.first_step or 0))

    def _without(self, watch: OptimizerWatch, none_at_all: bool, steps: int) -> Breach:
        candidates = watch.candidates or []
        ledger = self._moves.machine.ledger(watch)
        facts: dict[str, Any] = {"parameters": candidates, "steps": steps, "of": len(watch.parameters())}
        facts["cut_at"] = self._moves.recorder.cut_checkpoint
        if not none_at_all:
            roots = [module for module, _ in self._models.roots()]
            facts |= unused_facts(roots, candidates, watch.trained())
            held = watch.parameters()
            if replaced_by_tying(roots, candidates) and all(held_by_optimizers_only(p, held) for p in candidates):
                facts |= {"left_by": "tying", "is_harmless": True}
            return Breach("unused-parameters", watch, None, watch.created, ledger.stepped_at, None, facts)
        last = self._moves.machine.last_backward
        facts |= {"why": "not-reached", "silent": True, "reached": last.reached if last is not None else ()}
        facts["alone"] = len(self._moves.watches.optimizers) == 1
        first = last.where if last is not None else None
        if ledger.cleared_part is not None:
            facts |= {"why": "cleared", "backward": ledger.cleared_part.where}
            first = ledger.cleared_at
        elif last is not None and watch in last.reached:  # it had gradients, and somebody set them to None
            facts |= {"why": "cleared", "backward": last.where}
            first = None
        elif is_frozen(watch.parameters()):
            facts["why"] = "frozen"
        return Breach("no-gradients", watch, None, first, ledger.stepped_at, None, facts)

    def stale(self, watch: OptimizerWatch, without: list[Tensor], is_refused: bool = False) -> Breach | None:
        """Whether the optimizer holds other tensors than those that receive the gradients."""
        held = [p for other in self._moves.watches.optimizers for p in other.parameters()]
        others = unowned(self._models, held)
        lost = orphans(self._models, without)  # what it has left over from earlier steps is no gradient either
        plain = unowned_plain(self._leaves.lasting(), held, [p for p in lost if p.requires_grad])
        if plain:  # what the script has names for is used at times, perhaps
            plain = unowned_plain(plain, held, [p for p in lost if held_by_optimizers_only(p, held)])
        if not others and not plain:
            return None
        if not lost and self._collect():
            lost = orphans(self._models, without)
        others += plain
        copied = []
        if not lost:
            copied = lost = self._copied(watch, without, others)
        if not lost:
            return self._wrapped(watch, is_refused)
        flat = hold_flat(lost, others)
        if not flat:
            lost = [p for p in lost if p.requires_grad]
            if not lost or not (look_alike(lost, others) or self._is_any_forgotten(lost, held)):
                return None
        ledger = self._moves.machine.ledger(watch)
        since = min(watch.without_since.get(id(p), self._moves.attempt) for p in lost)
        facts: dict[str, Any] = {
            "parameters": others,
            "lost": [tuple(p.shape) for p in lost],
            "flat_buffers": flat,
            "had_gradients": any(p.grad is not None for p in without),
            "plain": len(plain) == len(others),
            "same_memory": not flat and share_memory(lost, others),
            "copied": bool(copied),
            "of": len(watch.parameters()),
            "is_midway": watch.first_step is not None and since > watch.first_step,
            "since": since,
            "put_at": self._moves.put_in.line_of(others) if not (flat or copied) else None,
        }
        return Breach("stale-parameters", watch, None, watch.created, ledger.stepped_at, None, facts)

    def _copied(self, watch: OptimizerWatch, without: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        """All that an optimizer trains, where its model is not called any more and a copy of it is trained in its place."""
        trained = [p for p in watch.trained() if p.requires_grad]
        if not trained or not {id(p) for p in trained} <= {id(p) for p in without}:
            return []
        called = self._models.called()
        is_idle = not any(id(p) in called for p in trained)
        return trained if is_idle and look_alike(trained, [p for p in others if id(p) in called]) else []

    def _is_any_forgotten(self, lost: list[Tensor], held: list[Tensor]) -> bool:
        """Whether some of them are held by optimizers only."""
        is_forgotten = any(held_by_optimizers_only(p, held) for p in lost)
        return is_forgotten or (self._collect() and any(held_by_optimizers_only(p, held) for p in lost))

    def _collect(self) -> bool:
        """Sweep away what was thrown away and lies about as garbage (a model, a layer); not too often."""
        if self._collections == MAX_COLLECTIONS:
            return False
        self._collections += 1
        gc.collect()
        return True

    def raised(self, error: BaseException) -> None:
        """DistributedDataParallel refuses to go on because parameters have had no gradient: which?"""
        if DDP_REFUSES not in message_of(error):
            return
        self._models.look()
        where = script_line(sys._getframe(1))
        for watch in self._moves.mine():
            if watch.candidates and ("unused", id(watch)) not in self._told:
                self._told.add(("unused", id(watch)))
                facts: dict[str, Any] = {"parameters": watch.candidates, "steps": watch.steps, "refused": True}
                facts["of"] = len(watch.parameters())
                facts |= unused_facts([m for m, _ in self._models.roots()], watch.candidates, watch.trained())
                self._moves.listener.on_suspicion(("unused", watch), None, 0)
                self._moves.tell(
                    [Breach("unused-parameters", watch, None, watch.created, where, None, facts)],
                    self._moves.recorder.steps.count,
                )

    def explain_refusal(self, breach: Breach) -> Breach:
        """PyTorch found no gradient in an optimizer: which of the possible reasons it is."""
        watch = breach.optimizer
        if breach.cause == "fp16-parameters" and isinstance(watch, OptimizerWatch):
            held = watch.parameters()
            trained = [p for p in held if p.requires_grad] or held
            self._models.look()
            around = [p for module, _ in self._models.roots() for p in compat.all_parameters(module)]
            frozen = any(p.dtype is torch.float16 and not p.requires_grad for p in (*held, *around))
            frozen = frozen and trained is not held
            half = [p for p in trained if p.dtype is torch.float16]
            breach.facts |= {"parameters": half, "of": len(trained), "has_frozen": frozen}
        if breach.facts.get("why") != "not-reached" or not isinstance(watch, OptimizerWatch):
            return breach
        parameters = watch.parameters()
        self._models.look()
        stale = self.stale(watch, [p for p in parameters if p.grad is None], is_refused=True)
        if stale is not None:
            stale.facts |= {"refused": breach.facts.get("refused"), "backward": breach.first}
            stale.scaler, stale.again = breach.scaler, breach.again
            return stale
        breach.facts |= {"parameters": parameters, "of": len(parameters)}
        if is_frozen(parameters):
            breach.facts["why"] = "frozen"
        return breach


def left_at(watch: OptimizerWatch, parameter: Tensor, trained: list[Tensor], now: int) -> int:
    """The first iteration in which a parameter without a gradient had none: an optimizer writes to none of those.

    By how often it was written to since all were last looked at, beside another that has its gradient still: one of the same
    group, as weight decay is a write of its own. By the steps that the optimizer has counted for each, where it counts them.
    """
    then, versions = watch.versions
    group = _group_of(watch, parameter)
    alike = [p for p in trained if p.grad is not None and id(p) in versions]
    other = next((p for p in alike if id(p) in group), None)
    missed = _missed(watch, parameter, alike[0]) if alike and id(parameter) in versions else 0
    if 0 < missed <= now - then:
        return now - missed + 1
    if other is None or id(parameter) not in versions:
        return now
    every = version_of(other) - versions[id(other)]
    had, rest = divmod((version_of(parameter) - versions[id(parameter)]) * (now - then), max(every, 1))
    return then + had + 1 if every > 0 and not rest and 0 <= had < now - then else now


def _group_of(watch: OptimizerWatch, parameter: Tensor) -> set[int]:
    """The identities of what stands in the same group of the optimizer."""
    optimizer = watch.ref()
    groups = ({id(p) for p in group["params"]} for group in optimizer.param_groups) if optimizer is not None else ()
    return next((group for group in groups if id(parameter) in group), set())


def _missed(watch: OptimizerWatch, parameter: Tensor, other: Tensor) -> int:
    """How many steps of another the optimizer has made without this one; 0 where it does not count them."""
    optimizer = watch.ref()
    counts = [optimizer.state.get(p, {}).get("step") for p in (parameter, other)] if optimizer is not None else []
    if len(counts) != 2 or not all(isinstance(c, int) or (isinstance(c, Tensor) and is_immediate(c)) for c in counts):
        return 0
    return int(counts[1]) - int(counts[0])


def _have_zeros(parameters: list[Tensor]) -> bool:
    """Whether all their gradients are there and exactly 0: `zero_grad(set_to_none=False)` was the last to write them."""
    return all(p.grad is not None and compat.is_dense(p.grad) and not bool(p.grad.any()) for p in parameters)


def held_by_optimizers_only(parameter: Tensor, held: list[Tensor]) -> bool:
    """Whether no module and no name of the script refers to this tensor any more, but the optimizer.

    (And the lists of parameters from which the optimizer was built.)
    """
    ids = {id(p) for p in held}
    for holder in gc.get_referrers(parameter):
        if isinstance(holder, dict) and any(value is parameter for value in holder.values()):
            return False  # a module's parameters, the names of a script
    frame = sys._getframe(1)
    while frame is not None:
        if is_script_code(frame.f_code) and any(_holds(value, parameter, ids) for value in locals_of(frame).values()):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


def _holds(value: Any, parameter: Tensor, held: set[int]) -> bool:
    if value is parameter:
        return True
    if not isinstance(value, (list, tuple)) or not any(item is parameter for item in value):
        return False
    return not all(id(item) in held for item in value)


def _is_scanned(steps: int) -> bool:
    """Whether every parameter of an optimizer is looked at after its step of this number."""
    return steps <= EARLY_STEPS or steps & (steps - 1) == 0 or steps % RESCAN_STEPS == 0


def is_time_to_look(steps: int) -> bool:
    """Whether the coming iteration is one that is looked at closely."""
    return steps < EARLY_STEPS or steps in LOOKS


__all__ = ["LOOKS", "Scans", "held_by_optimizers_only", "is_time_to_look"]
