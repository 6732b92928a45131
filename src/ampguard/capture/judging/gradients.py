"""The judge of gradients: which bad ones are news, and of whose parameters.

Not those that a bad loss brought about, nor those that an earlier step has left there.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events import lineage
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import leaves
from ampguard.capture.flags import is_immediate
from ampguard.capture.judging.plain_leaves import PlainLeaves
from ampguard.capture.judging.spoilt import SpoiltGradients
from ampguard.capture.record import BadResult, Held, Ref, RootCall, StepRecord
from ampguard.capture.sampling.flat import members_for_buffers
from ampguard.capture.steps import StepCounter
from ampguard.numerics import is_finite


class JudgedLosses(Protocol):
    """What is known of the step's losses."""

    suspects: list[BadResult]
    bad_loss_step: int | None
    last_scale: float

    @property
    def unread(self) -> Sequence[object]: ...

    def read_flags(self, wait: bool) -> None: ...


class GradientJudge:
    """Tells of bad gradients, and of weights that the script has made bad itself."""

    def __init__(
        self, log: EventLog, steps: StepCounter, losses: JudgedLosses, report: Callable[[BadResult], None]
    ) -> None:
        self.spoilt = SpoiltGradients()
        self.thread: Callable[[], int] = threading.get_ident
        """Whose step the log holds."""
        self.told_until = -1
        """The first event after bad gradients were last told."""
        self.is_ended_by_numbers = False
        """The script has raised an error that speaks of numbers which are not finite."""
        self._log = log
        self._steps = steps
        self._losses = losses
        self.report = report
        self._plain_leaves = PlainLeaves()
        self.behind_graph: Callable[[BadResult], BadResult] = lambda bad: bad
        """Adds what is known of the CUDA graph that made bad gradients, where one has."""
        self.on_left_used: Callable[[], None] = lambda: None
        """Told when an update is made of bad gradients that are known, and that the loop seemed to drop."""

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one whose step the log holds."""
        return self.thread() == threading.get_ident()

    def are_bad(
        self,
        parameters: Iterable[Tensor],
        loss_scale: float | None,
        is_held_off: bool,
        targets: tuple[Ref, ...] = (),
        since: int = 0,
        is_past_scaler: bool = False,
        is_replaced: bool = False,
        is_passed_over: bool = False,
        report: Callable[[BadResult], None] | None = None,
    ) -> None:
        """Gradients are not finite. What a bad loss brought about is no news, nor what an earlier step left there.

        `report`: who is told instead of the listener.
        """
        parameters = self._with_gradient(parameters, is_replaced)
        is_known = not is_replaced and self.spoilt.are_all_that_is_bad(parameters)
        if self._is_from_a_bad_loss(self._steps.count):
            return
        if is_known:
            if not is_held_off:
                self.on_left_used()
            return
        is_own_scale = loss_scale is None and self._losses.last_scale != 1.0
        if is_own_scale:
            loss_scale = self._losses.last_scale
        self._losses.suspects = [bad for bad in self._losses.suspects if bad.kind == "buffer"]
        self.told_until = self._log.next_index
        bad = BadResult(
            "gradient",
            "train",
            self._steps.count,
            self._log.slice(),
            targets,
            parameters=tuple(parameters),
            loss_scale=loss_scale,
            is_own_scale=is_own_scale,
            is_held_off=is_held_off,
            since=since,
            is_past_scaler=is_past_scaler,
            has_ended_run=self.is_ended_by_numbers,
            is_replaced=is_replaced,
            is_passed_over=is_passed_over and loss_scale is not None,
        )
        (report or self.report)(self.behind_graph(bad))
        self.spoilt.note(parameters)

    @property
    def step(self) -> int:
        """The running iteration."""
        return self._steps.count

    def were_bad(self, bad: BadResult) -> None:
        """The gradients of an earlier update were not finite. What a bad loss brought about is no news: it was judged then."""
        if self._losses.bad_loss_step != bad.step:
            self.report(bad)

    def _is_from_a_bad_loss(self, step: int) -> bool:
        """Whether the loss of that step was bad: a device is asked for its answer."""
        if self._losses.unread:
            self._losses.read_flags(wait=True)
        return self._losses.bad_loss_step == step

    def remade_are_bad(self, parameters: Iterable[Tensor], targets: tuple[Ref, ...]) -> None:
        """Gradients were finite until the script computed others from them."""
        parameters = self._with_gradient(parameters)
        if self._is_from_a_bad_loss(self._steps.count) or self.spoilt.are_all_that_is_bad(parameters):
            return
        self.told_until = self._log.next_index
        self.report(BadResult("loss", "train", self._steps.count, self._log.slice(), targets))
        self.spoilt.note(parameters)

    def written_weights_are_bad(self, parameter: Tensor, mode: Literal["train", "eval"]) -> None:
        """The script itself has written to weights that were finite until then: what made it bad is told.

        `mode`: that of the call that is about to use them. Bad values that the script was given and only handed on (a
        checkpoint's) are told where the weights are used.
        """
        made_by = self._log.lookup(parameter)
        if made_by is None or self._losses.suspects:
            return
        given = lineage.given_to(self._log.record, made_by)
        if all(isinstance(t, nn.Parameter) or not is_immediate(t) or is_finite(t) for t in given):
            self.report(BadResult("loss", mode, self._steps.count, self._log.slice(), (made_by,), is_of_weights=True))

    def made_backward_raise(
        self, parameters: Iterable[Tensor], loss_scale: float | None, error: BaseException, since: int
    ) -> None:
        """Anomaly detection found a NaN and ended the backward pass: there are no gradients, but a step to replay."""
        if not self._is_from_a_bad_loss(self._steps.count):
            record, step, wanted = self._log.slice(), self._steps.count, tuple(parameters)
            self.report(BadResult("gradient", "train", step, record, (), error, (), wanted, loss_scale, since=since))

    def may_be_lost(self, parameters: Iterable[Tensor], loss_scale: float | None) -> None:
        """Gradients are finite, and may have lost a part to zero."""
        record, step, found = self._log.slice(), self._steps.count, tuple(self._with_gradient(parameters))
        self.report(BadResult("underflow", "train", step, record, (), parameters=found, loss_scale=loss_scale))

    def may_be_cleaned(self, parameters: Iterable[Tensor], since: int) -> None:
        """Gradients are finite, and the script has done to them what it has never done before."""
        if not self._is_from_a_bad_loss(self._steps.count):
            bad = BadResult("gradient", "train", self._steps.count, self._log.slice(), (), since=since)
            wanted = tuple(self._with_gradient(parameters, may_be_gone=True))
            self.report(dataclasses.replace(bad, parameters=wanted, is_replaced=True, is_suspected=True))

    def _with_gradient(self, updated: Iterable[Tensor], may_be_gone: bool = False) -> list[Tensor]:
        """Those of an optimizer's tensors that hold a gradient, or may have held one; of a flat buffer, the parameters that lie
        in it."""
        held = [p for p in updated if p.grad is not None or (may_be_gone and p.requires_grad)]
        return members_for_buffers(held, self.parameters_of_modules())

    def are_good(self) -> None:
        """Gradients were looked at and are finite: whatever was left there has been cleared."""
        self.spoilt.clear()

    def spoil(self) -> None:
        """A bad loss was differentiated: the gradients that it leaves stay bad until they are cleared."""
        if self._losses.bad_loss_step == self._steps.count:
            self.spoilt.note([p for p in self.parameters_of_modules() if p.is_leaf and p.grad is not None])

    def parameters_of_modules(self) -> list[Tensor]:
        """Of the modules that were called in this step; what hangs in none (the pixels that are styled by a frozen network),
        where nothing of them is trained and there is no optimizer either.

        None in a thread whose step the log does not hold.

        In another's, autograd's engine may be writing to `.grad` at this moment, without the interpreter's lock.
        """
        events = self._log.kept_since(0)
        if not self.is_here:  # asked after the events: new ones are begun for another thread
            return []
        calls = [event for event in events if type(event) is RootCall]
        modules = {id(call.module): call.module for call in calls if not call.swapped_state}
        found: list[Tensor] = [p for module in modules.values() for p in compat.all_parameters(module)]
        swapped = [p for call in calls if call.swapped_state for p in _run_with(call, self._log.record)]
        if swapped:
            found = list({id(p): p for p in (*found, *swapped)}.values())
        if self._steps.counts_backwards and not any(p.requires_grad for p in found):
            return self._plain_leaves.with_gradients(self._log.record.events)
        return found


def _run_with(call: RootCall, record: StepRecord) -> list[Tensor]:
    """The parameters that the script has given a module for one call (`functional_call`), and those of its own that stayed."""
    swapped = (record.tensor_behind(leaf) for leaf in leaves(call.swapped_state) if isinstance(leaf, (Ref, Held)))
    given = [tensor for tensor in swapped if tensor is not None and compat.is_wanting_leaf(tensor)]
    if not given:  # computed from its own
        return [*compat.all_parameters(call.module)]
    return [*(p for name, p in compat.named_parameters(call.module).items() if name not in call.swapped_state), *given]
