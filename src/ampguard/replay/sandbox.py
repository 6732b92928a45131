"""Everything that a replay could disturb, and how it is put back.

Live tensors are never written to (their version counters would move and the script's own backward would die): clones
are swapped in for the replay. Any other state that a forward pass may change is kept and put back (see `keeping`).
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.glue.functions import Applied
from ampguard.capture.record import ABSENT, RngStates, RootCall, SavedAttribute, torch_rng_states
from ampguard.capture.root_calls.given_objects import GivenObject, Holder
from ampguard.capture.root_calls.surroundings import devices_in_use
from ampguard.capture.script_signals import handlers_may_raise
from ampguard.replay.keeping import CONTAINERS, MAX_ELEMENTS, StateKeeper
from ampguard.replay.unheard import unheard

MAX_ATTRIBUTE_COPY = 1 << 24

OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What PyTorch itself keeps on every module: its parameters, children, hooks."""


_silenced: list[Any] = []
"""What stood for stderr before each `quiet` that is on."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the script prints while it is replayed was printed already; its tensors lie where they did."""
    _silenced.append(sys.stderr)
    try:
        with (
            compat.scripts_default_device(),
            handlers_may_raise(),
            unheard(),
        ):
            yield
    finally:
        _silenced.pop()


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """What we ourselves say is heard, in the middle of a replay, too: a signal may end the process there."""
    with contextlib.redirect_stderr(_silenced[0] if _silenced else sys.stderr):
        yield


