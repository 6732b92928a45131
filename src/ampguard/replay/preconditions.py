"""Can a recorded step be run again? Only from what it began with, unchanged, and without waiting for other ranks."""

from __future__ import annotations

from collections.abc import Container

from ampguard import compat
from ampguard.capture.events.operands import held_in, leaves
from ampguard.capture.record import Event, GlueOp, RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import ChangedSinceError, ReplayError
from ampguard.replay.arguments import is_replayable
from ampguard.replay.behind import forward_code_of_functions


def check(
    events: list[Event],
    recorder: FlightRecorder,
    keeps_graph: bool,
    is_exact: bool,
    is_complete: bool = True,
    is_late: bool = False,
    known: Container[int] = (),
) -> None:
    """Raise ReplayError where a step cannot be run again.

    `keeps_graph`: gradients are replayed, too. `is_exact`: ChangedSinceError, too, where its givens have changed since.
    `is_complete`: everything that the step computed was recorded. `is_late`: a device came to its gradients behind the update.
    `known`: parameters, by identity, of which it is known what they were.
    """
    if not events and not is_complete:
        raise ReplayError(
            "it runs more operators outside modules than are recorded of a step, and what led to the bad result came later"
        )
    if is_late:
        raise ReplayError(
            "the device came to these gradients when the optimizer had used them: the script runs ahead of it. A loop that reads "
            "its loss in each step (`loss.item()`), or `--on-nonfinite stop`, has them looked at before"
        )
    if not events and recorder.has_compiled_before:
        raise ReplayError(
            "nothing that led to the bad result was recorded: the script runs code that it compiled before the guard was on; "
            "enter ampguard.watch() before torch.compile is called, or use `ampguard run`"
        )
    if not events:
        raise ReplayError(
            "nothing that led to the bad result was recorded: it was made by a transform of torch.func, in compiled code "
            "that differentiates by itself, or outside PyTorch"
        )
    functions = forward_code_of_functions() if keeps_graph else frozenset()
    for event in events:
        if isinstance(event, GlueOp) and not event.grad and event.line and event.line.code in functions:
            raise ReplayError("a custom autograd.Function ran whose `apply` was looked up before the guard was on")
        state = event.swapped_state if isinstance(event, RootCall) else {}
        for held in held_in((event.args, event.kwargs, state)):
            if is_exact and not held.is_intact and id(held.tensor) not in known:
                raise ChangedSinceError("a tensor that the step started from was changed in place since")
        if isinstance(event, RootCall):
            if compat.needs_other_ranks(event.module):
                raise ReplayError("the parameters are spread over ranks, and the other ranks would have to take part")
            if is_exact:
                _check_parameters(event, recorder, known)
            if any(not is_replayable(value) for value in leaves((event.args, event.kwargs))):
                raise ReplayError("an argument of the module is used up by the call (a generator or an open file)")


def _check_parameters(root: RootCall, recorder: FlightRecorder, known: Container[int]) -> None:
    stepped = recorder.steps.made_since(root.updates_before)
    if not stepped or (root.swapped_state and not root.is_rewritten):
        return
    updated = {id(p) for o in stepped for group in o.param_groups for p in group["params"] if p.grad is not None}
    if any(id(p) in updated and id(p) not in known for p in compat.all_parameters(root.module)):
        raise ChangedSinceError("an optimizer has changed the parameters since the module was called")
