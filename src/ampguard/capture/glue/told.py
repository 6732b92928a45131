"""What a kept call is made of: its operators, found out by calling it once more, as the tape would have recorded them.

The call is known to do nothing but compute (see `calltape`), so that calling it again changes nothing. Its operands are
the script's own tensors; where one was written to since, the operators are the same and its value is the record's
business, not ours.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.events.autocasting import cast_types_within
from ampguard.capture.events.operands import leaves
from ampguard.capture.frames import user_line
from ampguard.capture.glue.taped_calls import TapedCall, WritingCall
from ampguard.capture.record import Event, GlueOp, Held, HeldGenerator, Ref, StepRecord
from ampguard.capture.root_calls.surroundings import modes_of
from ampguard.compat import version_of

MAX_CALL_OPERATORS = 64
"""Operators that one call may be made of; each call takes up as many indices."""

_GONE: weakref.ref[Tensor] = weakref.ref(torch.empty(0))
"""Of a result that nobody has held on to."""


def tell_calls(record: StepRecord) -> None:
    """Put the operators that calls are made of in their place."""
    if TapedCall not in (kinds := set(map(type, record.events))) and WritingCall not in kinds:
        return
    events: list[Event] = []
    for event in record.events:
        if not isinstance(event, TapedCall):
            events.append(event)
            continue
        operators = operators_of(event)
        if operators is None:
            record.complete = False
        events += operators or ()
    record.events = events


def operators_of(call: TapedCall) -> list[GlueOp] | None:
    """The operators of `call`, the last under the call's own index. None where the call does not repeat itself."""
    args, kwargs = call.operands
    if type(call) is WritingCall:  # the script's own tensor is not to be written to again
        args = ((args[0] if call.before is None else call.before).detach().clone(), *args[1:])
    pairs = (*_pairs(args, call.args), *_pairs(kwargs, call.kwargs))
    names = {id(tensor): (weakref.ref(tensor), name) for tensor, name in pairs}
    listing = _Listing(names, keeps_writes=type(call) is WritingCall)
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # neither use nor fill the script's cache of weight casts
    try:
        run = compat.operator_by_operator(call.func) if compat.is_scripted(call.func) else call.func
        # What was read, and is bad, may have been read by an operator.
        with compat.outside_dispatch(), modes_of(call.modes), listing:
            output = run(*args, **kwargs)
    except Exception:
        return None
    finally:
        torch.set_autocast_cache_enabled(is_cached)
    if type(call) is WritingCall:
        return _as_written(call, listing)
    outputs = list(output) if isinstance(output, (tuple, list)) else [output]
    return _as_kept(call, listing, outputs)


def operators_in(run: Callable[[], Any]) -> tuple[list[GlueOp], Any]:
    """The operators of some code of the script's that only computes, with the lines that call them, and what it returns."""
    listing = _Listing({}, keeps_writes=True, keeps_lines=True)
    with listing:
        output = run()
    maker = listing.maker_of([output])
    return (listing.operators[: maker.index + 1] if maker is not None else []), output


def _as_written(call: TapedCall, listing: _Listing) -> list[GlueOp] | None:
    """The one operator of a call that wrote to its first operand. None where that is not what it does."""
    if len(listing.operators) != 1 or not writes_first(listing.operators[0]):
        return None
    (op,) = listing.operators
    op.index, op.line, op.grad, op.outputs, op.floating = call.index, call.line, call.grad, call.outputs, call.floating
    return [op]


def writes_first(op: GlueOp) -> bool:
    """Whether an operator has written to its first operand and done nothing else."""
    if op.rng is not None or op.error is not None or torch.Tag.nondeterministic_seeded in op.func.tags:
        return False
    has_generator = any(isinstance(leaf, HeldGenerator) for leaf in leaves((op.args, op.kwargs)))
    return compat.positions_written(op.func) == {0} and not has_generator


