"""Running a recorded backward pass again: gradients are returned, and nothing is left in the script's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.record import BackwardCall, Ref
from ampguard.errors import ReplayError
from ampguard.replay.arguments import Values
from ampguard.replay.frameworks import as_begun_by_fabric


class Gradients:
    """The gradients of some parameters, summed over the backward passes of an iteration."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.loss: float | None = None
        """The last number that was differentiated."""
        self._sums: dict[int, Tensor] = {}

    def results(self) -> list[tuple[str, Tensor]]:
        """The gradient of each parameter that has one, in the order of the parameters."""
        return [("", self._sums[id(p)]) for p in self.parameters if id(p) in self._sums]

    def owners(self) -> list[Tensor]:
        """The parameters that `results` belong to."""
        return [p for p in self.parameters if id(p) in self._sums]

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        before = self._sums.get(id(parameter))
        gradient = as_dense(gradient)
        self._sums[id(parameter)] = gradient if before is None else before + gradient


def as_dense(gradient: Tensor) -> Tensor:
    """A sparse gradient (`nn.Embedding(sparse=True)`) by operators whose operands can be followed."""
    if gradient.layout == torch.strided:
        return gradient
    rows = compat.stored_rows(gradient)
    if rows is None:
        return gradient.to_dense()
    return torch.zeros_like(gradient, layout=torch.strided).index_add(0, *rows)


def run_backward(
    call: BackwardCall,
    values: Values,
    gradients: Gradients,
    scale_factor: float,
    part: Ref | None = None,
    loss_scale: float | None = None,
) -> list[Tensor]:
    """Differentiate as the step did, with the loss scale multiplied by `scale_factor`. Returns what `grad` returned.

    `part`: differentiate this part of the loss instead, times `loss_scale`.
    """
    losses, given, inputs = values.for_backward(call.args)
    if part is not None and not call.is_functional and part in values.made:
        losses, given = [values.made[part]], None
        scale_factor *= loss_scale or 1.0
    mode = values.mode
    if not any(loss.requires_grad for loss in losses):
        raise ReplayError(
            "what was differentiated does not hang together in the replay: an operator between was not recorded, or its "
            "derivative was not (a custom autograd.Function)"
        )
    given = scaled(losses, given, scale_factor)
    wanted = [p for p in gradients.parameters if call.only is None or id(p) in call.only]
    leaves = inputs if call.is_functional else [values.stand_ins.get(id(p), p) for p in wanted]
    with mode.differentiating(run_backward.__code__), torch.enable_grad(), as_begun_by_fabric():
        found: Sequence[Tensor | None]
        try:
            found = torch.autograd.grad(
                losses,
                leaves,
                given,
                retain_graph=mode.retains_graph,
                create_graph=call.create_graph,
                allow_unused=True,
            )
        except RuntimeError as refusal:
            if "heckpoint" not in str(refusal) or call.is_functional:
                raise
            found = left_in_leaves(losses, leaves, given)
    with torch.no_grad(), mode:
        if not call.is_functional:
            for parameter, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    gradients.add(parameter, gradient)
    if len(losses) == 1 and losses[0].numel() == 1:
        gradients.loss = float(losses[0].detach())
    if not call.is_functional:
        return []
    return [g if g is not None else torch.zeros(()) for g in found]


def left_in_leaves(losses: Sequence[Tensor], leaves: Sequence[Tensor], given: Any) -> tuple[Tensor | None, ...]:
    """The gradients by `backward`, which reentrant checkpointing insists on; the leaves' own are put back after it.

    Raises ReplayError where a gradient that arrives sets something off (an optimizer in backward, DDP's reducer).
    """
    if any(compat.has_gradient_hooks(leaf) for leaf in leaves):
        raise ReplayError("reentrant checkpointing with hooks on gradients cannot be differentiated again")
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(losses, given)
        return tuple(leaf.grad for leaf in leaves)
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def scaled(losses: Sequence[Tensor], given: Any, factor: float) -> list[Tensor]:
    """The gradients to begin with, multiplied; always spelled out, so that every replay runs the same operators."""
    begin = [None] * len(losses) if given is None else list(given)
    ones = [torch.ones_like(t, requires_grad=False) if g is None else g for t, g in zip(losses, begin, strict=True)]
    return [g * factor if factor != 1.0 else g for g in ones]
