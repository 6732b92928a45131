"""A bad loss is made again with the fix, before anybody has used it: no step is lost.

The recorded step is run again, with the fix, through autograd (see `live_step`), and what is differentiated is that
loss. The tensors that the script holds get the values that they would have had, so that it neither prints a NaN nor ends
itself over one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ampguard import compat
from ampguard.capture.record import Ref
from ampguard.numerics import is_finite
from ampguard.run.overrides.live_values import live_results, may_be_healed, take_values
from ampguard.run.overrides.remaking import Remaking
from ampguard.stderr import say


class StepAgain:
    """Stands before `backward`, and behind the numbers that the script reads."""

    def __init__(self, remaking: Remaking) -> None:
        self._remaking = remaking
        self._recorder = remaking.recorder
        self._values_healed_until = 0
        """Results of older events have healed values, and the graph of the step that failed."""

    # --- what is differentiated -----------------------------------------------------------------------------------------

    def losses(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What is to be differentiated: the losses, or, where they were bad and were healed, those of the step made again."""
        if not self._remaking.may_act():
            return losses
        with compat.unseen():  # the guard takes a number that is read for the script's own reading
            is_bad = not all(is_finite(loss) for loss in losses if compat.has_values(loss))
        if not is_bad and not self._has_other_graph(losses):
            return losses
        self._recorder.tape.leave()
        try:
            return (self._healed(losses) if is_bad else self._made_again(losses)) or losses
        finally:
            self._recorder.resume_tape()

    def _has_other_graph(self, losses: tuple[Tensor, ...]) -> bool:
        """Whether the losses are finite only because their values were healed as the script read them."""
        if self._values_healed_until <= self._recorder.log.iteration_start:
            return False
        parts = self._remaking.parts(losses)
        return parts is not None and self._remaking.begins_before(parts, self._values_healed_until)

    def _healed(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Bad losses made again: with the fix that this step was given already, or once they are explained."""
        again = self._with_more(losses) if self._remaking.is_healed_now() else None
        if again is None and self._remaking.is_healed_by(lambda: self._judge(losses)):
            again = self._with_more(losses)
        return again

    def _with_more(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The losses made again, with the smallest of the verified fixes that is enough."""
        again = self._made_again(losses)
        while again is None and self._remaking.heal_more():
            again = self._made_again(losses)
        if again is None:
            self._remaking.is_in_vain()
        return again

    def _judge(self, losses: tuple[Tensor, ...]) -> None:
        """Have bad losses investigated before they are differentiated."""
        judge = self._recorder.judge
        known = len(judge.losses)
        judge.judge_losses([self._remaking.unscaled(loss) for loss in losses])
        judge.read_flags(wait=True)
        del judge.losses[known:]  # they will be judged again, healed or not

    def _made_again(self, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The same losses from the step made again; None where they cannot be had, or are bad again."""
        remaking, log = self._remaking, self._recorder.log
        parts = remaking.parts(losses)
        if parts is None:
            return None
        known = [part.ref for part in parts]
        made = remaking.compute([*known, *self._results()])
        if made is None or not all(is_finite(made[ref]) and made[ref].requires_grad for ref in known):
            return None
        take_values(log, made)
        for part in parts:
            # Should its gradients be bad, they are explained as this loss's.
            log.producers.define(made[part.ref], part.ref)
        again = tuple(remaking.scaled_as(part, made) for part in parts)
        shown = float(made[parts[-1].plain or parts[-1].ref].detach())
        remaking.ledger.made_again.add(remaking.step)
        say(f"step {remaking.step} is made again with the fix: the loss is {shown:.4g}")
        return again

    # --- what the script reads ------------------------------------------------------------------------------------------

    def read(self) -> bool:
        """The script has read a number that is not finite, outside `backward`. Returns whether it was healed."""
        remaking, judge = self._remaking, self._recorder.judge
        if not remaking.may_act():
            return False
        asked = [ref for bad in judge.suspects if bad.kind == "loss" for ref in bad.targets if isinstance(ref, Ref)]
        if remaking.is_healed_now() and self._take_values(
            asked
        ):  # it comes of a call that was healed too late for this
            judge.suspects = [bad for bad in judge.suspects if bad.kind != "loss"]
            return True
        return remaking.is_healed_by(judge.settle_all) and self._take_values(asked)

    def _take_values(self, asked: Sequence[Ref]) -> bool:
        """Give all that the script holds the values of the step made again; whether what is asked for is finite now."""
        recorder = self._recorder
        recorder.tape.leave()
        try:
            results = self._results()
            made = self._remaking.compute([*asked, *results], needs_graph=False)
            if made is None or not all(is_finite(made[ref]) for ref in asked):
                return False
            take_values(recorder.log, made)
            self._values_healed_until = recorder.log.next_index
            return True
        finally:
            recorder.resume_tape()

    def _results(self) -> list[Ref]:
        """What the step has made, the script still holds and may need other values."""
        with compat.unseen():
            return [ref for ref, tensor in live_results(self._recorder.log) if may_be_healed(tensor)]
