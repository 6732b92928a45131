"""A term of the loss made from gradients that are still scaled: a gradient penalty, an inner step that is learnt through.

`torch.autograd.grad(scaler.scale(loss), ..., create_graph=True)` returns gradients that carry the loss scale. What is made
from them has to be divided by it. Told only where the graph of the loss leads to such gradients past no factor that may be
that division, and where the loss does change with their size: a cosine or a sign does not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.loss_scale import DeviceScale
from ampguard.capture.record import Line
from ampguard.protocol.events import Breach

if TYPE_CHECKING:
    from ampguard.capture.protocol.moves import Moves

MAX_NODES = 2000
MAX_LOOKS = 6
"""Loss graphs that are searched in a run."""
MAX_GRADIENTS = 4096
INVARIANT = 1e-3
"""Share of the largest possible change below which the loss does not change with the gradients' size."""


@dataclass(slots=True)
class _Scaled:
    """A gradient that carries a scale and can be differentiated itself."""

    gradient: Tensor
    node: Any
    position: int
    scale: DeviceScale
    where: Line | None


class Penalties:
    """Follows them from `torch.autograd.grad` into the next backward pass."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._made: list[_Scaled] = []
        self._suspect: _Scaled | None = None
        self._handles: list[Any] = []
        self._changes: list[tuple[Tensor, Tensor]] = []
        self._looks = 0

    def differentiated(self, outputs: Any, grad_outputs: Any, results: Any, where: Line | None) -> None:
        """`torch.autograd.grad` has returned `results`."""
        if self._looks >= MAX_LOOKS:
            return
        found = [r for r in results if isinstance(r, Tensor) and r.grad_fn is not None]
        if not found or len(self._made) + len(found) > MAX_GRADIENTS:
            return
        scale, _ = self._moves.carried.scale_of(outputs, grad_outputs)
        if scale is not None and float(scale) != 1.0:
            self._made += [_Scaled(r, r.grad_fn, r.output_nr, scale, where) for r in found]

    def before_backward(self, losses: Any, is_scaled: bool) -> None:
        """Does the loss that is about to be differentiated come from some of them?"""
        if not self._made or not is_scaled or not isinstance(losses, Tensor) or losses.grad_fn is None:
            return
        self._looks += 1
        with compat.unseen():
            self._suspect = self._reached(losses)
            if self._suspect is None:
                return
            mine = [made for made in self._made if made.where == self._suspect.where]
            for made in mine:
                self._handles.append(made.node.register_prehook(self._measure(made)))

    def after_backward(self, reached: tuple[Any, ...], where: Line | None) -> None:
        """Tell it, if the loss does change with their size."""
        if not self._made:
            return
        suspect, changes = self._suspect, self._changes
        self.forget()
        if suspect is None or not changes:
            return
        change, most = (float(torch.stack(part).sum()) for part in zip(*changes, strict=True))
        if not abs(change) > INVARIANT * most:
            return
        self._looks = MAX_LOOKS
        scale = float(suspect.scale)
        facts = {"scale": scale, "clips": True, "in_loss": True}
        breach = Breach(
            "clip-before-unscale", next(iter(reached), None), suspect.scale.watch, where, suspect.where, scale, facts
        )
        self._moves.tell([breach], self._moves.recorder.steps.count)

    def forget(self) -> None:
        """They were used, or an iteration is over."""
        for handle in self._handles:
            handle.remove()
        self._made, self._handles, self._changes, self._suspect = [], [], [], None

    def _measure(self, made: _Scaled) -> Callable[[Any], None]:
        def measure(gradients: Any) -> None:
            self._moves.recorder.barrier.call(self._note, made, gradients)

        return measure

    def _note(self, made: _Scaled, gradients: Any) -> None:
        """By Euler's theorem `(gradient * value).sum()` is how the loss changes with the size of the value."""
        arrived = gradients[made.position] if made.position < len(gradients) else None
        if isinstance(arrived, Tensor) and arrived.shape == made.gradient.shape:
            with torch.no_grad(), compat.unseen():
                given, value = arrived.detach().double(), made.gradient.detach().double()
                self._changes.append(((given * value).sum(), given.norm() * value.norm()))

    def _reached(self, loss: Tensor) -> _Scaled | None:
        """The first gradient on a way that passes no division by its scale. The scaling of the loss itself is none."""
        made = {id(one.node): one for one in self._made}
        scale = float(self._made[0].scale)
        scaling = self._moves.carried.losses.nodes() | {id(loss.grad_fn)}
        behind = nodes_behind(loss, lambda node: id(node) in scaling or not may_divide(node, scale))
        return next((made[id(node)] for node in behind if id(node) in made), None)


def nodes_behind(loss: Tensor, goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes of a loss's graph, the next ones first, at most `MAX_NODES`; what is behind one only if that `goes_on`."""
    waiting, seen = deque([loss.grad_fn]), dict[int, Any]()  # (they are held: another node gets a dropped one's id)
    while waiting and len(seen) < MAX_NODES:
        node = waiting.popleft()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        if goes_on(node):
            waiting += [inner for inner, _ in node.next_functions]


def may_divide(node: Any, scale: float) -> bool:
    """Whether this operator may be what takes the scale out; true of what cannot be looked into."""
    name = type(node).__name__
    if isinstance(node, torch.autograd.function.BackwardCFunction) or name.startswith(("CppFunction", "Addc")):
        return True  # CppFunction: also what `torch._foreach_div` makes
    try:
        return any(holds_scale(factor, scale) for factor in constants_of(node))
    except (RuntimeError, TypeError, ValueError):  # the graph was freed, a factor that is no number
        return True


def constants_of(node: Any) -> Iterator[float]:
    """The numbers by which an operator multiplies what it is differentiated for."""
    name = type(node).__name__
    if name.startswith(("AddBackward", "SubBackward")):
        alpha = compat.alpha_of(node)
        if alpha != 1.0:
            yield alpha
    elif name.startswith(("MulBackward", "DivBackward")):
        for (inner, _), saved in zip(node.next_functions, ("self", "other"), strict=False):
            value = compat.saved_by(node, saved) if inner is None else None
            if value is not None and value.numel() == 1:
                factor = float(value)
                yield factor if name.startswith("Mul") or not factor else 1 / factor


def holds_scale(factor: float, scale: float) -> bool:
    """Whether a number may have been divided by the scale: 1 / scale, 1 / scale**2, a learning rate over the scale.

    >>> holds_scale(1 / 65536, 65536.0), holds_scale(-1e-3 / 65536, 65536.0)
    (True, True)
    >>> holds_scale(10.0, 65536.0), holds_scale(0.01, 64.0)
    (False, False)
    """
    size = abs(factor)
    if size == 0 or any(abs(size * scale**power - 1) < 1e-3 for power in (1, 2, -1, -2)):
        return True
    if _is_round(size) and math.frexp(scale)[0] == 0.5:  # what is divided by a power of two is not round any more
        return False
    return _is_round(size * scale)


def _is_round(value: float) -> bool:
    return abs(float(f"{value:.3g}") - value) <= 1e-6 * value
