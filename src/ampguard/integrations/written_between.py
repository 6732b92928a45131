"""What a loop does to gradients between two calls of a scaler that scales, differentiates and steps in one.

`loss.backward()` adds gradients without the loss scale, which the scaler divides by it all the same: the loss counts for
nothing. Clipping by hand inside an accumulation window clips gradients that carry the scale.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ampguard.engine import misuse
from ampguard.engine.holding import Holding
from ampguard.engine.other_backwards import OtherBackwards
from ampguard.integrations.left_over import are_as_glanced
from ampguard.integrations.updating import Updating
from ampguard.integrations.users_line import users_line

_DO = (
    "give the scaler the sum of the losses, or each loss in a call of its own (update_grad=False, need_update=False but for the "
    "last); where its gradients are not wanted, call optimizer.zero_grad() before the scaler"
)

logger = logging.getLogger("ampguard")


class WrittenBetween:
    """Looks at an optimizer's gradients as the scaler is called. A healthy step is not waited for."""

    def __init__(self, others: OtherBackwards, read_scale: Callable[[], float]) -> None:
        self._others = others
        self._read_scale = read_scale
        self._watched: list[Updating] = []
        self._odd: dict[int, int] = {}
        self._has_begun = False

    def ours(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward pass of a scaled loss."""
        self._has_begun = True
        return self._others.ours()

    def follow(self, own: Updating) -> None:
        """An optimizer whose gradients carry the scale for the first time."""
        self._watched.append(own)
        self._others.watch_anew([watched.holding for watched in self._watched])

    def look(self, own: Updating) -> None:
        """Before a loss is differentiated. Raises ProtocolError where another one was, without the scale."""
        holding = own.holding
        plain = self._others.plain_line(holding)
        if plain is not None:
            raise misuse.error(
                "unscaled-backward",
                f"a loss.backward() has left gradients in `{holding.name}`: that loss was not scaled, and its gradients would be "
                f"divided by the loss scale {self._read_scale():g} all the same",
                _DO,
                first=plain[0],
                again=users_line(),
            )
        if not self._has_begun and self._holds_plain(holding):
            raise misuse.error(
                "unscaled-backward",
                f"`{holding.name}` holds gradients before the scaler's first call: what they come from was not scaled by it, and "
                f"they would be divided by its loss scale {self._read_scale():g} all the same",
                _DO,
                again=users_line(),
            )
        is_odd = (
            not are_as_glanced(own, own.scaled) if own.scaled else any(p.grad is not None for p in holding.sample())
        )
        if is_odd and self._is_worth_a_look(own) and holding.has_nonzero_gradients():
            self._others.watch([watched.holding for watched in self._watched])
            if own.scaled and not self._others.carries_on(holding):
                self._tell(own)

    def updated(self) -> None:
        """The iteration has ended."""
        self._others.updated()

    def _holds_plain(self, holding: Holding) -> bool:
        """Before any loss was scaled: whether there are gradients, and the loop cannot have scaled them by itself."""
        return not self._others.scale_was_told and holding.has_nonzero_gradients() and self._read_scale() != 1.0

    def _is_worth_a_look(self, own: Updating) -> bool:
        """The first odd call, the second, the fourth, the eighth and so on: a loop may keep gradients of zeros."""
        self._odd[id(own)] = count = self._odd.get(id(own), 0) + 1
        return count & (count - 1) == 0

    def _tell(self, own: Updating) -> None:
        holding = own.holding
        if holding.foreign_writes_told:
            return
        holding.foreign_writes_told = True
        logger.warning(
            "the gradients of `%s` were changed by something else inside an accumulation window, while they carry the loss "
            "scale %g. Where that was clipping, it has clipped too much: give the scaler clip_grad=..., which clips once, at "
            "the end of the window. Where it was a loss.backward(), its gradients count for nothing: give the scaler that loss.",
            holding.name,
            self._read_scale(),
        )
