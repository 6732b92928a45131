"""Calling a root module again: in its old state, or with the parameters and buffers that a variant asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.operands import leaves
from ampguard.capture.record import Held, Ref, RootCall
from ampguard.capture.root_calls.surroundings import modes_of
from ampguard.capture.root_calls.trees import map_tensors, named_tensors_in
from ampguard.replay.arguments import Values, low_to, map_leaves
from ampguard.replay.casts import WeightCasts
from ampguard.replay.sandbox import ModuleSandbox, set_streams
from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import Variant

Swap = Callable[[ModuleSandbox, nn.Module, Variant, Values], None]


def left_by(root: RootCall) -> list[Tensor]:
    """What the call has left in the attributes in which it left results when the step ran, up to one that holds none now."""
    found: list[Tensor] = []
    for owner, name in root.left:
        value = owner.get(name)
        if not isinstance(value, Tensor):
            break
        found.append(value)
    return found


def run_root(
    root: RootCall,
    values: Values,
    variant: Variant,
    casts: WeightCasts,
    sandboxes: contextlib.ExitStack,
    keeps_graph: bool,
    swap: Swap,
) -> list[Tensor]:
    """Call a root module as the step called it, with what the variant changes. Returns the tensors of its result.

    `swap` gives the module the parameters and buffers that it is to have. It is put back when `sandboxes` is closed; at
    once where no gradients are replayed.
    """
    module, mode = root.module, values.mode
    device: torch.device | None = None
    if compat.is_parallel(module):
        device = compat.takes_inputs_to(module)
        module = compat.unwrapped(module)
    sandbox = ModuleSandbox(root, module)
    sandbox.enter()
    training = getattr(module, "training", root.training)
    sandboxes.callback(sandbox.leave)
    try:
        swap(sandbox, module, variant, values)
        _swap_called_state(sandbox, root, values, variant)
        for saved in root.buffers:
            now = saved.owner.get(saved.name)
            if now is not None and now is not saved.tensor:
                mode.stand_ins[compat.storage_key(now)] = (now, saved.tensor)
        for _, _, copy, original in sandbox.attributes:
            mode.stand_ins[compat.storage_key(copy)] = (copy, original)
        args = values.for_module(root.args, grad=root.modes.grad)
        kwargs = values.for_module(root.kwargs, grad=root.modes.grad)
        args, kwargs = sandbox.given(args), sandbox.given(kwargs)
        if device is not None:
            args, kwargs = (map_tensors(tree, lambda t: _on(device, t, mode)) for tree in (args, kwargs))
        if variant.convert is not None:
            args, kwargs = (map_tensors(tree, lambda t: low_to(t, variant.convert)) for tree in (args, kwargs))
        if training != root.training:
            module.train(root.training)
        set_streams(root.rng)
        with casts.of_call(root), modes_of(root.modes), mode, compat.asking_classes():
            output = module(*args, **kwargs)
        for identity, (owner, name) in sandbox.stand_ins.items():
            tensor = owner.get(name)
            if tensor is not None:
                values.stand_ins[identity] = tensor
        named = named_tensors_in(output)
        values.names |= {Ref(root.index, position): name for position, (name, _) in enumerate(named)}
        return [tensor for _, tensor in named] + left_by(root)
    finally:
        if training != root.training:
            module.train(training)
        if not keeps_graph:  # else a backward pass may run parts of the module again
            sandbox.leave()


def _on(device: torch.device, tensor: Tensor, mode: ReplayMode) -> Tensor:
    """An input where the wrapper that is left out would take it."""
    moved = tensor.to(device)
    if moved is not tensor:
        mode.stand_ins[compat.storage_key(moved)] = (moved, tensor)
    return moved


def _swap_called_state(sandbox: ModuleSandbox, root: RootCall, values: Values, variant: Variant) -> None:
    """The parameters and buffers that `torch.func.functional_call` ran the module on, or that were computed for it."""
    for path, value in _called_state(root, values).items():
        owner_path, _, name = path.rpartition(".")
        owner = root.module.get_submodule(owner_path)
        value = map_tensors(value, lambda t: low_to(t, variant.convert))
        weight = compat.parameters_of(owner).get(name) if root.is_rewritten else None
        if weight is not None:
            value = values.stand_ins[id(weight)] = value.detach().requires_grad_(weight.requires_grad)
        if name in compat.parameters_of(owner):
            sandbox.swap_parameter(owner, name, value)
        elif name in compat.buffers_of(owner):
            sandbox.swap_buffer(owner, name, value)
        elif name in owner.__dict__:
            sandbox.swap_attribute(owner, name, value)


def _called_state(root: RootCall, values: Values) -> dict[str, Any]:
    """By its place; what stands in several places (a weight, and the list in which it is kept) is one tensor there, too."""
    given = {_key(leaf): leaf for leaf in leaves(root.swapped_state) if isinstance(leaf, (Ref, Held))}
    made = values.for_module(given, grad=root.modes.grad)
    state: dict[str, Any] = map_leaves(root.swapped_state, lambda leaf: made[_key(leaf)])
    return state


def _key(leaf: Ref | Held) -> Ref | int:
    return leaf if isinstance(leaf, Ref) else id(leaf.tensor)


def swap_state(sandbox: ModuleSandbox, module: nn.Module, variant: Variant, values: Values) -> None:
    """Give the module the parameters and buffers that the variant asks for."""
    if variant.convert is None and not variant.tensors and not variant.force_fp32:
        return
    forced = {
        id(inner)
        for outer in compat.all_modules(module)
        if id(outer) in variant.force_fp32
        for inner in compat.all_modules(outer)
    }
    for owner in compat.all_modules(module):
        if isinstance(owner, torch.jit.ScriptModule):
            continue
        wide = torch.float32 if id(owner) in forced else variant.convert
        for name, parameter in list(compat.parameters_of(owner).items()):
            if parameter is not None:
                _swap_parameter(sandbox, owner, name, parameter, wide, values)
        for name, buffer in list(compat.buffers_of(owner).items()):
            if buffer is None:
                continue
            other = low_to(variant.tensors.get(sandbox.identity_of(owner, name, buffer), buffer), wide)
            if other is not buffer:
                sandbox.swap_buffer(owner, name, other)
    for attributes, name, _, original in sandbox.attributes:
        if id(original) in variant.tensors:
            attributes[name] = variant.tensors[id(original)]


def _swap_parameter(
    sandbox: ModuleSandbox,
    owner: nn.Module,
    name: str,
    parameter: Tensor,
    dtype: torch.dtype | None,
    values: Values,
) -> None:
    known = values.stand_ins.get(id(parameter))
    if known is not None:  # tied weights, or a module that is called twice
        sandbox.swap_parameter(owner, name, known)
        return
    value = low_to(values.replaced.get(id(parameter), parameter), dtype)
    if value is not parameter:
        other = nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
        values.stand_ins[id(parameter)] = other
        sandbox.swap_parameter(owner, name, other)


@contextlib.contextmanager
def traced_modules(mode: ReplayMode) -> Iterator[None]:
    """Every module call of the replay goes through the mode, so that it knows where it is."""
    current = nn.Module.__call__

    def with_classes(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with compat.asking_classes():
            return current(module, *args, **kwargs)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not compat.asked_classes:
            return mode.call_module(current, self, args, kwargs)
        with compat.past_classes():
            return mode.call_module(with_classes, self, args, kwargs)

    nn.Module.__call__ = __call__  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = current  # type: ignore[method-assign]