def _as_kept(call: TapedCall, listing: _Listing, outputs: list[Any]) -> list[GlueOp] | None:
    """The listed operators under the call's numbers. None where they are not those of a call that only computes.

    What comes after the operator that made the results (autograd detaches what it saves) reaches nobody.
    """
    maker = listing.maker_of(outputs)
    if maker is None or len(outputs) != len(call.outputs):
        return None
    operators = listing.operators[: maker.index + 1]
    if len(operators) > MAX_CALL_OPERATORS or not all(is_plain(op) for op in operators):
        return None
    shift = call.index - maker.index
    for op in operators:
        op.index += shift
        op.line, op.grad = call.line, call.grad
        op.args = shifted(op.args, shift)
        op.kwargs = shifted(op.kwargs, shift)
        op.outputs = [_GONE for _ in op.outputs]
    maker.outputs[: len(call.outputs)] = call.outputs
    return operators


def is_plain(op: GlueOp) -> bool:
    """Whether an operator has done nothing but compute."""
    if op.rng is not None or op.error is not None or torch.Tag.nondeterministic_seeded in op.func.tags:
        return False
    return not compat.positions_written(op.func) and not any(
        isinstance(leaf, HeldGenerator) for leaf in leaves((op.args, op.kwargs))
    )


class _Made(Ref):
    """A result of an operator of the same call, numbered from 0."""


class _Listing(compat.DispatchMode):
    """Lists operators while a call runs once more."""

    def __init__(
        self,
        names: dict[int, tuple[weakref.ref[Tensor], Ref | Held]],
        keeps_writes: bool,
        keeps_lines: bool = False,
    ) -> None:
        super().__init__()
        self._keeps_writes = keeps_writes
        self._keeps_lines = keeps_lines
        self.operators: list[GlueOp] = []
        self._names = names
        """By identity, and weakly: to hold on to a result would change what PyTorch does next with it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = compat.run_counted(func, args, kwargs)
        if func.namespace == "profiler" or (args and output is args[0] and not self._keeps_writes):
            return output
        line = user_line(sys._getframe(1)) if self._keeps_lines else None
        op = GlueOp(len(self.operators), func, self._named(tuple(args)), self._named(kwargs), line, True)
        op.casts_for = cast_types_within(func)
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor):
                ref = weakref.ref(tensor)
                self._names[id(tensor)] = (ref, _Made(op.index, len(op.outputs)))
                op.outputs.append(ref)
                op.floating.append(tensor.is_floating_point())
        self.operators.append(op)
        return output

    def maker_of(self, outputs: list[Any]) -> GlueOp | None:
        """The one operator whose first results these are."""
        made = [self._name_of(value) if isinstance(value, Tensor) else None for value in outputs]
        first = made[0] if made else None
        if not isinstance(first, _Made):
            return None
        is_one = all(isinstance(n, _Made) and (n.event, n.output) == (first.event, i) for i, n in enumerate(made))
        return self.operators[first.event] if is_one else None

    def _name_of(self, tensor: Any) -> Ref | Held | None:
        known = self._names.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _named(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._name_of(value) or Held(value, version_of(value))
        if isinstance(value, (list, tuple)):
            items = [self._named(item) for item in value]
            return tuple(items) if type(value) is tuple else items
        if isinstance(value, dict):
            return {key: self._named(item) for key, item in value.items()}
        if isinstance(value, torch.Generator):
            return HeldGenerator(value.device, value.get_state())
        return value


def shifted(tree: Any, shift: int) -> Any:
    """The operands of an operator whose call is put at another place: what the same call made is so much further on."""
    if isinstance(tree, _Made):
        return Ref(tree.event + shift, tree.output)
    if isinstance(tree, (list, tuple)):
        items = [shifted(item, shift) for item in tree]
        return tuple(items) if type(tree) is tuple else items
    if isinstance(tree, dict):
        return {key: shifted(item, shift) for key, item in tree.items()}
    return tree


def _pairs(values: Any, names: Any) -> list[tuple[Tensor, Ref | Held]]:
    """Each tensor among a call's arguments and what the record calls it."""
    if isinstance(values, Tensor):
        return [(values, names)] if isinstance(names, (Ref, Held)) else []
    if isinstance(values, dict) and isinstance(names, dict):
        return [pair for key in values if key in names for pair in _pairs(values[key], names[key])]
    if isinstance(values, (list, tuple)) and isinstance(names, (list, tuple)) and len(values) == len(names):
        return [pair for value, name in zip(values, names, strict=True) for pair in _pairs(value, name)]
    return []
