"""What surrounds a root call: the random streams, the thread's modes, where the module hangs."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from ampguard import compat
from ampguard.capture.frames import locals_of
from ampguard.capture.record import Modes, RngStates, RootCall, cuda_rng_states
from ampguard.capture.root_calls.bymodule import ByModule

RECHECK_DRAWS = 64
"""Calls of a module after which it is looked again from which random streams they draw."""

FIRST_DRAWS = 3
"""Calls at the beginning that are all looked at."""

FROM_NOTHING = RngStates(None, (), None, None)
"""Of a call that draws from no stream."""


AUTOCAST_DEVICES = ("cpu", "cuda")
"""Types of devices whose regions of autocast are known here."""


def devices_in_use() -> tuple[str, ...]:
    """Those of them that this process uses."""
    return AUTOCAST_DEVICES if torch.cuda.is_initialized() else AUTOCAST_DEVICES[:1]


def is_autocast_on() -> bool:
    """Whether this thread is in a region of autocast that is switched on, for whichever of them."""
    return any(torch.is_autocast_enabled(device) for device in AUTOCAST_DEVICES)


@dataclass(slots=True)
class _Draws:
    """From which random streams a module's calls draw."""

    torch: bool = True
    others: bool = True
    calls: int = 0
    is_asked_again: bool = False

    @property
    def is_looked_at(self) -> bool:
        return self.calls <= FIRST_DRAWS or self.calls % RECHECK_DRAWS == 0 or self.is_asked_again


class RandomStreams:
    """Saves the random streams that a module's calls have been seen to draw from: saving all of them costs."""

    def __init__(self) -> None:
        self._draws: dict[tuple[int, bool], _Draws] = {}

    def before_call(self, module: nn.Module, training: bool, again: bool = False) -> RngStates:
        """Where the random streams stand; without those that calls of this module do not draw from.

        `again`: look from which they draw, as in the first calls.
        """
        key = (id(module), training)
        draws = self._draws.get(key)
        if draws is None:
            draws = self._draws[key] = _Draws()
        draws.calls += 1
        draws.is_asked_again = again
        if draws.is_looked_at:
            draws.torch = draws.others = True
        cuda = cuda_rng_states() if compat.HAS_CUDA and compat.cuda_is_in_use() else ()
        if not (draws.torch or draws.others or cuda):
            return FROM_NOTHING
        numpy = sys.modules.get("numpy") if draws.others else None
        return RngStates(
            torch.default_generator.get_state() if draws.torch else None,
            cuda,
            random.getstate() if draws.others else None,
            numpy.random.get_state(legacy=True) if numpy is not None and hasattr(numpy, "random") else None,
        )

    def after_call(self, root: RootCall) -> None:
        """Note which streams the call drew from."""
        if root.rng is FROM_NOTHING:
            return
        draws = self._draws.get((id(root.module), root.training))
        if draws is None:
            return
        if root.rng.python is not None:
            numpy = sys.modules.get("numpy")
            draws.others = random.getstate() != root.rng.python or (
                numpy is not None and root.rng.numpy is not None and not _same_numpy(numpy, root.rng.numpy)
            )
        if draws.is_looked_at and root.rng.torch_cpu is not None:
            draws.torch = not torch.equal(root.rng.torch_cpu, torch.default_generator.get_state())


def _same_numpy(numpy: Any, state: Any) -> bool:
    now = numpy.random.get_state(legacy=True)
    return now[2] == state[2] and bool((now[1] == state[1]).all())


_known_modes: dict[tuple[Any, ...], Modes] = {}


def current_modes() -> Modes:
    """The calling thread's modes."""
    key: tuple[Any, ...] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    if compat.HAS_CUDA and compat.cuda_is_in_use():
        key = (*key, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    try:
        return _known_modes[key]
    except KeyError:
        autocast = tuple((device, *key[i : i + 2]) for device, i in (("cpu", 2), ("cuda", 4)) if i < len(key))
        known = _known_modes[key] = Modes(key[0], key[1], autocast)
        return known


_known_without_autocast: dict[tuple[bool, bool, bool], Modes] = {}


def modes_of_function() -> Modes:
    """The same, for the call of a function, which is not asked for the type of an autocast that is off: at a third of the
    cost."""
    if compat.is_any_autocast_on():
        return current_modes()
    key = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), compat.HAS_CUDA and compat.cuda_is_in_use())
    try:
        return _known_without_autocast[key]
    except KeyError:
        known = _known_without_autocast[key] = current_modes()
        return known


def _set_autocast(states: Iterable[tuple[str, bool, torch.dtype]]) -> None:
    for device, enabled, dtype in states:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def _autocast_as(states: Iterable[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d, _, _ in states]
    _set_autocast(states)
    try:
        yield
    finally:
        _set_autocast(before)


@contextlib.contextmanager
def modes_of(modes: Modes) -> Iterator[None]:
    """The modes in which an event ran. Inference mode is replayed as `no_grad`: the same kernels, more to see."""
    with _autocast_as(modes.autocast), torch.set_grad_enabled(modes.grad and not modes.inference):
        yield


def casting_for(types: Iterable[tuple[str, torch.dtype]]) -> contextlib.AbstractContextManager[None]:
    """Autocast to these types on these devices."""
    return _autocast_as([(device, True, dtype) for device, dtype in types])


class Prefixes:
    """Where each root module hangs in the module whose method called it (`self.encoder(x)` in a LightningModule)."""

    def __init__(self) -> None:
        self._known: ByModule[str] = ByModule()

    def of(self, module: nn.Module, frame: Any) -> str:
        known = self._known.get(module)
        if known is None:
            known = self._known.put(module, find_prefix(module, frame))
        return known


def find_prefix(module: nn.Module, frame: Any) -> str:
    """The dotted path of `module` from the nearest calling method's own module, "" where there is none.

    A wrapper (DistributedDataParallel) whose `forward` was called past its hooks gives no name.
    """
    depth = 0
    while frame is not None and depth < 12:
        owner = _owner_of(frame)
        if isinstance(owner, nn.Module) and owner is not module and compat.is_built(owner):
            name, _ = compat.named_modules_of_user(owner).get(id(module), ("", module))
            if name:
                return name
        frame = frame.f_back
        depth += 1
    return ""


def _owner_of(frame: FrameType) -> Any:
    """Whose method runs in a frame: what it calls `self`, or by another name the first argument of a method of its class."""
    code = frame.f_code
    if not code.co_argcount:
        return None
    first = code.co_varnames[0]
    owner = locals_of(frame).get(first)
    if first == "self":
        return owner
    method = inspect.getattr_static(type(owner), code.co_name, None)
    return owner if inspect.isfunction(method) and inspect.unwrap(method).__code__ is code else None
