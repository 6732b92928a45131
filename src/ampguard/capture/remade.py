"""Gradients that the script computes by itself between backward and the optimizer's step: surgery, norms, clips.

Whether a loop does that shows in its first steps, in which what follows a backward pass is taped. Where it does, it is
taped in all steps, and gradients that are bad only since then are told by the operator that made them so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampguard.capture.events.lineage import has_graph
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.operands import held_by, refs_of
from ampguard.capture.record import BackwardCall, Event, GlueOp, Line, Ref, since
from ampguard.numerics import all_finite_on_cpu, is_finite

FOLLOWED = 4
"""Bad gradients that are followed to where the script made them so."""


class RemadeGradients:
    """Knows which gradients are results of the glue tape."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.are_used = False
        """Whether the loop steps with gradients that it has computed itself."""
        self.clipped = range(0)
        """The events of the last `clip_grad_norm_`, which is PyTorch's own."""
        self.bad_at: tuple[int, Line | None] | None = None
        """The last step in which they were made of something that was bad already, and the line that did."""

    def learn(self, gradients: Iterable[Tensor]) -> None:
        """These are about to be used, in one of the first steps. Constants that a script writes there are no surgery."""
        if not self.are_used:
            made = [ref for gradient in gradients if (ref := self._made_by(gradient)) is not None]
            behind = self._behind(made)
            self.are_used = any(map(_reads_gradients, behind)) or self._are_without_backward(behind)

    def _are_without_backward(self, behind: list[Event]) -> bool:
        """Whether no backward pass has come in this iteration, nor can come: a transform of torch.func has given these
        gradients, or an estimate from losses. `behind`: what they were made by."""
        others = since(self._log.record.events, self._log.iteration_start)
        known = {event.index for event in behind}
        return bool(behind) and not any(
            isinstance(event, BackwardCall) or (event.index not in known and has_graph(event)) for event in others
        )

    def bad_ones(self, gradients: list[Tensor], step: int) -> tuple[Ref, ...]:
        """Those that the script has made bad; none where backward gave bad ones already."""
        if all_finite_on_cpu(gradients):
            return ()
        bad = [g for g in gradients if g.is_cpu and not is_finite(g)][:FOLLOWED]
        made = [self._made_by(gradient) for gradient in bad]
        targets = tuple(ref for ref in made if ref is not None)
        if len(targets) == len(bad) and self._were_finite(targets):
            return targets
        maker = self._log.record.event(targets[0].event) if targets else None
        self.bad_at = (step, maker.line) if isinstance(maker, GlueOp) else None
        return ()

    def _made_by(self, gradient: Tensor) -> Ref | None:
        ref = self._log.lookup(gradient)
        event = self._log.record.event(ref.event) if ref is not None and ref.event not in self.clipped else None
        return ref if isinstance(event, GlueOp) else None

    def _were_finite(self, targets: tuple[Ref, ...]) -> bool:
        """Whether all that they were made from was: what backward calls left and returned, and the script's own numbers."""
        given = list[Tensor]()
        for event in self._behind(targets):
            if isinstance(event, GlueOp):
                given += [held.value for held in held_by(event)]
            elif isinstance(event, BackwardCall):  # (what a call of a module has made bad is found in it)
                given += [t for ref in event.outputs if (t := ref()) is not None]
        return all_finite_on_cpu(t for t in given if t.is_cpu and t.is_floating_point() and not t.is_meta)

    def _behind(self, targets: Iterable[Ref]) -> list[Event]:
        """The operators outside modules that these were made by, and the calls whose results those read."""
        record, found = self._log.record, list[Event]()
        pending, seen = [ref.event for ref in targets], set[int]()
        while pending:
            index = pending.pop()
            event = record.event(index)
            if event is None or index in seen:
                continue
            seen.add(index)
            found.append(event)
            if isinstance(event, GlueOp):
                pending += [ref.event for ref in refs_of(event)] + record.writers.get(index, [])
        return found


def _reads_gradients(event: Event) -> bool:
    """Whether it is a backward pass, or has read what one may have left: neither weights nor whole numbers."""
    given = held_by(event) if isinstance(event, GlueOp) else ()
    is_left = any(h.tensor.is_floating_point() and not h.tensor.requires_grad for h in given)
    return is_left or isinstance(event, BackwardCall)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that an optimizer is about to use."""
    return [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]
