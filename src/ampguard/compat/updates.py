"""Optimizers, scalers and clipping."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

GRAD_SCALER = torch.amp.GradScaler
"""PyTorch's class. A script may put something else in its place (a function that makes one for another device)."""

UNSCALES = "_unscale_grads_"
"""The method of it that divides an optimizer's gradients, and is told whether they may be float16."""

_profiler_enabled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)

_skip_listeners: OrderedDict[int, Callable[[torch.optim.Optimizer], None]] = OrderedDict()


def optimizer_step_hooks() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`register_optimizer_step_pre_hook` and `..._post_hook`, global to all optimizers."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    return register_optimizer_step_pre_hook, register_optimizer_step_post_hook


def module_registration_hook() -> Callable[[Callable[..., None]], Any] | None:
    """`register_module_module_registration_hook`, global to all modules: called before one becomes a part of another."""
    module = sys.modules[torch.nn.Module.__module__]
    return getattr(module, "register_module_module_registration_hook", None)


def takes_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks around its step are called: not in a wrapper whose `__init__` does not call PyTorch's."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "_optimizer_step_post_hooks")


def loss_scale(scaler: object) -> torch.Tensor | None:
    """The scaler's scale where it lies, so that reading it is the caller's decision; None before its first use."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def grows_next(scaler: object) -> bool:
    """Whether the scaler's next update raises the scale, unless it finds Inf. Asked of scalers on the CPU only."""
    tracker, interval = getattr(scaler, "_growth_tracker", None), getattr(scaler, "_growth_interval", None)
    is_here = isinstance(tracker, torch.Tensor) and tracker.is_cpu and interval is not None
    return is_here and int(tracker) + 1 >= int(interval)  # type: ignore[arg-type]


def total_norm_function() -> tuple[Any, str] | None:
    """Where `clip_grad_norm_` looks up the function that measures the gradients."""
    from torch.nn.utils import clip_grad

    return next(((clip_grad, name) for name in ("_get_total_norm",) if hasattr(clip_grad, name)), None)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The optimizer's own `step`, without the global hooks that PyTorch wraps around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def held_scale(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The scale that a fused optimizer divides by itself, during the scaler's step."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


FOUND_INF = "found_inf"
"""The attribute in which a scaler leaves that flag."""


