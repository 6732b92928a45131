"""Several ranks: DDP, FSDP2, sharded tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from ampguard.compat.members import all_modules, all_parameters, named_parameters


def needs_other_ranks(module: torch.nn.Module) -> bool:
    """Whether a call of the module gathers parameters from other ranks: FSDP of either kind, tensor parallelism."""
    if "torch.distributed.tensor" not in sys.modules and "torch.distributed.fsdp" not in sys.modules:
        return False
    kinds = _sharding_modules()
    sharded = any(isinstance(inner, kinds) for inner in all_modules(module)) if kinds else False
    return sharded or any(hasattr(p, "_local_tensor") for p in all_parameters(module))


def sharded_compute_dtypes(module: torch.nn.Module) -> set[torch.dtype]:
    """The types that FSDP casts parameters to before it computes, which the parameters themselves do not show."""
    return {dtype for _, dtype in _sharding_policies(module)}


def sharding_policy(module: torch.nn.Module) -> str | None:
    """What FSDP calls the policy by which it casts parameters before it computes; None where it casts none."""
    return next((name for name, _ in _sharding_policies(module)), None)


def _sharding_policies(module: torch.nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """The class of each FSDP module's policy, and the type that parameters are cast to by it; also while `fully_shard` is
    undone for a replay."""
    kinds = _sharding_modules()
    policies = [fsdp_precision(state) for state in fsdp_states(module)]
    policies += [getattr(inner, "mixed_precision", None) for inner in all_modules(module) if isinstance(inner, kinds)]
    for policy in policies:
        dtype = getattr(policy, "param_dtype", None)
        if isinstance(dtype, torch.dtype):
            yield type(policy).__name__, dtype


def _sharding_modules() -> tuple[type, ...]:
    """FSDP's kinds of module, where the script has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel"))
    return tuple(kind for kind in kinds if kind is not None)


def distributed_is_on() -> bool:
    """Whether this process has joined a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return distributed_is_on() and torch.distributed.get_world_size() > 1


def collective_timeout() -> float | None:
    """Seconds after which the default process group gives a collective up; None where that is not known."""
    if not several_ranks():
        return None
    try:
        group = torch.distributed.group.WORLD
        backend = group._get_backend(torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu"))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except Exception:  # another backend, another release
        return None


def replicated_by(ddp: torch.nn.parallel.DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]] | None:
    """The parameters that DDP keeps the same on every rank; None where it does not promise to.

    It does not under `join` (ranks that have run out of data fall behind) and with post-local SGD, where ranks go their
    own ways between averages.
    """
    join = getattr(ddp, "_join_config", None)
    hooks = getattr(ddp, "_comm_hooks", ())
    if getattr(join, "enable", False) or any(type(state).__name__ == "PostLocalSGDState" for _, state in hooks):
        return None
    ignored = getattr(ddp, "parameters_to_ignore", ())
    named = named_parameters(ddp.module).items()
    return [(n, p) for n, p in named if p.requires_grad and n not in ignored and not hasattr(p, "_local_tensor")]


def counts_on_this_rank(tensor: torch.Tensor) -> bool:
    """Whether this rank adds its part, where ranks add up a tensor and every element is to be counted once.

    Of a whole tensor the first rank does, of one that is spread every rank, and of its copies the first.
    """
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return not several_ranks() or torch.distributed.get_rank() == 0
    here = mesh.get_coordinate()
    return here is not None and all(
        at == 0 or not kind.is_replicate() for kind, at in zip(placements, here, strict=True)
    )


def averaged_last_gradients(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether DDP's last call was followed by an all-reduce: not so under `no_sync()`."""
    return bool(getattr(ddp, "require_forward_param_sync", True))


def is_called_by_norm(frame: FrameType) -> bool:
    """Whether it is SyncBatchNorm that calls a collective, of whose caller this is the frame."""
    return frame.f_globals.get("__name__") == "torch.nn.modules._functions"


def fsdp_states(module: torch.nn.Module) -> list[Any]:
    """What `fully_shard` keeps for the modules under one; empty where PyTorch does not say."""
    known = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state_of = getattr(known, "_get_module_fsdp_state", None)
    found = [state_of(inner) for inner in all_modules(module)] if state_of is not None else []
    return list({id(state): state for state in found if state is not None}.values())


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that are gathered together: each has `wait_for_unshard()` and `is_unsharded`."""
    groups = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None) if groups is None else None
    found = list(groups) if groups is not None else [one] if one is not None else []
    return [group for group in found if hasattr(group, "wait_for_unshard") and hasattr(group, "is_unsharded")]


def fsdp_parameters(group: Any) -> list[tuple[list[tuple[torch.nn.Module, str]], Any, Any]]:
    """Of a group that is gathered now: each parameter in full, with every (module, name) where it hangs, and the part that
    an optimizer holds."""
    found = []
    for kept in group.fsdp_params:
        info = kept._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        found.append(([(info.module, info.param_name), *shared], kept._unsharded_param, kept.sharded_param))
    return found


def fsdp_trains(group: Any) -> bool:
    """Whether an optimizer may change any parameter of the group."""
    return any(kept.sharded_param.requires_grad for kept in group.fsdp_params)


def fsdp_hooks(state: Any) -> list[tuple[torch.nn.Module, dict[int, Any], int, bool]]:
    """The hooks around forward that gather and cast: module, the dictionary and the key of each, and if it runs before."""
    both = (getattr(state, "_pre_forward_hook_handle", None), getattr(state, "_post_forward_hook_handle", None))
    handles = {id(one): one for handle in both for one in getattr(handle, "handles", (handle,)) if one is not None}
    places = [
        (module, hooks, is_before)
        for module in getattr(state, "_modules", ())
        for hooks, is_before in ((module._forward_pre_hooks, True), (module._forward_hooks, False))
    ]
    return [(m, hooks, h.id, first) for h in handles.values() for m, hooks, first in places if h.id in hooks]


def fsdp_precision(state: Any) -> Any:
    """The `MixedPrecisionPolicy` of a module given to `fully_shard`; None where it is not known."""
    return getattr(state, "_mp_policy", None)


def fsdp_input_device(state: Any) -> torch.device | None:
    """Where the outermost module given to `fully_shard` puts its inputs first; None where it leaves them."""
    device = getattr(state, "_device", None) if getattr(state, "_is_root", False) else None
    return device if device is not None and device.type != "cpu" else None


def before_fully_shard(module: torch.nn.Module) -> type:
    """The class that a module had before `fully_shard` gave it another."""
    kind = type(module)
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is None or not isinstance(module, sharded):
        return kind
    return next((base for base in kind.__bases__ if base is not sharded), kind)


def communication_hooks(ddp: torch.nn.parallel.DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """What sends DDP's gradients instead of its own all-reduce, each with its state; the C++ hook as its Python twin."""
    hooks = list(getattr(ddp, "_comm_hooks", ()))
    facts: dict[str, Any] = getattr(ddp, "_get_ddp_logging_data", dict)()
    if not hooks and str(facts.get("comm_hook", "")).endswith("FP16_COMPRESS"):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        hooks.append((fp16_compress_hook, ddp.process_group))
    return hooks
