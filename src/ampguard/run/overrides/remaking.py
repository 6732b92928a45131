"""What it takes to make a step again: whether that may be done now, what made its losses, and the step itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.lineage import wanting_gradients
from ampguard.capture.record import BadResult, Ref
from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import ChangedSinceError, ReplayError
from ampguard.numerics import is_finite
from ampguard.replay.behind import events_behind
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.lines import LinesInFloat32
from ampguard.run.overrides.live_step import LiveStep, has_low_weights
from ampguard.run.overrides.live_values import live_results
from ampguard.run.overrides.plan import Plan


@dataclass(frozen=True, slots=True)
class Part:
    """One loss that is differentiated: `ref` made it, or (`is_to_be_scaled`) what a loss scale was multiplied with.

    `plain` made the loss before it was scaled, where it was.
    """

    loss: Tensor
    ref: Ref
    plain: Ref | None
    is_to_be_scaled: bool


class Remaking:
    """Makes the running step again, with the fixes in force, as often as asked."""

    def __init__(
        self,
        recorder: FlightRecorder,
        plan: Plan,
        lines: LinesInFloat32,
        ledger: Ledger,
        heal_more: Callable[[int], bool],
        did_not_help: Callable[[int], None],
    ) -> None:
        """`heal_more`: apply a larger fix to what was healed in a step. Returns whether there was one.

        `did_not_help`: the step is bad with all of them.
        """
        self._did_not_help = did_not_help
        self.recorder = recorder
        self.ledger = ledger
        self._plan = plan
        self._lines = lines
        self._heal_more = heal_more
        self._not_recorded_in = -1
        """The last step of which nothing could be run again, whatever the fix."""

    @property
    def step(self) -> int:
        return self.recorder.steps.count

    def may_act(self) -> bool:
        """Whether the step is recorded, by this process alone."""
        recorder = self.recorder
        return recorder.active and not recorder.paused and not recorder.counting and not _is_distributed()

    # --- fixes --------------------------------------------------------------------------------------------------------

    def is_healed_by(self, look: Callable[[], object]) -> bool:
        """Whether a fix was applied while something was looked at."""
        before = len(self.ledger.healed)
        look()
        return len(self.ledger.healed) > before

    def is_healed_now(self) -> bool:
        """Whether a fix was applied in this very step."""
        healed = self.ledger.healed
        return bool(healed) and healed[-1]["step"] == self.step

    def heal_more(self) -> bool:
        """Apply a larger fix than this step's, where there is one and the step itself can be made again."""
        return self._not_recorded_in != self.step and self._heal_more(self.step)

    def is_in_vain(self) -> None:
        """The step was made again with all fixes, and is bad. Not where it could not be made again: then nothing is known."""
        if self._not_recorded_in != self.step:
            self._did_not_help(self.step)

    # --- losses -------------------------------------------------------------------------------------------------------

    def unscaled(self, loss: Tensor) -> Tensor:
        """What a scaler was given, where the loss is what it returned."""
        return self.recorder.scaling.unscaled(loss)

    def parts(self, losses: Sequence[Tensor]) -> list[Part] | None:
        """What made the losses; None where it is not known of one."""
        lookup = self.recorder.log.lookup
        parts = []
        for loss in losses:
            unscaled = self.unscaled(loss)
            own, plain = lookup(loss), lookup(unscaled) if unscaled is not loss else None
            ref = own or plain
            if ref is None:
                return None
            parts.append(Part(loss, ref, plain, is_to_be_scaled=own is None))
        return parts

    def begins_before(self, parts: Sequence[Part], event: int) -> bool:
        """Whether the losses were made from anything older than an event that has a graph: a batch has none."""
        refs, record = tuple(part.ref for part in parts), self.recorder.log.slice()
        behind = events_behind(BadResult("loss", "train", self.step, record, refs))
        wanting = wanting_gradients(record)
        return any(one.index < event and one.index in wanting for one in behind)

    def scaled_as(self, part: Part, made: Mapping[Ref, Tensor]) -> Tensor:
        """The loss in place of which this one is differentiated: times the same scale, and known for it."""
        loss = made[part.ref]
        if part.plain is None:
            return loss
        scale = compat.loss_scale(self.recorder.scaling.scaler)
        if part.is_to_be_scaled and scale is not None:
            with torch.enable_grad():
                loss = loss.float() * scale
            part.loss.data = loss.detach()
        plain = made.get(part.plain)
        if plain is not None:
            self.recorder.scaling.note(plain, loss, self.recorder.scaling.scaler)
        return loss

    # --- the step -----------------------------------------------------------------------------------------------------

    def compute(self, wanted: Sequence[Ref], needs_graph: bool = True) -> Mapping[Ref, Tensor] | None:
        """The results by what made them; None where the step cannot be made again."""
        try:
            with self.unrecorded():
                step = self._live_step(list(dict.fromkeys(wanted)))
                made = step.compute()
            if needs_graph and (has_low_weights(step) or not step.reaches_the_leaves):
                raise ReplayError("its gradients would not be those of the step")
        except Exception as why:  # the step's own code may raise anything: then it is held off
            self.cannot(why)
            return None
        return made

    def _live_step(self, wanted: list[Ref]) -> LiveStep:
        """Where a part that has no gradient can no longer be run (a discriminator has stepped since), its results are taken."""
        try:
            return LiveStep(wanted, self.recorder, self._plan, self._lines)
        except ChangedSinceError:
            with compat.unseen():
                given = {ref: t for ref, t in live_results(self.recorder.log) if is_given(t) and ref not in wanted}
            return LiveStep(wanted, self.recorder, self._plan, self._lines, given)

    def cannot(self, why: Exception) -> None:
        """Say why a step is held off all the same."""
        if isinstance(why, ReplayError):
            self._not_recorded_in = self.step
        self.ledger.failed(f"a step could not be made again, and is held off: {str(why).splitlines()[0]}")

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What runs inside is the guard's, and no event of the script."""
        paused, self.recorder.paused = self.recorder.paused, True
        try:
            yield
        finally:
            self.recorder.paused = paused


def is_given(result: Tensor) -> bool:
    """Whether a result can stand for all that made it: no gradient goes through it, and it is well."""
    return not result.requires_grad and compat.has_values(result) and is_finite(result)


def _is_distributed() -> bool:
    """Whether other ranks would have to make the step again too."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