@contextlib.contextmanager
def neutral_thread() -> Iterator[None]:
    """A neutral thread (no autocast, no gradient, no inference mode, nothing compiled); after it, all is as it was."""
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state(legacy=True) if numpy is not None and hasattr(numpy, "random") else None
    python_state = random.getstate()
    torch_state = torch_rng_states()
    devices = devices_in_use()
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cache = torch.is_autocast_cache_enabled()
    anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    try:
        torch.set_anomaly_enabled(False)  # it would raise where we want to see what comes after
        torch.set_autocast_cache_enabled(False)  # neither use nor fill the script's cache of weight casts
        for device in devices:
            torch.set_autocast_enabled(device, False)
        with (
            compat.outside_compiled_code(),
            compat.without_default_device(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)
        torch.set_anomaly_enabled(*anomaly)
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        set_torch_streams(torch_state)
        random.setstate(python_state)
        if numpy_state is not None and numpy is not None:
            numpy.random.set_state(numpy_state)


def set_torch_streams(states: RngStates) -> None:
    if states.torch_cpu is not None:
        torch.default_generator.set_state(states.torch_cpu)
    for index, state in states.torch_cuda:
        torch.cuda.default_generators[index].set_state(state)


def set_streams(states: RngStates) -> None:
    """Wind the random streams back to where they stood."""
    set_torch_streams(states)
    if states.python is not None:
        random.setstate(states.python)
    numpy = sys.modules.get("numpy")
    if states.numpy is not None and numpy is not None:
        numpy.random.set_state(states.numpy)


class ModuleSandbox:
    """A root module whose state a replay may change freely.

    `enter()` swaps in clones of the buffers that the call changes, as they were before the call, and notes the rest;
    `leave()` puts every object and every container's contents back.
    """

    def __init__(self, root: RootCall, module: nn.Module) -> None:
        self._root = root
        self._module = module
        self._undo: list[Callable[[], None]] = []
        self.stand_ins: dict[int, tuple[dict[str, Tensor | None], str]] = {}
        self._keeper = StateKeeper()
        self.attributes: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        """Tensors that are plain attributes of modules: where each hangs, its clone, and itself."""
        self._clones: dict[int, Tensor] = {}
        self._cloned = 0

    def enter(self) -> None:
        for module in compat.all_modules(self._module):
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its state lives in C++, and a replay of it changes none
            self._keep_module(module)
        for saved in self._root.buffers:
            now = saved.owner.get(saved.name)
            before = saved.copy if saved.copy is not None else saved.tensor
            if before is not now or self._fits(before):  # no call is known to change it, and this one yet may
                self._swap(saved.owner, saved.name, self._clone_of(before))
                if now is not None:
                    self.stand_ins[id(now)] = (saved.owner, saved.name)
                # The call may have run on another tensor in the buffer's place, which stood there for its time only.
                self.stand_ins.setdefault(id(saved.tensor), (saved.owner, saved.name))
        for attribute in self._root.attributes:
            now = attribute.owner.get(attribute.name)
            if isinstance(now, Tensor):  # what a second call binds there stands for it
                self.stand_ins.setdefault(id(now), (attribute.owner, attribute.name))
            self._bind(attribute)

    def identity_of(self, owner: nn.Module, name: str, buffer: Tensor) -> int:
        """Under which a variant knows a buffer: by the script's own tensor, where that has been swapped for a clone."""
        buffers = compat.buffers_of(owner)
        own = (known for known, (place, key) in self.stand_ins.items() if place is buffers and key == name)
        return next(own, id(buffer))

    def leave(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._keeper.restore()

    def swap_parameter(self, owner: nn.Module, name: str, value: Tensor) -> None:
        """Let `owner` use another parameter until `leave()`."""
        self._swap(compat.parameters_of(owner), name, value)

    def swap_buffer(self, owner: nn.Module, name: str, value: Tensor) -> None:
        """Let `owner` use another buffer until `leave()`."""
        self._swap(compat.buffers_of(owner), name, value)

    def swap_attribute(self, owner: nn.Module, name: str, value: Any) -> None:
        """Let `owner` have another plain attribute until `leave()`."""
        self._swap(owner.__dict__, name, value)

    def given(self, tree: Any) -> Any:
        """A call's arguments, with the script's own objects in them holding what they held before the call."""
        if isinstance(tree, GivenObject):
            self._keeper.keep(tree.thing)
            for holder, before in tree.places.holders:
                self._undo.append(functools.partial(_refill, holder, holder.copy()))
                _refill(holder, before)
            for (holder, name, _), value in zip(tree.places.found, tree.values, strict=True):
                holder[name] = value
            return tree.thing
        if type(tree) is dict:
            return {key: self.given(value) for key, value in tree.items()}
        return type(tree)(self.given(value) for value in tree) if type(tree) in (list, tuple) else tree

    def _fits(self, buffer: Tensor) -> bool:
        """Whether there is room left for the clone of a buffer that calls leave alone, as far as is known."""
        self._cloned += buffer.numel() if id(buffer) not in self._clones else 0
        return self._cloned <= MAX_ELEMENTS

    def _clone_of(self, buffer: Tensor) -> Tensor:
        """One clone for a buffer that hangs in several places."""
        known = self._clones.get(id(buffer))
        if known is None:
            known = self._clones[id(buffer)] = buffer.clone()
        return known

    def _bind(self, saved: SavedAttribute) -> None:
        """Let a name stand for what it stood for before the call."""
        now = saved.owner.get(saved.name, ABSENT)
        _put(saved.owner, saved.name, saved.value)
        self._undo.append(lambda: _put(saved.owner, saved.name, now))

    def _swap(self, place: dict[str, Any], name: str, value: Any) -> None:
        original = place.get(name)
        place[name] = value
        self._undo.append(lambda: place.__setitem__(name, original))

    def _keep_module(self, module: nn.Module) -> None:
        """All that a call of the module can change: its attributes, what its methods and its hooks reach, its weights."""
        attributes, keeper = module.__dict__, self._keeper
        is_users = not type(module).__module__.startswith("torch.nn")
        if is_users:
            keeper.keep_attributes(attributes)
            keeper.keep_class(module.function if isinstance(module, Applied) else type(module))
            for name, value in list(attributes.items()):  # a tensor that is written to in place: let it be a clone
                if isinstance(value, Tensor) and value.numel() <= MAX_ATTRIBUTE_COPY and not value.requires_grad:
                    attributes[name] = copy = value.clone()
                    self.attributes.append((attributes, name, copy, value))
        else:
            before = dict(attributes)
            self._undo.append(lambda: _put_back(attributes, before))
            for name, value in before.items():  # what a hook has hung on it
                if isinstance(value, CONTAINERS) and name not in OWN_ATTRIBUTES:
                    keeper.keep(value)
        for parameter in compat.parameters_of(module).values():
            if parameter is not None:
                keeper.keep_tensor(parameter)  # `.data` can be written to
                keeper.keep_attributes(parameter.__dict__)  # gradients of each sample, say
        buffers = compat.buffers_of(module)
        names = dict(buffers)
        self._undo.append(lambda: _put_back(buffers, names))
        for hook in compat.hooks_of(module):
            keeper.keep(hook)


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        place.pop(name, None)
    else:
        place[name] = value


def _refill(holder: Holder, contents: Any) -> None:
    """Give a dictionary or list these contents."""
    holder.clear()
    if isinstance(holder, list):
        holder.extend(contents)
    else:
        holder.update(contents)


def _put_back(entries: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [n for n in entries if n not in before]:
        del entries[name]
    entries.update(before)
