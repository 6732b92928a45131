"""The whole weights of a model that `fully_shard` has spread over ranks, for a replay on this rank alone.

A forward pass cannot be run again by one rank: the parameters would have to be gathered, and the other ranks are
elsewhere. But the backward pass of the same step gathers them once more, on all ranks, and the weights are still those of
the forward pass. So after a failure they are copied as they come by, and nobody is asked for anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.capture.sampling.memory import available_bytes

COPIES = 3
"""How often the whole weights have to fit into the memory that is left: the copy, and what a replay makes of it."""

Places = list[tuple[nn.Module, str]]


class WholeWeights:
    """Copies of the parameters of sharded modules, complete once every group of them has been gathered."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        states = [state for module in modules for state in compat.fsdp_states(module)]
        self._states = list({id(state): state for state in states}.values())
        groups = [group for state in self._states for group in compat.fsdp_groups(state)]
        self._groups = groups
        self._undo: list[tuple[Any, Any]] = []
        self._copies: dict[int, list[tuple[Places, nn.Parameter]]] = {}
        self._whole: dict[int, nn.Parameter] = {}
        """The copies, by the identity of the part that an optimizer holds."""
        self.problem = self._obstacle()
        """Why the weights cannot be had, where that is known."""

    @property
    def is_complete(self) -> bool:
        return self.problem is None and len(self._copies) == len(self._groups)

    @property
    def survive_updates(self) -> bool:
        """Whether what is still missing is frozen: the next forward pass gathers it, if the backward pass has not."""
        return self.problem is None and not any(
            compat.fsdp_trains(g) for g in self._groups if id(g) not in self._copies
        )

    def of(self, parameter: Tensor) -> Tensor:
        """The whole of a parameter of which an optimizer holds a part; any other as it is."""
        return self._whole.get(id(parameter), parameter)

    def begin(self) -> None:
        """Copy what is gathered now, and from here on each group when it is."""
        for group in self._groups:
            if group.is_unsharded:
                self._copy(group)
            if id(group) not in self._copies:
                before = vars(group).get("wait_for_unshard")
                self._undo.append((group, before))
                group.wait_for_unshard = self._and_copy(group, group.wait_for_unshard)

    def end(self) -> None:
        """Copy nothing more. Of several that copy from the same groups, the last that began ends first."""
        for group, before in self._undo:
            del group.wait_for_unshard
            if before is not None:
                group.wait_for_unshard = before
        self._undo.clear()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the modules are what they were before `fully_shard`, with the copies for parameters."""
        undo: list[Callable[[], None]] = []
        try:
            for places, whole in (copy for copies in self._copies.values() for copy in copies):
                for owner, name in places:
                    _put(compat.parameters_of(owner), name, whole, undo)
            for state in self._states:
                for _, hooks, key, is_before in compat.fsdp_hooks(state):
                    _put(hooks, key, _without_gathering(state, is_before), undo)
            for module in {id(m): m for root in self._modules for m in compat.all_modules(root)}.values():
                _become(module, compat.before_fully_shard(module), undo)
            yield
        finally:
            for each in reversed(undo):
                each()

    def _and_copy(self, group: Any, original: Callable[[], None]) -> Callable[[], None]:
        def wait_for_unshard() -> None:
            original()
            with contextlib.suppress(Exception):  # the script's own backward pass goes on, whatever becomes of the copy
                if group.is_unsharded and id(group) not in self._copies:
                    self._copy(group)

        return wait_for_unshard

    def _copy(self, group: Any) -> None:
        copies = []
        for places, whole, part in compat.fsdp_parameters(group):
            if type(whole) is not nn.Parameter:
                self.problem = "a gathered parameter is still a part, or of a type of its own"
                return
            with torch.no_grad():
                copy = nn.Parameter(whole.detach().clone(), requires_grad=whole.requires_grad)
            copies.append((places, copy))
            self._whole[id(part)] = copy
        self._copies[id(group)] = copies

    def _obstacle(self) -> str | None:
        if not self._groups:
            return "only what fully_shard (FSDP2) has spread over ranks is gathered in a way that can be followed"
        for state in self._states:
            policy, hooks = compat.fsdp_precision(state), compat.fsdp_hooks(state)
            if policy is None or not hooks:
                return "this PyTorch does not say how it gathers parameters"
            if len({id(module) for module, *_ in hooks}) > 1 and (policy.param_dtype or policy.output_dtype):
                return "several modules that are sharded together cast what they are given"
        shards = {id(p): p for module in self._modules for p in compat.all_parameters(module)}.values()
        size = sum(p.numel() * p.element_size() for p in shards)
        left = available_bytes([compat.local_part(p) for p in shards])
        if left is not None and COPIES * size > left:
            return f"the whole model has {size / 2**30:.1f} GiB, and {left / 2**30:.1f} GiB of memory are left"
        return None


def _without_gathering(state: Any, is_before: bool) -> Callable[..., Any]:
    """What is left of FSDP's hook where nothing has to be gathered: to its device, and the casts of mixed precision."""
    policy, device = compat.fsdp_precision(state), compat.fsdp_input_device(state)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        wanted = policy.param_dtype if policy.cast_forward_inputs else None
        return tuple(_brought(tree, device, wanted) for tree in (args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return _brought(output, None, policy.output_dtype)

    return before if is_before else after


def _brought(tree: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    def one(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return tree if device is None and dtype is None else map_tensors(tree, one)


def _put(place: Any, name: Any, value: Any, undo: list[Callable[[], None]]) -> None:
    before = place[name]
    place[name] = value
    undo.append(lambda: place.__setitem__(name, before))


def _become(module: nn.Module, kind: type, undo: list[Callable[[], None]]) -> None:
    before = type(module)
    if kind is before:
        return
    module.__class__ = kind
    undo.append(lambda: setattr(module, "__class__", before))
