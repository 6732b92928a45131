"""The judge of what calls leave behind: outputs in evaluation, and buffers that a call has poisoned."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.flags import FiniteFlag, is_immediate
from ampguard.capture.glue.told import tell_calls
from ampguard.capture.record import BadResult, Held, Ref, RootCall, StepRecord
from ampguard.capture.root_calls.buffers import Asked, Poisoned
from ampguard.capture.root_calls.pace import Pace
from ampguard.capture.root_calls.trees import tensors_in
from ampguard.capture.steps import StepCounter
from ampguard.compat import version_of
from ampguard.numerics import is_finite


class OutputJudge:
    """Suspects outputs in evaluation: a teacher's in the middle of a training step is nobody's business."""

    def __init__(
        self,
        log: EventLog,
        steps: StepCounter,
        suspect: Callable[[BadResult], None],
        report: Callable[[BadResult], None],
    ) -> None:
        self.unread: list[tuple[FiniteFlag, BadResult]] = []
        """Outputs on a device that has not answered yet."""
        self.asked: list[tuple[Asked, BadResult]] = []
        """The same of buffers."""
        self._log = log
        self._steps = steps
        self._suspect = suspect
        self._report = report
        self._innocent: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.on_finite: Callable[[RootCall], None] = lambda root: None
        """Told of calls whose outputs are finite."""

    def look_at(self, root: RootCall, outputs: list[Tensor]) -> None:
        """A module returned in evaluation."""
        if root.module in self._innocent:
            return
        floats = [(i, t) for i, t in enumerate(outputs) if t.is_floating_point()]
        flag = FiniteFlag([t for _, t in floats])
        is_known = flag.is_known  # (asked once: a device answers whenever it has come to it)
        if is_known and flag.is_set():
            self.on_finite(root)
            return
        if _keeps_a_tally(root):
            return
        refs = tuple(Ref(root.index, i) for i, t in floats if not is_immediate(t) or not is_finite(t))
        bad = BadResult("output", "eval", self._steps.count, self._log.slice(), refs)
        if not is_known:
            self.unread.append((flag, bad))
        elif root.modes.inference:  # its results cannot be a teacher's in a training step
            self._report(bad)
        else:
            self._suspect(bad)

    def wants_to_know(self, module: nn.Module, output: Any, pace: Pace) -> bool:
        """Whether a call in evaluation that was not kept has to be."""
        floats = [t for t in tensors_in(output) if t.is_floating_point()]
        pace.may_rest = all(is_immediate(t) for t in floats)
        if not pace.may_rest:
            pace.is_resting = False
            return False
        return module not in self._innocent and not all(is_finite(t) for t in floats)

    def suspect_buffers(self, root: RootCall, poisoned: list[Poisoned]) -> None:
        """A call turned buffers non-finite."""
        mode: Literal["train", "eval"] = "train" if root.modes.grad else "eval"
        bad = BadResult("buffer", mode, self._steps.count, self._log.slice(), ())
        self._suspect_each(bad, poisoned, {id(one.tensor): version_of(one.tensor) for one in poisoned})

    def _suspect_each(self, bad: BadResult, poisoned: list[Poisoned], versions: dict[int, int]) -> None:
        """PyTorch's own buffers, and those that code of the script's own writes to."""
        for is_own in (False, True):
            mine = [one for one in poisoned if one.is_own is is_own]
            held = tuple(Held(one.tensor, versions[id(one.tensor)]) for one in mine)
            if mine:
                names = tuple(one.path for one in mine)
                self._suspect(dataclasses.replace(bad, targets=held, names=names, is_of_state=is_own))

    def await_buffers(self, root: RootCall, asked: Asked) -> None:
        """A call has changed buffers of a device that has not answered yet."""
        mode: Literal["train", "eval"] = "train" if root.modes.grad else "eval"
        self.asked.append((asked, BadResult("buffer", mode, self._steps.count, self._log.snapshot(), ())))

    def read_buffers(self, wait: bool) -> None:
        """What a device has found of buffers; at most two calls are left unread."""
        while self.asked:
            asked, bad = self.asked[0]
            if not (wait or len(self.asked) > 2 or asked.flag.is_known):
                return
            del self.asked[0]
            if not asked.flag.is_set() and (poisoned := asked.poisoned()):
                tell_calls(bad.record)
                self._suspect_each(bad, poisoned, asked.versions)

    def read(self, wait: bool) -> None:
        """What a GPU has found of the outputs of an evaluation; at most two calls are left unread."""
        while self.unread:
            flag, bad = self.unread[0]
            if not (wait or len(self.unread) > 2 or flag.is_known):
                return
            del self.unread[0]
            if not flag.is_set():
                self._suspect(bad)

    def count(self, output: Any) -> None:
        """A module returned, in evaluation, after the last investigation."""
        if any(t.is_floating_point() and not is_finite(t) for t in tensors_in(output)):
            self._report(BadResult("output", "eval", self._steps.count, StepRecord(), ()))

    def mark_innocent(self, module: nn.Module) -> None:
        """This module's evaluation outputs hold infinities on purpose: do not ask again."""
        self._innocent.add(module)


METRIC = ("update", "compute", "reset")
"""Methods of what torchmetrics, and others after it, call a metric."""


def _keeps_a_tally(root: RootCall) -> bool:
    """Whether a call in evaluation was that of a metric: a module without weights that counts in its buffers, or is called one.

    What it returns is a figure on the way (0/0 for a class that has not come yet); the numbers that are read are judged.
    """
    counts = any(saved.copy is not None for saved in root.buffers)  # (unchanged ones keep none)
    is_metric = counts or all(callable(getattr(type(root.module), name, None)) for name in METRIC)
    return is_metric and not compat.has_parameters(root.module)
