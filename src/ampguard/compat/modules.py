"""Modules: their own parts, wrappers, and how they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

import torch

from ampguard.compat.members import children_of, parameters_of

MODULE_BACKWARD_HOOK: type | None = getattr(torch.utils.hooks, "BackwardHook", None)
"""Made in each call of a module that has full backward hooks, with these hooks."""


def loader_iterators() -> list[type]:
    """The classes whose `__next__` fetches a batch."""
    base = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
    return [base] if base is not None else []


def parts_of_loader(iterator: object) -> tuple[object, object, bool]:
    """The data set and the function that makes a batch of its samples, and whether other processes do that."""
    data, collate = getattr(iterator, "_dataset", None), getattr(iterator, "_collate_fn", None)
    return data, collate, bool(getattr(iterator, "_num_workers", 0))


def is_replica(module: torch.nn.Module) -> bool:
    """Whether DataParallel has made it, for one call."""
    return bool(module.__dict__.get("_is_replica", False))


def hook_dictionaries(module: torch.nn.Module) -> list[dict[Any, Any]]:
    """The dictionaries themselves in which the module's own hooks stand."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hooks for name in names if (hooks := getattr(module, name, None)) is not None]


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Every hook of the module, and those on its parameters' gradients."""
    places: list[Any] = list(hook_dictionaries(module))
    places += [getattr(p, "_backward_hooks", None) for p in parameters_of(module).values() if p is not None]
    return [hook for hooks in places if hooks for hook in list(hooks.values())]


class Paused(Protocol):
    """Something that is out of the way at times."""

    paused: bool


