"""Modules of a model, made to run in float32 from outside.

A module gets a class of its own, derived from its old one, as `torch.nn.utils.parametrize` does it. So it stays
itself under `deepcopy` (a copy for an average of the weights runs its own weights), `pickle` and `torch.compile`.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ampguard import compat
from ampguard.engine.casting import tensors_in
from ampguard.engine.force_fp32.low_weights import low_weights_of, on_float32_casts
from ampguard.engine.force_fp32.region import call_in_fp32
from ampguard.engine.patterns import matching_modules
from ampguard.errors import PatternError
from ampguard.numerics import is_low_precision


class _Way(NamedTuple):
    """What a forced module does with its results, and whether its copies are forced too."""

    cast_back: bool
    copies_too: bool
    without_floats: torch.dtype | None


class ForcedModules:
    """The modules that were changed; `undo()` gives them their classes back. Also a context manager."""

    def __init__(
        self,
        modules: dict[str, nn.Module],
        cast_back: bool = True,
        copies_too: bool = True,
        without_floats: torch.dtype | None = None,
    ) -> None:
        """`copies_too=False`: copies and pickles of the modules have their old classes.

        `without_floats`: the type of results of modules whose inputs hold no floats, where that is to be a low one.
        """
        self._modules: list[weakref.ref[nn.Module]] = []
        """A model that nobody trains any more is not kept for this."""
        self.names = tuple(modules)
        for name, module in modules.items():
            if not is_forced(module):
                _change_class(name, module, _Way(cast_back, copies_too, without_floats))
                _holders[module] = 0
            _holders[module] = _holders.get(module, 1) + 1  # a copy of a forced module is so by itself
            self._modules.append(weakref.ref(module))

    @property
    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def never_ran(self) -> bool:
        """Whether none of them was called so far, nor a replica of one. What was compiled is not seen."""
        return not any(module in _ran or type(module) in _ran_as_replicas for module in self.modules)

    @property
    def met_low_precision(self) -> bool:
        """Whether autocast was on in a call of one of them, or its inputs or its weights were in a low precision."""
        return any(module in _met_low or type(module) in _ran_as_replicas for module in self.modules)

    def undo(self) -> None:
        """As they were; what others have forced as well stays in float32 until they undo it, too."""
        for module in self.modules:
            if not is_forced(module):
                continue
            left = _holders.pop(module, 1) - 1
            if left > 0:
                _holders[module] = left
            else:
                module.__class__ = type(module).__mro__[1]
        self._modules = []

    def __enter__(self) -> ForcedModules:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.undo()


def force_modules(model: nn.Module, patterns: Iterable[str], cast_back: bool = True) -> ForcedModules:
    """Make the modules whose paths match run in float32, in training and in evaluation alike."""
    return ForcedModules(matching_modules(model, patterns), cast_back)


def is_forced(module: nn.Module) -> bool:
    return "_ampguard_cast_back" in vars(type(module))


def _change_class(name: str, module: nn.Module, way: _Way) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise PatternError(
            f"`{name}` is a TorchScript module: its forward pass cannot be changed from outside\n"
            "  do    force the Python module around it, or script it after this call"
        )
    try:
        module.__class__ = _forced_class(type(module), way)
    except TypeError as error:
        raise PatternError(
            f"`{name}` ({type(module).__name__}) cannot be changed: {error}\n"
            "  do    put @ampguard.force_fp32 on its forward method instead"
        ) from error


_holders: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""How many hold a module in float32. Copies of forced modules are in none of these counts."""
_ran: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Forced modules whose forward pass was called."""
_met_low: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Of these, those that had something to leave."""
_ran_as_replicas: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()


def _note_call(module: nn.Module, args: Any, kwargs: Any, way: _Way) -> None:
    if compat.is_replica(module):
        _ran_as_replicas.add(type(module))
        return
    _ran.add(module)
    if module not in _met_low and (
        way.without_floats is not None
        or compat.is_any_autocast_on()
        or any(is_low_precision(tensor.dtype) for tensor in tensors_in((args, kwargs)))
        or any(is_low_precision(parameter.dtype) for parameter in module.parameters())
    ):
        _met_low.add(module)


_classes: dict[tuple[type[nn.Module], _Way], type[nn.Module]] = {}


def _forced_class(original: type[nn.Module], way: _Way) -> type[nn.Module]:
    key = (original, way)
    if key not in _classes:
        _classes[key] = _make_class(*key)
    return _classes[key]


def _make_class(original: type[nn.Module], way: _Way) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _note_call(self, args, kwargs, way)
        run = functools.partial(original.forward, self)
        low = low_weights_of(self)
        if low is None:
            return call_in_fp32(run, args, kwargs, way.cast_back, way.without_floats)
        with on_float32_casts(self):
            return call_in_fp32(run, args, kwargs, way.cast_back, way.without_floats or low)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        made = super(type(self), self).__reduce_ex__(protocol)
        if isinstance(made, tuple) and made[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            if not way.copies_too:
                return (copyreg._reconstructor, (original, object, None), *made[2:])  # type: ignore[attr-defined]
            return (_rebuild, (original, way.cast_back, way.without_floats), *made[2:])
        return made

    body = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_ampguard_cast_back": way.cast_back,
    }
    return type(original.__name__, (original,), body)


def _rebuild(original: type[nn.Module], cast_back: bool, without_floats: torch.dtype | None = None) -> nn.Module:
    forced = _forced_class(original, _Way(cast_back, True, without_floats))
    return forced.__new__(forced)
