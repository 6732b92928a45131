"""A call of a model that failed and was healed is made again: the script never sees the bad loss.

Many scripts end themselves on a loss that is not finite, before anybody could hold a step off. What a model returns
can be had again so; what the script computes outside every module cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.engine.casting import tensors_in
from ampguard.numerics import is_finite
from ampguard.run.overrides.gradients import all_finite
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.moment import Moment
from ampguard.stderr import say


class Again:
    """Decides whether a call is to be made again, and puts back what the first one changed.

    Not where ranks train together: the call may hold collectives, in which the others would have to take part.
    """

    def __init__(
        self,
        ledger: Ledger,
        investigate: Callable[[Tensor | None], None],
        stays_out: Callable[[], bool],
        take_back: Callable[[Exception], bool],
        is_borne: Callable[[], None],
    ) -> None:
        """`investigate`: have a bad output explained; None: what a call wrote to its buffers.

        `stays_out`: whether no call may be made again now.
        `take_back`: a call has raised that; undo the fix that was applied since the last call that did not, if any was.
        `is_borne`: a call has returned with all fixes.
        """
        self.stays_out = stays_out
        self._take_back = take_back
        self._is_borne = is_borne
        self._ledger = ledger
        self._investigate = investigate

    def call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """`run`, the call of a module, and once more where it failed and was healed, or where it does not bear a fix."""
        moment, healed = Moment.before(module), len(self._ledger.healed)
        try:
            output = run()
            if not self._look(output, moment, healed):
                self._is_borne()
                return output
        except Exception as error:
            if not self._is_healed_since(healed):
                return self._without_fix(error, moment, run)
        output = None  # let go of the bad one: to the guard it must not look like a loss that is thrown away
        moment.restore()
        try:
            output = run()
        except Exception as error:
            return self._without_fix(error, moment, run)
        self._is_made()
        return output

    def _without_fix(self, error: Exception, moment: Moment, run: Callable[[], Any]) -> Any:
        """The call as it was before the last fix, which its code does not bear. Raises where it is not for a fix."""
        if not self._take_back(error):
            raise error
        moment.restore()
        return run()

    def _is_healed_since(self, healed: int) -> bool:
        """Whether a fix was applied meanwhile: the call raised, and the guard has explained it."""
        return len(self._ledger.healed) > healed

    def _is_made(self) -> None:
        """The call was made again: its step is not lost."""
        self._is_borne()
        say("the call is made again with the fix")
        if self._ledger.healed:
            self._ledger.made_again.add(self._ledger.healed[-1]["step"])

    def _look(self, output: Any, moment: Moment, healed: int) -> bool:
        """Have an output that will spoil the loss, or bad statistics, investigated now. Returns whether it was healed."""
        is_evaluation = not torch.is_grad_enabled()
        for tensor in tensors_in(output):
            if not tensor.is_floating_point() or not (tensor.requires_grad or is_evaluation):
                continue
            if compat.has_values(tensor) and is_bad(tensor):
                self._investigate(tensor)
                break
        else:
            if has_spoiled(moment.buffers):
                self._investigate(None)
        return self._is_healed_since(healed)


def has_spoiled(buffers: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether a buffer is not finite that was when it was copied. Waits for the device."""
    floats = [pair for pair in buffers if pair[0].is_floating_point() and compat.has_values(pair[0])]
    with compat.unseen():
        if all_finite(buffer for buffer, _ in floats):
            return False
        return any(is_finite(value) and not is_finite(buffer) for buffer, value in floats)


def is_bad(output: Tensor) -> bool:
    """A loss that is not finite, or NaN anywhere else: logits may hold an infinity on purpose, and nothing holds NaN so."""
    with compat.unseen():  # the guard takes a number that is read for the script's own reading
        return not is_finite(output) and (output.numel() == 1 or bool(torch.isnan(output).any()))