def call_while_paused(
    watcher: Paused, original: Callable[..., Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """An `nn.Module.__call__` that does what PyTorch's `original` does while `watcher` is paused, without a second frame.

    A call inside another module then costs nothing. Every other call goes to `otherwise(module, *args, **kwargs)`.
    """
    call_impl, is_traced = torch.nn.Module._call_impl, _asks_for_tracing()
    before_backward, behind_backward, behind, before = _hooks_on_all_modules()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if watcher.paused:
            own = self.__dict__  # asked once: each attribute of a module is searched for in all of its classes first
            try:
                is_plain = not (
                    own["_backward_hooks"]
                    or own["_backward_pre_hooks"]
                    or own["_forward_hooks"]
                    or own["_forward_pre_hooks"]
                    or before_backward
                    or behind_backward
                    or behind
                    or before
                    or "_compiled_call_impl" in own
                    or "_call_impl" in own
                    or type(self)._call_impl is not call_impl
                    or is_traced()
                )
            except KeyError:
                is_plain = False
            if is_plain:
                return self.forward(*args, **kwargs)  # all that `_call_impl` does then
            return original(self, *args, **kwargs)
        return otherwise(self, *args, **kwargs)

    if not any(__call__.__code__ is known for known in _calls_of_ours):
        _calls_of_ours.append(__call__.__code__)
    return __call__


_calls_of_ours: list[CodeType] = []

_CALL_IMPL_BEGINS = (
    *("torch", "_C", None, "_slow_forward", "forward"),
    *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
    *("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_hooks", "_global_forward_pre_hooks"),
    "set",
)
"""What `Module._call_impl` asks before it calls `forward` and does nothing else, in this order. None: one of these."""

_TRACING = ("_get_tracing_state", "_is_tracing")
"""How PyTorch asks whether `torch.jit.trace` is at work: until 2.13, and since 2.15."""


def _asks_for_tracing() -> Callable[[], object]:
    """What `Module._call_impl` asks for it; where that is not known, `_call_impl` is always asked itself."""
    names = getattr(getattr(torch.nn.Module._call_impl, "__code__", None), "co_names", ())
    name = next((name for name in _TRACING if name in names), None)
    return getattr(torch._C, name, lambda: True) if name is not None else lambda: True


def _hooks_on_all_modules() -> tuple[Any, Any, Any, Any]:
    """The dictionaries of the hooks that stand on every module. Where `_call_impl` asks for more than we know of, one of
    them is never empty: it is then always asked itself.
    """
    module = sys.modules[torch.nn.Module.__module__]
    names = _CALL_IMPL_BEGINS[-5:-1]
    code = getattr(torch.nn.Module._call_impl, "__code__", None)
    asked = code.co_names[: len(_CALL_IMPL_BEGINS)] if code is not None else ()
    if tuple(None if name in _TRACING else name for name in asked) != _CALL_IMPL_BEGINS:
        return True, True, True, True
    first, second, third, fourth = (getattr(module, name, True) for name in names)
    return first, second, third, fourth


def functional_call() -> tuple[Any, str] | None:
    """Where `torch.func.functional_call` runs a module on other parameters than its own."""
    from torch.nn.utils import stateless

    return (stateless, "_functional_call") if hasattr(stateless, "_functional_call") else None


class StandingIn:
    """How many sets of our own casts stand in the places of weights at present: what is there is not the script's doing."""

    sets = 0


_HIDING = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""PyTorch's wrappers, each with the attribute behind which it hides the user's module."""


def is_wrapper(module: torch.nn.Module) -> str | None:
    """The attribute behind which `module` hides the user's module, or None where it is no wrapper."""
    if type(module).__module__.startswith("ampguard."):
        return getattr(type(module), "hides", None)
    for kind in type(module).__mro__:  # (mmcv's DistributedDataParallel is one of PyTorch's)
        if kind.__module__.startswith("torch.") and kind.__name__ in _HIDING:
            return _HIDING[kind.__name__]
    return None if type(module).__module__.startswith("torch.") else hidden_from_its_state(module)


def is_parallel(module: torch.nn.Module) -> bool:
    """Whether it is a `DataParallel` or a `DistributedDataParallel`, or a subclass of one."""
    kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.parallel.")]
    return not {"DistributedDataParallel", "DataParallel"}.isdisjoint(kinds)


def _hidden_by_name(module: torch.nn.Module) -> str | None:
    """`module`, where that is all a module consists of: other libraries' wrappers (Apex, DeepSpeed), and a script's own."""
    children = [key for key, child in module._modules.items() if child is not None]
    return "module" if children == ["module"] and not (module._parameters or module._buffers) else None


def named_modules_of_user(root: torch.nn.Module, prefix: str = "") -> dict[int, tuple[str, torch.nn.Module]]:
    """By identity: each module under `root` and its dotted name without any wrapper's prefix (`module.`, `_orig_mod.`).

    A module that hangs in two places has its first name.
    """
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    _name_modules(root, prefix, found)  # no closure: one that calls itself is garbage that keeps `found` for a while
    return found


def _name_modules(module: torch.nn.Module, name: str, found: dict[int, tuple[str, torch.nn.Module]]) -> None:
    if id(module) in found:
        return
    found[id(module)] = name, module
    hidden = is_wrapper(module) or _hidden_by_name(module)
    for key, child in children_of(module).items():
        if child is not None:
            _name_modules(child, name if key == hidden else f"{name}.{key}" if name else key, found)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module behind PyTorch's wrappers (`torch.compile`, DDP, DataParallel, checkpoint wrappers)."""
    while True:
        attribute = is_wrapper(module)
        if attribute is None:
            return module
        inner = getattr(module, attribute, None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def takes_inputs_to(wrapper: torch.nn.Module) -> torch.device | None:
    """The (first) device to which DataParallel or DistributedDataParallel takes its inputs; None where it leaves them.

    >>> takes_inputs_to(torch.nn.Linear(1, 1)) is None
    True
    """
    devices = getattr(wrapper, "device_ids", None)
    if not devices:
        return None
    return torch.device("cuda", devices[0]) if isinstance(devices[0], int) else torch.device(devices[0])


def only_forwards_to_call_impl(call: Any) -> bool:
    """Whether `nn.Module.__call__` does nothing but choose between `_compiled_call_impl` and `_call_impl`."""
    code = getattr(call, "__code__", None)
    return code is not None and code.co_names == ("_compiled_call_impl", "_call_impl")


def flat_weights_of(module: torch.nn.Module) -> dict[str, Any]:
    """The list of its parameters that a recurrent module keeps beside them."""
    return {key: value for key, value in vars(module).items() if key in ("_flat_weights", "_flat_weight_refs")}


def hidden_from_its_state(module: torch.nn.Module) -> str | None:
    """The attribute of the only child, where the module's own `state_dict` leaves it out of the names (Fabric's does)."""
    if type(module).state_dict is torch.nn.Module.state_dict or module._parameters or module._buffers:
        return None
    children = {key: child for key, child in module._modules.items() if child is not None}
    if not children or len({id(unwrapped(child)) for child in children.values()}) != 1:
        return None
    key, child = next(iter(children.items()))
    return key if module.state_dict().keys() == unwrapped(child).state_dict().keys() else None


def is_call_of_module(code: CodeType) -> bool:
    """Whether this is the code that calls a module's hooks and its forward."""
    return any(code is known for known in (getattr(torch.nn.Module._call_impl, "__code__", None), *_calls_of_ours))
