"""Modules whose parameters are results: the fast weights of an inner loop (MAML), which libraries hang in their places.

`torch.func.functional_call` says which weights a module is to run on. Others put tensors that the step has computed where a
module keeps its parameters, or keep them in lists of their own, beside. Such weights belong to the step: a call is run again
on what made them, not on what stands there by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.log import EventLog
from ampguard.capture.record import RootCall
from ampguard.capture.root_calls.bymodule import ByModule
from ampguard.capture.root_calls.trees import map_tensors

FIRST_CALLS = 2
"""Calls of a module in which it is looked at: the second of an inner loop has fast weights, if the first has none."""
RESCAN_CALLS = 256
MOST_TENSORS = 8192
"""In a module's own lists; those of more are left as they are."""
MAX_DEPTH = 4

OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
CONTAINERS = (list, tuple, dict)


@dataclass(slots=True)
class _Watched:
    calls: int = 0
    is_computed: bool = False
    first: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    """Its parameters in the first call, by their places: others may stand there when that call is run again."""


class ComputedState:
    """Knows, per root module, whether its weights are computed, and which they are."""

    def __init__(self) -> None:
        self._watched: ByModule[_Watched] = ByModule()

    def before_call(self, module: nn.Module, log: EventLog) -> dict[str, Any]:
        """The weights of a module that has computed ones, by the paths of their places, and the lists in which they are kept
        beside, as the record keeps them; mostly nothing."""
        if compat.StandingIn.sets:
            return {}  # the guard's own casts (`--precision O2`), which it makes again by itself
        watched = self._watched.get(module)
        if watched is None:
            watched = self._watched.put(module, _Watched())
        watched.calls += 1
        if not watched.is_computed and watched.calls > FIRST_CALLS and watched.calls % RESCAN_CALLS:
            return {}
        if not watched.is_computed and watched.calls > 1 and not _may_have_any(module):
            return {}
        parts = [(f"{path}." if path else "", part) for path, part in compat.named_modules(module)]
        weights = {
            path: weight for prefix, part in parts for path, weight in _weights_of(part, prefix, watched.first, log)
        }
        own = {prefix + name: p for prefix, part in parts for name, p in _parameters_of(part)}
        if not weights and not watched.is_computed:
            watched.first = {path: weakref.ref(p) for path, p in own.items()} if watched.calls == 1 else watched.first
            return {}
        weights = own | weights
        if not watched.is_computed:
            watched.is_computed = True
            _tell_earlier_calls(module, watched.first, log)
        state: dict[str, Any] = map_tensors(weights | _kept_beside(parts, weights), log.named_argument)
        return state


def _may_have_any(module: nn.Module) -> bool:
    """Whether any plain tensor hangs in its parts, or stands in the place of a parameter: soon answered."""
    for part in compat.all_modules(module):
        if Tensor in map(type, part.__dict__.values()) or Tensor in map(type, compat.parameters_of(part).values()):
            return True
    return False


def _tell_earlier_calls(module: nn.Module, first: dict[str, weakref.ref[Tensor]], log: EventLog) -> None:
    """The calls of this step that came before the first computed weights ran on the module's parameters."""
    parameters = {path: p for path, ref in first.items() if (p := ref()) is not None}
    for event in log.kept_since(log.iteration_start):
        if isinstance(event, RootCall) and event.module is module and not event.swapped_state:
            event.swapped_state = map_tensors(parameters, log.named_argument)


def _parameters_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in compat.parameters_of(part).items():
        if isinstance(parameter, Tensor):
            yield name, parameter


def _weights_of(part: nn.Module, prefix: str, first: Container[str], log: EventLog) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the places of parameters that are none, and those that the script has hung on it in place of one.

    `first`: the places of parameters that may have been taken away. A layer of PyTorch's reads nothing else. What a hook
    computes (`weight_norm`) it computes anew in every call.
    """
    for name, weight in _parameters_of(part):
        if not isinstance(weight, nn.Parameter):
            yield prefix + name, weight
    is_layer = type(part).__module__.startswith("torch.nn")
    for name, value in part.__dict__.items():
        is_hung = isinstance(value, Tensor) and compat.is_made(value) and (is_layer or prefix + name in first)
        if is_hung and not compat.hooks_of(part) and log.is_made_outside(value):
            yield prefix + name, value


def _kept_beside(parts: list[tuple[str, nn.Module]], weights: dict[str, Tensor]) -> dict[str, Any]:
    """A module's own lists, as they are now, that hold one of these weights: it may read them from there."""
    wanted = {id(weight) for weight in weights.values()}
    found: dict[str, Any] = {}
    for prefix, part in parts:
        for name, value in part.__dict__.items():
            if type(value) in CONTAINERS and name not in OWN_ATTRIBUTES:
                inside = {id(tensor) for tensor in _tensors_in(value, 0)}
                if inside & wanted and len(inside) <= MOST_TENSORS:
                    found[prefix + name] = value
    return found


def _tensors_in(tree: Any, depth: int) -> Iterator[Tensor]:
    for item in tree.values() if type(tree) is dict else tree:
        if isinstance(item, Tensor):
            yield item
        elif type(item) in CONTAINERS and depth < MAX_DEPTH:
            yield from _tensors_in(item, depth + 1)