def held_found_inf(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The flag by which a fused optimizer skips its own step, during the scaler's step."""
    flag = getattr(optimizer, FOUND_INF, None)
    return flag if isinstance(flag, torch.Tensor) else None


def is_told_to_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler, in its step, told a fused optimizer on the CPU that it found Inf. Elsewhere it would wait."""
    flag = held_found_inf(optimizer)
    return flag is not None and flag.is_cpu and bool(flag.item())


def found_inf(scaler: object, optimizer: object) -> bool | None:
    """Whether the scaler found Inf in an optimizer's gradients since its last update; None where it has not looked."""
    states = getattr(scaler, "_per_optimizer_states", None)
    state = states.get(id(optimizer)) if states is not None else None
    found = state.get("found_inf_per_device") if state else None
    return any(bool(flag.item()) for flag in found.values()) if found else None


def unscales_as_it_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler leaves the division to the optimizer (a fused one)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def clipping_limit() -> float | None:
    """Called from inside `clip_grad_norm_`: its `max_norm`; None where the caller is another function."""
    frame: Any = sys._getframe(1)
    for _ in range(8):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_code.co_name == "clip_grad_norm_" and "max_norm" in frame.f_locals:
            return float(frame.f_locals["max_norm"])
    return None


def hook_attributes(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's attributes that hold hooks."""
    return [name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")]


def listen_to_skips(listener: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """Call `listener` with each optimizer whose step the engine leaves out, before its gradients are cleared."""
    handle = RemovableHandle(_skip_listeners)
    _skip_listeners[handle.id] = listener
    return handle


def tell_of_skip(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's gradients are not finite, and its `step` is not called: no hook of it says so."""
    for listener in tuple(_skip_listeners.values()):
        listener(optimizer)


def scaler_is_watched() -> bool:
    """Whether somebody has wrapped `GradScaler.step`: the guard, or another tool."""
    return hasattr(GRAD_SCALER.step, "__wrapped__")


def can_borrow_scaler() -> bool:
    """Whether GradScaler still asks the two methods that `BorrowedScaler` answers."""
    return all(hasattr(GRAD_SCALER, name) for name in (UNSCALES, "_maybe_opt_step"))


class BorrowedScaler(torch.amp.GradScaler):
    """A GradScaler whose public calls do what somebody else tells them: so that who watches GradScaler sees it happen."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._told: tuple[torch.Tensor, Callable[[], None]] | None = None
        self._folds = False

    def unscale_as(self, optimizer: torch.optim.Optimizer, found: torch.Tensor) -> None:
        """Announce that the gradients were divided, with this result."""
        self._told = (found, lambda: None)
        self.unscale_(optimizer)

    def rescale_as(self, optimizer: torch.optim.Optimizer) -> None:
        """Announce that gradients which were divided carry the scale again; who listens wraps this."""
        forget_optimizer(self, optimizer)

    def step_by(self, optimizer: torch.optim.Optimizer, found: torch.Tensor, apply: Callable[[], None]) -> None:
        """Announce a step; `apply` makes or skips it."""
        stepped_before = getattr(self._per_optimizer_states[id(optimizer)].get("stage"), "name", "") == "STEPPED"
        if stepped_before:
            del self._per_optimizer_states[id(optimizer)]
        self._told = (found, apply)
        self._folds = unscales_as_it_steps(optimizer)
        if self._folds:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            self.step(optimizer)
        finally:
            if self._folds:
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _unscale_grads_(self, *_: Any) -> dict[torch.device, torch.Tensor]:
        assert self._told is not None
        return {self._told[0].device: self._told[0]}

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        assert self._told is not None
        if self._folds:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._told[1]()


def steps_as(optimizer_class: type, known: type) -> bool:
    """Whether a class updates with the very code of one of PyTorch's optimizers: itself, or a subclass that adds none."""
    return all(
        inspect.unwrap(getattr(optimizer_class, name)) is inspect.unwrap(getattr(known, name))
        for name in ("step", "_init_group")
        if hasattr(known, name)
    )


def is_of_pytorch(optimizer_class: type) -> bool:
    """Whether an optimizer's `step` is one of `torch.optim`'s own: the class itself, or a subclass that adds none."""
    step = inspect.unwrap(getattr(optimizer_class, "step", is_of_pytorch))
    return bool(step.__module__.startswith("torch.optim."))


_PRE_HOOKS = "_optimizer_step_pre_hooks"
_FOR_OTHERS = "_only_for_steps_of_others"


def only_for_others(hook: Callable[..., Any]) -> Callable[..., Any]:
    """This hook of an optimizer's step does nothing where the engine steps: it need not be called then."""
    setattr(hook, _FOR_OTHERS, True)
    return hook


def _is_idle(hook: Callable[..., Any]) -> bool:
    return hasattr(hook, _FOR_OTHERS)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything is called around the optimizer's step; also where PyTorch does not say."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    places = [getattr(module, name, None) for name in names]
    places += [getattr(optimizer, name, None) for name in (_PRE_HOOKS, "_optimizer_step_post_hooks")]
    return any(hooks is None or not all(map(_is_idle, hooks.values())) for hooks in places)


def may_bypass_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing can notice that the engine's update was made without `optimizer.step()`, nor has a say in it (a scale
    that the script set by itself); `note_bypass` tells schedulers."""
    own = vars(optimizer)
    if has_step_hooks(optimizer) or _profiler_enabled() or own.get("grad_scale") is not None:
        return False
    if own.get(FOUND_INF) is not None:
        return False
    step = type(optimizer).step
    wrapper = own.get("step")
    return (wrapper is None or _is_of_scheduler(wrapper, step)) and _is_all_of_pytorch(step)


def has_foreign_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks that are not ours are called before the optimizer's step."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    places = (getattr(module, "_global_optimizer_pre_hooks", None), getattr(optimizer, _PRE_HOOKS, None))
    return any(not _is_ours(hook) for hooks in places if hooks for hook in hooks.values())


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("ampguard.")


def is_preceded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether code of others (a hook, a wrapper) runs before the optimizer's own step, and may read or change gradients."""
    step, wrapper = type(optimizer).step, vars(optimizer).get("step")
    is_own = wrapper is None or getattr(wrapper, "__func__", None) is step or _is_of_scheduler(wrapper, step)
    return not is_own or has_foreign_pre_hooks(optimizer)


def _is_of_scheduler(wrapper: Any, step: Callable[..., Any]) -> bool:
    """Whether a scheduler has put it around `step`, to see that it was called."""
    return getattr(wrapper, "_wrapped_by_lr_sched", False) and getattr(wrapper, "__wrapped__", None) is step


def note_bypass(optimizer: torch.optim.Optimizer) -> None:
    """What a scheduler's wrapper around `step` notes: that the optimizer has stepped."""
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]


@functools.cache
def _is_all_of_pytorch(function: Callable[..., Any] | None) -> bool:
    """Whether the code of a function, and of each that it wraps, is PyTorch's."""
    folder = str(Path(torch.__file__).parent) + os.sep
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(folder):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def fused_adam_(
    is_decoupled: bool,
    group: Mapping[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    state: Sequence[list[torch.Tensor]],
    divisor: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """One update by the kernel of Adam, or of AdamW, as these call it; `state` in the order of its arguments."""
    steps = state[-1]
    if steps[0].is_cpu:  # one after another there, which would make a tensor of 1 for each
        torch._foreach_add_(steps, torch.ones((), dtype=torch.float32, device="cpu"), alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        parameters,
        gradients,
        *state,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=divisor,
        found_inf=found_inf,
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def fused_sgd_(
    group: Mapping[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momentum: list[torch.Tensor],
    divisor: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """The same by the kernel of SGD; `momentum` is empty where it is 0."""
    torch._fused_sgd_(
        parameters,
        gradients,
        momentum,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=divisor,
        found_inf=found_inf,
    )


def is_first_move(scheduler: Any) -> bool:
    """Whether a scheduler's `step` is the one that its own construction makes."""
    return bool(getattr(scheduler, "_is_initial", False))


def moves_made(scheduler: Any) -> int | None:
    """How often a scheduler's `step` was called, its first one included. None where it does not count."""
    count = getattr(scheduler, "_step_count", None)  # ChainedScheduler has none, its parts do
    inside = getattr(scheduler, "_schedulers", None)
    return moves_made(inside[0]) if count is None and inside else count if isinstance(count, int) else None


def forget_optimizer(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let a scaler take an optimizer's next unscaling for its first since the last update."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states.pop(id(optimizer), None)


def let_step_unseen(scaler: torch.amp.GradScaler, optimizer: object) -> bool:
    """Whether the scaler, in the step that has just returned, called that of an optimizer which is none of PyTorch's.

    No hook runs around such a step (fastai's callback and optimizers), so it looks like a skipped one.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return False
    return not scaler.is_enabled() or found_inf(scaler, optimizer) is False
