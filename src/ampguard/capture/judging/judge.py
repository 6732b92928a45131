"""The judge of a step: is its loss finite, and what becomes of what else was bad?

A loss is judged before it is differentiated, when everything that made it is still as it was. What was bad and may
yet turn out to be nobody's business (a teacher's output, a loss that is thrown away) is a suspect first.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events import lineage
from ampguard.capture.events.log import EventLog
from ampguard.capture.flags import FiniteFlag, is_immediate
from ampguard.capture.glue.told import tell_calls
from ampguard.capture.graph_captures import GraphReplay
from ampguard.capture.judging import figures, undifferentiated
from ampguard.capture.judging.gradients import GradientJudge
from ampguard.capture.judging.left_out import Questioned
from ampguard.capture.judging.outputs import OutputJudge
from ampguard.capture.judging.own_scale import OwnScale, factor_of
from ampguard.capture.judging.tried_again import TriedAgain
from ampguard.capture.raised import is_conversion_refusal, refused_values
from ampguard.capture.record import BackwardCall, BadResult, Held, Ref, RootCall, StepRecord, since
from ampguard.capture.steps import StepCounter
from ampguard.compat import cuda_is_capturing as is_capturing
from ampguard.compat import version_of
from ampguard.numerics import is_finite

Mode = Literal["train", "eval"]


class Judge:
    """Looks at results and tells of bad ones."""

    def __init__(self, log: EventLog, steps: StepCounter, report: Callable[[BadResult], None]) -> None:
        self.suspects: list[BadResult] = []
        self.usual_loss: Callable[[], float | None] = lambda: None
        """The largest of the finite losses lately, where anybody keeps them."""
        self.last_good_step: int | None = None
        self.attempts_when_good = 0
        """Optimizers' steps that had been attempted when a loss was last finite."""
        self.bad_since: int | None = None
        """The step of the first bad loss since the last good one; of the same step where a micro-batch alone was bad."""
        self.losses: list[float | Tensor] = []
        """Of the running iteration, without a scale of the script's own."""
        self.skipped: list[list[float | Tensor]] = []
        """Those of iterations before it whose update the script itself has skipped."""
        self.own_scale = OwnScale()
        self.last_scale = 1.0
        """The script's own scale that the last loss carried."""
        self.has_thrown_away = 0
        """Backward passes whose gradients the script has thrown away, as the forward pass began that runs now."""
        self.passes_given_up = 0
        """Those of the last iteration that was given up."""
        self._differentiated_at = 0
        """Optimizer steps that had been attempted when the last loss was differentiated."""
        self.bad_loss_step: int | None = None
        """The step in which a loss was last bad."""
        self._told_numbers: set[int] = set()
        """The events that have made the bad numbers of the loss that was told last."""
        self._tried_again = TriedAgain()
        self.outputs = OutputJudge(log, steps, self._suspect, report)
        self.outputs.on_finite = self._may_be_second
        self.gradients = GradientJudge(log, steps, self, report)
        self._log = log
        self._steps = steps
        self._report = report
        self._judged: set[int] = set()
        """Events that made a loss which backward was called on."""
        self._healthy: list[weakref.ref[Tensor]] = []
        """Losses found finite since the last backward's record was dropped."""
        self._judged_losses: list[weakref.ref[Tensor]] = []
        self._figures = figures.Figures()
        self.unread: list[tuple[FiniteFlag, BadResult]] = []
        """Losses of a device that are yet to be judged."""
        self._looked_until = 0
        """Events before it were searched for losses that were thrown away."""
        self._beside: BadResult | None = None
        """What is bad in a step of training and may lead nowhere: a trial that is given up. The next loss tells."""
        self._tried_at: int | None = None
        """Optimizer steps that had been attempted when something was last differentiated by what is no weight."""
        self._questioned = Questioned()
        self._told_error: int | None = None
        """`id` of the error that the last operator or module raised because of its numbers."""

    # --- losses -----------------------------------------------------------------------------------------------------

    @property
    def has_open_questions(self) -> bool:
        """Whether something bad, or not read yet, waits for what comes next."""
        return bool(self.suspects or self.outputs.unread or self.outputs.asked)

    def is_healthy(self, losses: Sequence[Tensor]) -> bool:
        """The common case, quickly: one finite number on the CPU and nothing else to settle."""
        if len(losses) != 1 or self.suspects or self.outputs.unread:
            return False
        loss = losses[0]
        if not loss.is_cpu or loss.numel() != 1 or (type(loss) is not Tensor and not compat.has_values(loss)):
            return False
        value = loss.item()
        if type(value) is not float or value - value != 0.0:
            return False
        factor = factor_of(loss)
        self.last_scale = 1.0 if factor == 1.0 and self.own_scale.present is None else self._own_scale(factor)
        self.losses.append(value / self.last_scale)
        self._beside = None
        self._differentiated_at = self._steps.attempts
        self._healthy.append(weakref.ref(loss))
        self.last_good_step, self.attempts_when_good = self._steps.count, self._steps.attempts
        return True

    def judge_losses(self, losses: Sequence[Tensor]) -> None:
        """Judge what is about to be differentiated."""
        self._note(losses)
        self._beside = None
        if losses and all(any(known() is loss for known in self._judged_losses) for loss in losses):
            return  # differentiated before, with retain_graph
        self._judged_losses = [weakref.ref(loss) for loss in losses]
        targets: list[Ref | Held] = []
        for loss in losses:
            made_by = self._log.lookup(loss)
            if made_by is not None:
                self._judged.add(made_by.event)
            targets.append(made_by or Held(loss, version_of(loss)))
        self.outputs.read(wait=False)
        self._drop_teachers(targets)
        flag = FiniteFlag(losses)
        scale = self.last_scale if self.last_scale != 1.0 else None
        bad = BadResult("loss", "train", self._steps.count, self._log.snapshot(), tuple(targets), loss_scale=scale)
        if flag.is_known:
            self._judge(flag, bad)
        else:
            self.unread.append((flag, bad))
        self.settle_all()

    def _note(self, losses: Sequence[Tensor]) -> None:
        for loss in losses:
            is_here = type(loss) is Tensor and loss.is_cpu
            if (
                loss.numel() == 1
                and not loss.is_complex()
                and (is_here or (compat.has_values(loss) and not is_capturing()))
            ):
                scale = self.last_scale = self._own_scale(factor_of(loss))
                value = float(loss.item()) if loss.is_cpu else loss.detach()
                self.losses.append(value if scale == 1.0 else value / scale)
                self._differentiated_at = self._steps.attempts

    def _own_scale(self, factor: float) -> float:
        """The scale of its own by which the script has multiplied a loss; lowered without a step, it has skipped one."""
        passes, self.has_thrown_away = self.has_thrown_away, 0
        is_unused = bool(self.losses) and self._differentiated_at == self._steps.attempts
        if is_unused and not self._steps.counts_backwards and self.own_scale.was_lowered(factor, bool(passes)):
            self.own_scale.lowered(factor)
            self.give_up(passes, is_for_bad_numbers=False)
        return self.own_scale.note(factor, len(self.losses))

    def give_up(self, passes: int, is_for_bad_numbers: bool) -> None:
        """The script has made no step with what it differentiated in these `passes` (0: not known how many)."""
        self.skipped.append(self.take_losses())
        self.passes_given_up, self.has_thrown_away = passes, 0
        self._steps.skipped_by_script(is_for_bad_numbers)
        self._log.iteration_start = self._log.closed_until

    def judge_beside(self, losses: Sequence[Tensor]) -> None:
        """Look at what is differentiated by what is no weight (an energy by positions, in the middle of a step)."""
        self._tried_at = self._steps.attempts
        if self._beside is None and all(map(is_immediate, losses)) and not all(map(is_finite, losses)):
            made = [self._log.lookup(loss) or Held(loss, version_of(loss)) for loss in losses]
            self._beside = BadResult("loss", "train", self._steps.count, self._log.snapshot(), tuple(made))

    def judge_replayed(self, losses: Sequence[Tensor], replay: GraphReplay) -> None:
        """Judge what the replay of a CUDA graph has differentiated. It is never waited for: that would leave the device idle.

        The next replay overwrites it.
        """
        if not losses:
            return
        with torch.no_grad():
            self._note([loss.detach().clone() for loss in losses])
        flag = FiniteFlag(losses)
        bad = BadResult("loss", "train", self._steps.count, StepRecord(), (), graph=replay)
        if flag.is_known:
            self._judge(flag, bad)
        else:
            self.unread.append((flag, bad))

    def take_losses(self) -> list[float | Tensor]:
        """The losses of the iteration that ends; those of a device as tensors."""
        losses, self.losses = self.losses, []
        return losses

    def take_skipped(self) -> list[list[float | Tensor]]:
        """The losses of the iterations that the script has skipped since the last one ended."""
        skipped, self.skipped = self.skipped, []
        return skipped

    def _judge(self, flag: FiniteFlag, bad: BadResult) -> None:
        if flag.is_set():
            self.last_good_step, self.attempts_when_good = bad.step, self._steps.attempts
        else:
            self.bad_loss_step = bad.step
            if self.bad_since is None or self.bad_since < (self.last_good_step or 0):
                self.bad_since = bad.step
            if isinstance(bad.graph, GraphReplay):
                bad = bad.graph.with_record(bad, self._log)
            tell_calls(bad.record)
            self._told_numbers = lineage.bad_numbers(bad.record)
            self._report(bad)

    def read_flags(self, wait: bool, is_end: bool = False) -> None:
        """Judge the losses of a GPU, before anything that they were made from changes.

        Those of a graph's replay are waited for at the end only: behind them in the queue there is nothing yet.
        """
        while self.unread and (self._may_wait(wait, is_end) or self.unread[0][0].is_known):
            flag, bad = self.unread.pop(0)
            self._judge(flag, bad)

    def _may_wait(self, wait: bool, is_end: bool) -> bool:
        return wait and (is_end or self.unread[0][1].graph is None)

    def count_losses(self, losses: Sequence[Tensor]) -> None:
        """Losses after the last investigation: a bad one is counted."""
        before = len(self.losses)
        self._note(losses)
        noted = self.losses[before:]
        are_numbers = len(noted) == len(losses) and {float}.issuperset(map(type, noted))
        if not (all(map(math.isfinite, noted)) if are_numbers else all(map(is_finite, losses))):
            self.bad_loss_step = self._steps.count
            self._report(BadResult("loss", "train", self._steps.count, StepRecord(), ()))

    def read(self, tensor: Tensor, value: Any) -> None:
        """The script read a number from the device, the way a loss is looked at (`loss.item()`)."""
        if not isinstance(value, (float, bool)) or (isinstance(value, float) and value - value == 0.0):
            return
        if isinstance(value, bool) and self._log.is_about_finite_numbers(tensor):
            self._tried_again.asked_at = self._log.next_index
            return
        ref = self._log.lookup(tensor)
        record = self._log.record
        is_librarys = isinstance(value, bool) and ref is not None and figures.is_asked_by_a_library(record, ref)
        if isinstance(value, bool):
            self._tried_again.asked_at = self._log.next_index
            ref = lineage.nonfinite_number_behind(record, ref) if ref is not None else None
        if ref is not None:
            record = self._log.snapshot()
        evaluation = self._log.evaluation
        origin = evaluation.of(tensor) if ref is None else evaluation.origin(record, ref)
        if origin is not None:
            if not origin.is_told:
                origin.is_told = True
                self.suspects.append(BadResult("loss", "eval", self._steps.count, origin.record, (origin.target,)))
            return
        if ref is None or any(ref in bad.targets for bad in self.suspects):
            return
        if not evaluation.is_behind(record, ref):
            if isinstance(value, float) and value != value and self._figures.is_of_counts(record, ref):
                self._suspect_figure("count", ref)
            return
        if self._was_judged(lineage.ancestors(record, ref)) or self._is_old_news(ref):
            return  # a loss that backward was called on, or a sum to which a bad one was added
        mode: Mode = "train" if lineage.was_wanting(record, ref) else "eval"
        if is_librarys and mode == "eval":
            self._suspect_figure("count", ref)
            return
        may_be_figure = mode == "train" and isinstance(value, float) and self.bad_loss_step != self._steps.count
        if may_be_figure and lineage.is_figure_beside(record, ref):
            return  # the loss was finite, and has been differentiated
        if mode == "train" and isinstance(value, bool):
            self._questioned.note(record, ref)
        bad = self._bad("loss", mode, (ref,))
        is_asked_of_a_trial = isinstance(value, bool) and self._tried_at == self._steps.attempts
        if mode == "eval" and (is_asked_of_a_trial or lineage.is_of_training_calls(record, ref)):
            self._beside = self._beside or bad  # (a loss that is thrown away for it is found by itself)
            return
        if may_be_figure and value == value and lineage.is_of_calls_before(record, ref, self._log.closed_until):
            bad = dataclasses.replace(bad, may_be_meant="array")  # the range of masked scores, say
        self.suspects.append(bad)

    def read_array(self, tensor: Tensor) -> None:
        """The script has taken several numbers of an evaluation out of PyTorch (`predictions.numpy()`), or shown them."""
        ref = self._log.lookup(tensor) if self._figures.may_tell(tensor) else None
        if ref is None or any(ref in bad.targets for bad in self.suspects):
            return
        record = self._log.snapshot()
        if lineage.was_wanting(record, ref) or not self._log.evaluation.is_behind(record, ref):
            return
        is_all_bad, suspects = figures.is_all_bad(tensor), len(self.suspects)
        if is_all_bad or figures.is_spread(record, ref):
            self.read(tensor, math.nan)
            if is_all_bad and len(self.suspects) > suspects:
                self.suspects[-1] = dataclasses.replace(self.suspects[-1], may_be_meant="errors")
        elif self._figures.is_first_of_its_line(record, ref):
            self._suspect_figure("array", ref)

    def _suspect_figure(self, kind: Literal["array", "count"], ref: Ref) -> None:
        self.suspects.append(dataclasses.replace(self._bad("loss", "eval", (ref,)), may_be_meant=kind))

    def _is_old_news(self, ref: Ref) -> bool:
        """Whether a number is bad only because another one was, after a bad loss was told."""
        return self.bad_loss_step is not None and lineage.rests_on_a_figure(self._log.record, ref, self._told_numbers)

    def _was_judged(self, events: set[int]) -> bool:
        for known in self._healthy:
            loss = known()
            made_by = self._log.lookup(loss) if loss is not None else None
            if made_by is not None:
                self._judged.add(made_by.event)
        return bool(self._judged & events)

    def forget_judged(self) -> None:
        """The events of the last backward are dropped, and with them what was judged of them."""
        self._judged.clear()
        self._healthy.clear()

    def read_buffers(self) -> None:
        """Judge the buffers of a GPU, before weights change; a bad loss of the same step comes first.

        Both lie ahead of the backward pass in the device's queue: waiting for them leaves it busy.
        """
        if self.unread:
            self.read_flags(wait=True)
        self.outputs.read_buffers(wait=True)

    def refused(self, index: int, error: BaseException) -> None:
        """An event raised. Of a constant that does not fit a half, or of a module's bad numbers: that is a diagnosis. Bad numbers
        that an operator refuses may be state that was spoiled before: a script may go on behind that."""
        event = self._log.record.event(index)
        is_module = isinstance(event, RootCall)
        is_told = is_conversion_refusal(error) or (is_module and bool(refused_values(error)))
        over = (Ref(index, 0),) if is_told else lineage.bad_operands(self._log.record, event)
        if is_told:
            self._told_error = id(error)
        if over:
            mode: Mode = "train" if torch.is_grad_enabled() else "eval"
            record = self._log.slice()
            self._report(
                BadResult("raised", mode, self._steps.count, record, over, error=error, is_of_state=not is_told)
            )

    # --- suspects ---------------------------------------------------------------------------------------------------

    def _suspect(self, bad: BadResult) -> None:
        self.suspects.append(bad)

    def settle(self, module: nn.Module, given: tuple[Any, Any] = ((), {})) -> None:
        """A new root call begins, with these arguments: what was bad before it and was never differentiated stays bad."""
        if self.outputs.asked:
            self.outputs.read_buffers(wait=False)
        if self.outputs.unread:
            self.outputs.read(wait=False)
        self._suspect_discarded_losses(module)
        if not self.suspects:
            return
        if any(bad.kind == "output" for bad in self.suspects) and torch.is_grad_enabled():
            return  # perhaps a teacher's call in the middle of a training step: backward will tell
        first = self.suspects[0]
        root = lineage.root_of(first)
        if first.kind != "loss" and root is not None and root.module is not module:
            return
        if len(self.suspects) > 1 or not self._tried_again.is_waited_for(first, module, given, self._log):
            self.settle_all()

    def _may_be_second(self, root: RootCall) -> None:
        """A call in evaluation has returned finite numbers: where one before it that was given the same did not, the script
        has tried again."""
        if any(bad.kind == "output" for bad in self.suspects) and self._tried_again.is_second(root):
            self._mark_as_tried_again(lambda bad: bad.kind == "output")
            self.settle_all()

    def _mark_as_tried_again(self, is_one: Callable[[BadResult], bool]) -> None:
        self.suspects = [
            dataclasses.replace(bad, may_be_meant="again") if is_one(bad) else bad for bad in self.suspects
        ]

    def settle_all(self) -> None:
        """Report every suspect."""
        suspects, self.suspects = self.suspects, []
        self._questioned.clear()
        self._tried_again.ends()
        behind = lineage.events_behind_losses(suspects)
        for bad in suspects:
            if bad.kind == "loss" and bad.mode == "eval" and not bad.may_be_meant:
                bad = self._as_one_of_groups(bad)
            if bad.kind == "output" and all(isinstance(t, Ref) and t.event in behind for t in bad.targets):
                continue  # a teacher's: the loss that was made from it is told
            if bad.mode == "train" and bad.may_be_meant != "again":  # (else the step goes on with a finite one)
                self.bad_loss_step = bad.step
                self._told_numbers = lineage.bad_numbers(bad.record)
            self._report(bad)

    def _as_one_of_groups(self, bad: BadResult) -> BadResult:
        """A figure of an evaluation: one of several, of parts of one result of which some may well be empty, is like a count."""
        refs = [target for target in bad.targets if isinstance(target, Ref)]
        is_one = bool(refs) and all(figures.is_of_groups(self._log.record, ref) for ref in refs)
        return dataclasses.replace(bad, may_be_meant="count") if is_one else bad

    def settle_before_write(self, written: Iterable[Tensor]) -> None:
        """Weights or buffers are about to be overwritten: what may have come from them is told while they are as they were."""
        if not self.suspects:
            return
        roots = {id(e.module): e.module for bad in self.suspects for e in bad.record.events if isinstance(e, RootCall)}
        state = {compat.storage_key(t) for m in roots.values() for t in compat.all_tensors(m)} - {0}
        if any(compat.storage_key(tensor) in state for tensor in written):
            if any(bad.kind == "loss" for bad in self.suspects):
                self._looked_until = self._log.next_index
            self.settle_all()

    def settle_last(self, error: BaseException | None) -> None:
        """The script ends, perhaps with an error: judge what is left."""
        if isinstance(error, Exception) and not self.suspects and id(error) != self._told_error:
            self._suspect_locals(error)
        self.read_flags(wait=True, is_end=True)
        self.outputs.read_buffers(wait=True)
        self.outputs.read(wait=True)
        self._suspect_discarded_losses(None)
        self._suspect_last_beside()
        self.settle_all()

    def _suspect_last_beside(self) -> None:
        """What may lead nowhere has led to the end of the script: no module was called any more."""
        bad, self._beside = self._beside, None
        if bad is None or self.suspects:
            return
        last = max((target.event for target in bad.targets if isinstance(target, Ref)), default=self._log.next_index)
        if not any(isinstance(event, RootCall) for event in self._log.latest(last + 1)):
            self.suspects.append(bad)

    def _suspect_locals(self, error: Exception) -> None:
        """The script raised: was one of the tensors that it had at hand computed in this step, and bad?"""
        step = self._steps.count - self._steps.counts_backwards  # (its backward pass may have been counted as the step)
        if self.bad_loss_step == step and self._log.closed_until > self._log.iteration_start:
            return  # the norm of a bad loss's gradients, or what that loss was made from
        found = undifferentiated.results_at_hand(error, self._log)
        found = [r for r in found if r.event >= self._log.iteration_start and not self._was_judged({r.event})]
        found = [r for r in found if not self._is_old_news(r)]
        if self.gradients.told_until > self._log.iteration_start:  # the norm of bad gradients: these were told
            found = [r for r in found if not self._is_behind_backward(r)]
        if found:
            found = sorted(set(found), key=lambda ref: (ref.event, ref.output))
            mode = undifferentiated.mode_of(self._log.record, found[0])
            self.suspects.append(self._bad("loss", mode, tuple(found)))

    def _is_behind_backward(self, ref: Ref) -> bool:
        """Whether a backward pass came before this result, in the same iteration."""
        passes = (e.index for e in self._log.record.events if isinstance(e, BackwardCall) and not e.is_functional)
        return any(self._log.iteration_start <= index < ref.event for index in passes)

    def _suspect_discarded_losses(self, module: nn.Module | None) -> None:
        """A scalar that wants a gradient, never differentiated and bad: a loop that skips or stops on a bad loss."""
        is_last = module is None
        first = self._log.closed_until if is_last else max(self._log.closed_until, self._looked_until)
        open_events = self._log.latest(first)
        roots = [event for event in open_events if type(event) is RootCall]
        if not roots or (module is not None and not undifferentiated.may_begin_step(module, roots)):
            return
        if self.suspects and any(bad.kind == "loss" for bad in self.suspects):
            return
        self._looked_until = open_events[-1].index + 1
        found = undifferentiated.discarded_loss(open_events, is_last, self._is_old_news)
        if found is not None:
            bad = self._bad("loss", "train", (found,))  # kept calls have let go of their operands
            told = since(bad.record.events, self._log.closed_until)
            calls = {event.index for event in roots}
            found = undifferentiated.discarded_loss(
                told,
                is_last,
                lambda ref: self._is_old_news(ref) or not calls & lineage.events_behind(bad.record, ref.event),
            )  # (what is shown of a call that was differentiated before is no loss of this one)
            if found is not None:
                self.suspects.append(dataclasses.replace(bad, targets=(found,)))
                return
        last = roots[-1]
        if is_last or module is last.module:
            self._suspect_grad_enabled_evaluation(last)

    def _suspect_grad_enabled_evaluation(self, root: RootCall) -> None:
        """`model.eval()` without `no_grad`, and nothing was differentiated."""
        if root.training or not root.modes.grad:
            return
        bad = undifferentiated.bad_outputs(root)
        if bad:
            self.suspects.append(self._bad("output", "eval", bad))

    def _drop_teachers(self, losses: Sequence[Ref | Held]) -> None:
        """A call under `no_grad` whose result reached this backward was no evaluation: the loss is the judge.

        So it is of numbers that the script has read on the way to it; an evaluation's figure stays a suspect, and so does a
        loss that the script has found to be bad and put another one in its place.
        """
        if not self.suspects:
            return
        reached = lineage.events_behind_gradients(self._log.record)
        record = self._log.record
        left_out = self._questioned.left_out(record, losses)
        if self._tried_again.is_waiting:
            refs = (ref for ref in losses if isinstance(ref, Ref))
            behind = set[int]().union(*(lineage.events_behind(record, ref.event) for ref in refs))
            calls = [record.event(index) for index in behind]
            self._mark_as_tried_again(lambda bad: self._tried_again.is_made_good(bad, calls))
        self.suspects = [
            bad
            for bad in self.suspects
            if bad.kind == "buffer"
            or bad.may_be_meant == "again"
            or not left_out.isdisjoint(t for t in bad.targets if isinstance(t, Ref))
            or (
                (bad.kind == "output" or (bad.kind == "loss" and bad.mode == "eval"))
                and not any(isinstance(t, Ref) and t.event in reached for t in bad.targets)
            )
        ]

    def _bad(
        self,
        kind: Literal["loss", "output"],
        mode: Mode,
        targets: tuple[Ref | Held, ...],
    ) -> BadResult:
        return BadResult(kind, mode, self._steps.count, self._log.slice(), targets)
