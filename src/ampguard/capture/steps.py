"""Counting iterations.

An iteration is one attempted step of every optimizer in use: with several it ends when the last of them has stepped,
and a step that the scaler skips counts. An accumulation window is one iteration.

Which optimizers are in use shows only as they step. What is counted while one of them is away may turn out to have
been a part of one longer iteration (a critic that steps five times), or of a phase of its own (training, then fine
tuning with another optimizer): what was counted is then put right, as long as it is recent. Where the one that ended an
iteration steps once more before the one that began it, that still belongs to it (a penalty in every fourth iteration).
And where each parameter's optimizer is made when it is first needed (Pyro's), they all answer the same backward pass.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.passes import Passes

LONGEST_TURN = 8
"""Steps of one optimizer to one of another, in one iteration (a critic's); one that joins later than that joins late."""

MOST_GIVEN_UP = 4096

WAITS_FOR_OLDER = 256
"""Backward passes before optimizers from before the guard, none of which has stepped, count as left behind."""

_PACKAGE = __name__.partition(".")[0]
KEPT_STEPS = 64
"""Optimizers' steps remembered: which optimizer made them."""


def optimizers_alive() -> list[Optimizer]:
    """Those that the process holds at this moment, but for our own. It looks at every object there is: once, as the guard
    begins."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    return [optimizer for optimizer in found if type(optimizer).__module__.partition(".")[0] != _PACKAGE]


_Gradient: TypeAlias = tuple[int, int]


def _gradients_of(optimizer: Optimizer) -> list[_Gradient]:
    """Which they are, and how often they were written to; of a parameter without one (0, 0)."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [(id(g), compat.version_of(g)) if g is not None else (0, 0) for g in gradients]


class StepCounter:
    """Counts the iterations that have ended."""

    def __init__(self) -> None:
        self.count = 0
        self._created: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._older: weakref.WeakKeyDictionary[Optimizer, list[_Gradient]] = weakref.WeakKeyDictionary()
        """Those from before the guard, and their gradients as it began: any of them may step, or none (an older cell's of a
        notebook)."""
        self._waits_for_older = False
        self._in_use: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that step in each iteration, as far as is known; and those that were made and are yet to step."""
        self._ever: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """In the running iteration."""
        self._rounds: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How often each of them has."""
        self._before: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """In those that may turn out to be a part of it."""
        self._repeats = 0
        """How often one stepped again in the running iteration, while another was waited for."""
        self._patience: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The most of these repeats before each has stepped."""
        self._provisional = 0
        """Iterations counted since some optimizer was last in use that is not now."""
        self._taken_back = 0
        """What was taken off the count when an optimizer joined, until another has stepped since."""
        self._joined: weakref.ref[Optimizer] | None = None
        self.attempts = 0
        """Optimizers' steps, all of them."""
        self.is_over = False
        """Whether the last of them has ended an iteration."""
        self._made: list[tuple[int, weakref.ref[Optimizer]]] = []
        """The last of these steps that were not skipped: the how manieth it was, and who made it."""
        self._born: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._by_backward = 0
        """Iterations that were counted by their backward passes."""
        self._passes = Passes()
        self.backwards = 0
        """Backward passes, all of them."""
        self._answered = 0
        """Those that the last optimizer that stepped had behind it."""
        self._only: weakref.ref[Optimizer] | None = None
        self._first: weakref.ref[Optimizer] | None = None
        """The one that has stepped first in the running iteration, or in the last one between two."""
        self._ended_by: weakref.ref[Optimizer] | None = None
        self._has_more = False
        """Whether that one has stepped once more since."""
        self.given_up_in_all = 0
        """Iterations that the script has given up without asking an optimizer."""
        self.given_up: set[int] = set()
        """Those of them that were given up for a loss or a gradient that was not finite."""

    @property
    def counts_backwards(self) -> bool:
        """Whether a backward pass stands for a step: no optimizer is known."""
        if self._only is not None and self._only() is not None:
            return False
        return not (self._ever or self._created or (self._older and self._waits_for_older))

    def is_held(self, tensor: Tensor) -> bool:
        """Whether a known optimizer holds it, or what shares its memory (`p.detach()`)."""
        groups = (
            group for optimizer in (*self._ever, *self._created, *self._older) for group in optimizer.param_groups
        )
        key = compat.storage_key(tensor)
        return any(p is tensor or compat.storage_key(p) == key != 0 for group in groups for p in group["params"])

    @property
    def yet_to_step(self) -> list[Optimizer]:
        """Optimizers that were made and have not stepped."""
        return [optimizer for optimizer in self._created if optimizer not in self._ever]

    def differentiated(self, place: object = None) -> bool | None:
        """A backward pass ended. Whether that ends an iteration; None where that is for an optimizer to do.

        Passes from several places in turn (two losses; the inner steps of a meta-learner, and the outer one) make one
        iteration, as the steps of several optimizers do.
        """
        if not self.counts_backwards:
            return None
        has_ended = self._passes.ended(place)
        self.count += self._passes.count - self._by_backward
        self._by_backward = self._passes.count
        return has_ended

    def skipped_by_script(self, is_for_bad_numbers: bool) -> None:
        """The script has thrown an iteration's gradients away without asking an optimizer."""
        if is_for_bad_numbers and len(self.given_up) < MOST_GIVEN_UP:
            self.given_up.add(self.count)
        self.given_up_in_all += 1
        self.count += 1

    def made_before(self, optimizers: Iterable[Optimizer]) -> None:
        """These are there as the guard begins."""
        for optimizer in optimizers:
            self._older[optimizer] = _gradients_of(optimizer)

    def passed_backward(self, is_scaled: bool = False, called: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """A backward pass of the loop has ended, whoever answers it. `is_scaled`: a scaler scales its loss, which steps some
        optimizer, whether that has gradients or none; `called`: the parameters of the modules that were called."""
        self.backwards += 1
        if not self._older:
            return
        if self.backwards > WAITS_FOR_OLDER:
            self._older.clear()
        elif is_scaled or any(_gradients_of(optimizer) != before for optimizer, before in self._older.items()):
            self._waits_for_older = True
        else:
            held = {id(p) for optimizer in self._older for group in optimizer.param_groups for p in group["params"]}
            self._waits_for_older = not held.isdisjoint(map(id, called()))

    @property
    def is_answered(self) -> bool:
        """Whether an optimizer's step was attempted, and nothing was differentiated since."""
        return self.backwards > 0 and self._answered == self.backwards

    @property
    def is_of_one(self) -> bool:
        """Whether all steps are made by one optimizer, as far as is known. (As the run ends it may be gone.)"""
        return len(self._in_use) <= 1

    def created(self, optimizer: Optimizer) -> None:
        """An optimizer exists and may be expected to step."""
        self._uncount_backwards()
        self._end_short_way()
        self._created.add(optimizer)
        self._in_use.add(optimizer)
        self._born[optimizer] = self.attempts

    def attempted(self, optimizer: Optimizer, skipped: bool = False) -> bool:
        """An optimizer's step was attempted. True where that ends an iteration."""
        if self._older:
            self._older.clear()  # from here on it shows who steps
        if not skipped:
            self._made.append((self.attempts + 1, weakref.ref(optimizer)))
        if len(self._made) > 2 * KEPT_STEPS:
            del self._made[:-KEPT_STEPS]
        if self._only is not None and self._only() is optimizer:  # the common loop, without set operations
            self.count += 1
            self.attempts += 1
            self.is_over = True
            self._answered = self.backwards
            return True
        self._uncount_backwards()  # an optimizer from before the guard: its steps were counted by their backward passes
        self._end_short_way()
        self.attempts += 1
        self.is_over = False
        if self._joined is not None and self._joined() is not optimizer:
            self._joined, self._taken_back = None, 0
        if optimizer not in self._in_use or optimizer not in self._ever:
            self._join(optimizer)
        self._last[optimizer] = self.attempts
        self._answered = self.backwards
        if not self._stepped:
            if self._is_one_more(optimizer):
                self._has_more = True
                return False
            self._first = weakref.ref(optimizer)
        if self._waited_for(optimizer):
            return False
        self._end()
        self.is_over = True
        self._ended_by = weakref.ref(optimizer)
        if len(self._in_use) == 1 and (not self._is_provisional or self._provisional > LONGEST_TURN):
            self._only = weakref.ref(optimizer)
        return True

    def behind(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer itself; of a wrapper, which never steps, the one that it wraps: they have their groups in common."""
        if optimizer in self._ever:
            return optimizer
        groups = getattr(optimizer, "param_groups", None)
        known = (o for o in self._ever | self._created if groups is not None and o.param_groups is groups)
        return next((o for o in known if o is not optimizer), optimizer)

    @property
    def lately_stepped(self) -> list[Optimizer]:
        """The optimizers of the last steps that were not skipped, each once, in the order in which they came."""
        live = {id(optimizer): optimizer for _, ref in self._made if (optimizer := ref()) is not None}
        return list(live.values())

    def made_since(self, attempt: int) -> list[Optimizer]:
        """The optimizers that have made a step after attempt number `attempt`: each as often as it has."""
        live = (ref() for number, ref in self._made if number > attempt)
        return [optimizer for optimizer in live if optimizer is not None]

    def _uncount_backwards(self) -> None:
        """An optimizer is known now: backward passes (a fit by SciPy, a check of gradients) were no steps."""
        self._passes = Passes()
        self.count -= self._by_backward
        self._by_backward = 0

    def _is_one_more(self, optimizer: Optimizer) -> bool:
        """Whether this one has ended the last iteration, and another one begins them."""
        if self._has_more or self._ended_by is None or self._first is None or len(self._in_use) < 2:
            return False
        return self._ended_by() is optimizer and self._first() is not optimizer

    def _waited_for(self, optimizer: Optimizer) -> list[Optimizer]:
        """Those that are yet to step in the iteration in which this one steps now."""
        repeated = optimizer in self._stepped
        self._stepped.add(optimizer)
        waiting = [o for o in self._in_use if o not in self._stepped]
        self._rounds[optimizer] = self._rounds.get(optimizer, 0) + 1
        if not repeated:
            self._patience[optimizer] = max(self._repeats, self._patience.get(optimizer, 0))
        elif waiting:
            self._repeats += 1
            if self._repeats > max(self._patience.get(o, 0) for o in waiting):
                return self._do_without(waiting, optimizer)
        return waiting

    def _do_without(self, waiting: Iterable[Optimizer], repeated: Optimizer) -> list[Optimizer]:
        """These are no longer waited for: each time that this one stepped again, an iteration had ended. Returned are those that
        are yet to step in the one that has begun now."""
        for optimizer in waiting:
            self._in_use.discard(optimizer)
        ended = self._rounds.get(repeated, 1) - 1
        self.count += ended + self._taken_back + self._has_more
        self._provisional = ended
        self._taken_back = 0
        self._before.clear()
        self._before.update(self._stepped)
        in_turn = [o for o in self._in_use if self._rounds.get(o, 0) > ended]
        if len(in_turn) < len(self._in_use):
            self._begin(in_turn)
        return [o for o in self._in_use if o not in self._stepped]

    def _note_stepped(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            self._stepped.add(optimizer)
            self._rounds.setdefault(optimizer, 1)

    def _begin(self, stepped: Iterable[Optimizer] = ()) -> None:
        """An iteration begins, in which these have stepped once."""
        self._stepped.clear()
        self._rounds.clear()
        self._note_stepped(stepped)
        self._repeats = 0
        self._has_more = False

    def _join(self, optimizer: Optimizer) -> None:
        """This one is in use (again): a few iterations counted without it were part of the running one."""
        born = self._born.get(optimizer, 0)
        others = [o for o in self._in_use if o is not optimizer and o in self._ever]
        goes_round = len(others) > 1 and self._provisional > 1  # it comes late to a loop that does
        comes_late = goes_round and optimizer not in self._ever
        self._in_use.add(optimizer)
        self._ever.add(optimizer)
        if others and all(self._last.get(o, 0) <= born for o in others):  # made when they were done
            if 0 < self.backwards == self._answered:  # for the same gradients: the iteration had not ended yet
                if not self._stepped:
                    self.count -= 1
                    self._note_stepped(others)
                return
            # a new phase
            for other in others:
                self._in_use.discard(other)
            self._begin()
            self._provisional = self._taken_back = 0
            return
        is_recent = 0 < self._provisional <= LONGEST_TURN and not comes_late
        is_amid = bool(self._stepped)
        if not self._before or (is_amid and not is_recent):
            return
        self._joined = weakref.ref(optimizer)
        self._taken_back = self._provisional if is_recent else min(1, self.count)
        self.count -= self._taken_back
        self._repeats = self._taken_back - (not is_amid) if is_recent else 0
        self._note_stepped(o for o in self._before if o is not optimizer)
        self._provisional = 0

    @property
    def _is_provisional(self) -> bool:
        """Whether there may be optimizers in use that have not stepped lately."""
        return not self._created or len(self._in_use) < len(self._created | self._ever)

    def _end(self) -> None:
        self.count += 1
        if self._is_provisional:
            self._provisional += 1
            if self._provisional > LONGEST_TURN:
                self._before.clear()
        else:
            self._before.clear()
        self._before.update(self._stepped)
        self._begin()

    def _end_short_way(self) -> None:
        only = self._only() if self._only is not None else None
        if only is not None:
            self._last[only] = self.attempts
            self._before.clear()
            self._before.add(only)
        self._only = None
