"""A failing loss with a change, differentiated too: a loss that is finite may leave gradients that are not.

The step has not come to its backward pass. What it would differentiate is the loss, for every parameter behind it.
"""

from __future__ import annotations

import copy
import dataclasses

from torch import Tensor

from ampguard import compat
from ampguard.capture.events.operands import held_by
from ampguard.capture.record import BackwardCall, Modes, Ref, RootCall
from ampguard.numerics import is_finite
from ampguard.replay import preconditions
from ampguard.replay.rebuild import Replayer
from ampguard.replay.variants import Variant

PLAIN = Modes(grad=True, inference=False, autocast=())


def has_finite_gradients(replayer: Replayer, variant: Variant, at_own_scale: bool = False) -> bool | None:
    """Whether all gradients of the loss are finite with the change, at a loss scale of 1; None where nobody can tell.

    `at_own_scale`: at the scale by which the script multiplies the loss itself.
    """
    try:
        again = with_backward(replayer, variant, at_own_scale)
        outcome = again.run(traced=False) if again is not None else None
    except Exception:
        return None
    if outcome is None or not outcome.gradients or not outcome.has_true_derivatives:
        return None
    return all(is_finite(gradient) for _, gradient in outcome.gradients)


def raises_for_writes(replayer: Replayer, variant: Variant) -> bool:
    """Whether the backward pass raises with the change, and not without it: what it needs has been written to.

    A buffer that low precision had cast to a copy is needed itself in float32, and the forward pass updates it.
    """
    return _is_refused(replayer, variant) and not _is_refused(replayer, Variant())


def _is_refused(replayer: Replayer, variant: Variant) -> bool:
    try:
        again = with_backward(replayer, variant)
        if again is not None:
            again.run(traced=False)
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    except Exception:
        return False
    return False


def with_backward(replayer: Replayer, variant: Variant, at_own_scale: bool = False) -> Replayer | None:
    """A replayer of the step with the change that goes on to differentiate the loss, at a loss scale of 1.

    None where there is nothing to differentiate. Raises ReplayError where the step cannot be differentiated.
    """
    bad = replayer.bad
    if bad.kind != "loss" or bad.mode != "train" or not all(isinstance(target, Ref) for target in bad.targets):
        return None
    parameters = _parameters(replayer)
    if not parameters or replayer.keeps_graph:
        return None
    last = replayer.events[-1]
    call = BackwardCall(last.index + 1, (list(bad.targets), None, None), last.line, False, 0, PLAIN)
    again = copy.copy(replayer)
    again.events, again.keeps_graph = [*replayer.events, call], True
    again.bad = dataclasses.replace(bad, kind="gradient", targets=(), parameters=parameters, loss_scale=None)
    factor = 1.0 if at_own_scale else 1 / (bad.loss_scale or 1.0)
    again.base = dataclasses.replace(variant, loss_scale_factor=factor)
    preconditions.check(again.events, again._recorder, True, again.is_exact)
    return again


def _parameters(replayer: Replayer) -> tuple[Tensor, ...]:
    """What the loss was made from and trains."""
    found: dict[int, Tensor] = {}
    for event in replayer.events:
        own = compat.all_parameters(event.module) if isinstance(event, RootCall) else ()
        held = (held.tensor for held in held_by(event))
        found |= {id(t): t for t in (*own, *held) if compat.is_wanting_leaf(t)}
    return tuple(found.values())
