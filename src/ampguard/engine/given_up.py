"""The batch that a rollback has given up: losses of its forward passes may still be on their way to `backward`.

The weights and statistics that they were computed from have been written to since. PyTorch refuses their gradients where
it has saved one of these ("modified by an inplace operation"), and elsewhere gives those of a batch that is to be left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ampguard import compat


class GivenUp:
    """From a rollback to the next step that is made."""

    def __init__(self) -> None:
        self._until: int | None = None
        """Autograd's number of the first node that can be of a later forward pass."""

    def begin(self) -> None:
        """The run went back: what has been computed so far is given up."""
        self._until = compat.next_node_number()

    def end(self) -> None:
        self._until = None

    def holds(self, losses: Sequence[Tensor]) -> bool:
        """Whether one of the losses was computed before."""
        until = self._until
        return until is not None and any(
            number is not None and number < until for number in (compat.node_number(loss.grad_fn) for loss in losses)
        )

    def has_broken(self, error: RuntimeError, losses: Sequence[Tensor]) -> bool:
        """Whether a backward pass has failed because something behind its losses was computed before.

        Asked only then: the graph of a gradient penalty has nodes that are numbered by another thread.
        """
        return (
            self._until is not None
            and "modified by an inplace operation" in str(error)
            and compat.first_number_behind(losses) < self._until
        )
