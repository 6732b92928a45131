"""The arguments of a recorded event, as a replay gives them to it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat, numerics
from ampguard.capture.events.operands import leaves
from ampguard.capture.record import Held, HeldGenerator, Ref
from ampguard.capture.root_calls.trees import named_tuple
from ampguard.errors import ReplayError
from ampguard.replay.tracer import ReplayMode


def is_replayable(value: Any) -> bool:
    """Whether an argument can be given to a second call: generators and open files are used up by the first."""
    return not (
        inspect.isgenerator(value) or (hasattr(value, "read") and hasattr(value, "seek")) or _is_iterator(value)
    )


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__") and hasattr(value, "__iter__") and not isinstance(value, (Tensor, nn.Module))


@dataclass(slots=True)
class Values:
    """The tensors of one replay.

    `made`: what its events returned. `replaced`: what the variant puts in place of a tensor of the script (by identity)
    or of an event's result. `stand_ins`: for a tensor of the script, the one that the replay works with.
    `keeps_graph`: gradients are asked for, so no link of the graph may be cut.
    """

    mode: ReplayMode
    replaced: dict[int | Ref, Tensor]
    keeps_graph: bool = False
    made: dict[Ref, Tensor] = field(default_factory=dict)
    stand_ins: dict[int, Tensor] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    """The identities of the tensors that the record holds, as far as they have been asked for."""
    written: Set[int] = frozenset()
    """The same of those that the step itself writes to, through a view: each replay has a copy of its own."""
    copies: dict[int, Tensor] = field(default_factory=dict)
    names: dict[Ref, str] = field(default_factory=dict)
    is_approximate: bool = False
    """Whether gradients go another way than in the step."""

    def for_module(self, tree: Any, grad: bool) -> Any:
        """A root call's arguments: clones of earlier events' results as replayed (traced, so that the chain of values
        is not cut) and of what was held."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                if leaf in self.replaced:
                    return self.replaced[leaf].clone()
                made = self._result(leaf)
                with torch.set_grad_enabled(self.keeps_graph), self.mode:
                    copy = made.clone() if self.mode.sees_operators else as_laid_out(made, made)
                    return compat.in_class_of(copy, made)
            return self._leaf(leaf, grad) if isinstance(leaf, Held) else leaf

        return map_leaves(tree, value)

    def for_operator(self, tree: Any) -> Any:
        """A taped operator's arguments."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                made = self._result(leaf)
                if leaf in self.replaced and not made.requires_grad:
                    return self.replaced[leaf].clone()
                return made if self.keeps_graph or not made.requires_grad else self._detached(made)
            if isinstance(leaf, Held):
                if self.keeps_graph and leaf.tensor.requires_grad:
                    return self._leaf(leaf, grad=True) if leaf.tensor.is_leaf else self._computed(leaf)
                given = self.replaced.get(id(leaf.tensor), self._to_be_written(leaf)).detach()
                return compat.in_class_of(given, leaf.tensor)
            return leaf.restored() if isinstance(leaf, HeldGenerator) else leaf

        return map_leaves(tree, value)

    def _to_be_written(self, held: Held) -> Tensor:
        """What was held; this replay's own copy of it where views of it are written to."""
        value = held.value
        if id(value) not in self.written:
            return value
        own = self.copies.get(id(value))
        if own is None:
            own = self.copies[id(value)] = as_laid_out(value.detach(), value)
            self.mode.stand_ins[compat.storage_key(own)] = (own, held.tensor)
        return own

    def _detached(self, made: Tensor) -> Tensor:
        detached = compat.in_class_of(made.detach(), made)
        self.mode.stands_for(detached, made)
        return detached

    def for_backward(self, tree: Any) -> Any:
        """What was differentiated, the gradients given for it, and by what it was differentiated."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return self._result(leaf)
            if not isinstance(leaf, Held):
                return leaf
            known = self.stand_ins.get(id(leaf.tensor))
            if known is None and leaf.tensor.grad_fn is not None:
                raise ReplayError("what was differentiated was not made by a recorded operator")
            return leaf.value if known is None else known

        return map_leaves(tree, value)

    def _computed(self, held: Held) -> Tensor:
        """What the step computed where nothing is recorded: in a module that did not return it, or autocast's cast.

        A cast is made anew; where anything else is not found again, gradients end here.
        """
        found = self.replaced.get(id(held.tensor))
        if found is not None:
            return found
        self.is_approximate = True
        parameter = compat.cast_leaf(held.tensor)
        if parameter is not None:
            with torch.enable_grad(), self.mode:
                cast = self.stand_ins.get(id(parameter), parameter).to(held.tensor.dtype)
            self.replaced[id(held.tensor)] = cast
            return cast
        return held.value.detach()

    def _result(self, ref: Ref) -> Tensor:
        if ref not in self.made:
            raise ReplayError("a tensor that the step used was made by an operator that was not recorded")
        return self.made[ref]

    def _leaf(self, held: Held, grad: bool) -> Tensor:
        """A tensor that no event made: one clone for the whole replay where it takes part in a graph."""
        replacement = self.replaced.get(id(held.tensor))
        source = held.value if replacement is None else replacement
        wants = grad and source.requires_grad and source.is_floating_point()
        if wants and self.keeps_graph and id(held.tensor) in self.stand_ins:
            return self.stand_ins[id(held.tensor)]
        other = low_to(source, self.mode.variant.convert)
        if isinstance(source, nn.Parameter) and other is source:
            return self.stand_ins.get(id(held.tensor), source)
        copy = compat.in_class_of(as_laid_out(other.detach(), held.tensor), held.tensor)
        self.mode.stand_ins[compat.storage_key(copy)] = (copy, held.tensor)
        if wants:
            self.stand_ins[id(held.tensor)] = copy.requires_grad_()
        return copy


def map_leaves(tree: Any, visit: Any) -> Any:
    """Like `map_tensors`, for trees whose tensors have been replaced by Ref and Held."""
    if isinstance(tree, (Ref, Held, HeldGenerator)):
        return visit(tree)
    if isinstance(tree, list):
        return [map_leaves(item, visit) for item in tree]
    if isinstance(tree, tuple):
        items = [map_leaves(item, visit) for item in tree]
        return named_tuple(type(tree), items) if hasattr(tree, "_make") else tuple(items)
    if type(tree) is dict:
        return {key: map_leaves(item, visit) for key, item in tree.items()}
    if isinstance(tree, dict):
        clone = copy.copy(tree)
        for key in list(clone):
            item = map_leaves(dict.__getitem__(tree, key), visit)
            dict.__setitem__(clone, key, item)
            if isinstance(key, str) and key in getattr(clone, "__dict__", ()):
                clone.__dict__[key] = item
        return clone
    if hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        clone = copy.copy(tree)
        for name in tree.__dataclass_fields__:
            if hasattr(tree, name):
                object.__setattr__(clone, name, map_leaves(getattr(tree, name), visit))
        return clone
    return tree


def fresh_copy_needed(argument: Any) -> bool:
    """An operand that the operator overwrites and that belongs to the script must not be the script's own."""
    return isinstance(argument, Held) or any(isinstance(leaf, Held) for leaf in leaves(argument))


def low_to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A low-precision tensor in `dtype`; any other as it is."""
    if dtype is None or not numerics.is_low_precision(tensor.dtype) or tensor.dtype == dtype:
        return tensor
    return tensor.detach().to(dtype)


def as_laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy with the strides of `like`, also where that is a slice: kernels and compiled code depend on them."""
    copy = tensor.clone()
    is_plain = type(like) in (Tensor, nn.Parameter) and compat.is_dense(tensor) and compat.is_dense(like)
    if not is_plain or tensor.shape != like.shape or copy.stride() == like.stride() or 0 in like.stride():
        return copy
    strided = torch.empty_strided(tensor.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    try:
        return strided.copy_(copy)
    except RuntimeError:  # elements that share their memory
        return copy
