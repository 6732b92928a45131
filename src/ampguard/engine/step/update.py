"""The optimizer's step, with unscaling and clipping inside its own pass over the gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ampguard.compat import is_preceded, local_part, multiply_all_, stored_values, tell_of_skip
from ampguard.engine.step.check import GradientCheck
from ampguard.engine.step.direct import step_directly
from ampguard.engine.step.foreach import as_foreach
from ampguard.engine.step.fused import Way, can_lengthen, lengthened, looks_at, may_divide, takes_kernel, way_of
from ampguard.engine.step.gradients import check_gradients, check_groups, unscale_gradients
from ampguard.engine.step.layout import Look, look_at_group
from ampguard.engine.step.one_pass import adam_in_one_pass
from ampguard.errors import UsageError

CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`: keeps a norm of 0 from dividing."""

TINY = 1e-30
"""A factor below this is left to the kernel: float32 ends near its inverse."""


def check_for_update(
    optimizers: Iterable[Optimizer],
    parameters: Sequence[Tensor],
    scale: Tensor | None = None,
    max_norm: float | None = None,
    *,
    may_write: bool = True,
) -> GradientCheck:
    """The cheapest check that `apply_update` of these optimizers, without a closure, can do with.

    The norm is measured only for clipping (`max_norm=math.inf` measures it and clips nothing). Without clipping,
    optimizers that cannot divide gradients in their own pass get them divided in the check's, also where the step will
    be skipped; with `may_write=False` they do not.
    """
    optimizers = list(optimizers)
    looks = _looks(optimizers[0], parameters) if len(optimizers) == 1 else None
    if looks is not None:
        return check_groups(looks, scale, wants_norm=max_norm is not None)
    if max_norm is not None:
        return check_gradients(parameters, scale)
    if may_write and scale is not None and not any(map(may_divide, optimizers)):
        check = unscale_gradients(parameters, scale)
        if check is not None:
            return check
    return check_gradients(parameters, scale, wants_norm=False)


def _looks(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Look] | None:
    """One look at each group, where these are the parameters and a fused kernel may step them: it looks there too."""
    if not takes_kernel(optimizer):
        return None
    groups = optimizer.param_groups
    held = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
    if len(held) != len(parameters) or not all(map(operator.is_, held, parameters)):
        return None
    return [look_at_group(optimizer, number) for number in range(len(groups))]


def apply_update(
    optimizer: Optimizer,
    check: GradientCheck,
    max_norm: float | None = None,
    closure: Callable[[], Any] | None = None,
    *,
    write_back: bool = False,
) -> None:
    """Step on the gradients times `inverse_scale * min(1, max_norm / (norm + 1e-6))`, or not at all if `found_inf` is 1.

    Equals `scaler.unscale_`, `clip_grad_norm_`, `scaler.step` but for roundings in the last digit. SGD, Adam, AdamW and
    Adagrad take their fused kernel, with the factor in its own pass, unless the script chose another implementation;
    so does any optimizer with `_step_supports_amp_scaling`. Waits for no device then, and can be captured in a CUDA
    graph. Every other optimizer steps after one multiplication of its gradients; on an accelerator `found_inf` is
    read for it once, as GradScaler does.

    Hooks of the script's that are called before the step, and wrappers around it, find the gradients multiplied already.
    Afterwards the gradients may be multiplied by the factor or not; with `write_back` they are, except where the step
    was skipped: then they are as they were. A `closure` is for optimizers such as LBFGS, which compute gradients by
    themselves that nobody checks: it raises UsageError if there is anything to unscale or to clip.
    """
    if max_norm is not None and check.norm is None:
        raise UsageError(
            f"Gradients cannot be clipped to max_norm={max_norm:g}: their norm was not measured. "
            "Call check_gradients() with wants_norm=True, or check_for_update() with the same max_norm."
        )
    if closure is not None or isinstance(optimizer, LBFGS):
        _step_with_closure(optimizer, check, max_norm, closure)
    elif check.found_inf.is_cpu:
        if check.found_inf.item():
            tell_of_skip(optimizer)
        else:
            _step_by(optimizer, _host_factor(check, max_norm), write_back, check.looks)
    else:
        _step_on_device(optimizer, check, max_norm, write_back)


def _step_by(optimizer: Optimizer, factor: float, write_back: bool, looks: Sequence[Look] = ()) -> None:
    """Step on the gradients times a number that the host knows."""
    looks = looks_at(optimizer, looks)
    way = way_of(optimizer, looks)
    if factor != 1.0 and (way is Way.PLAIN or _are_divided_first(optimizer, way, write_back)):
        _multiply_gradients(optimizer, _number(factor))
        factor = 1.0
    if way is Way.PLAIN:
        _step_plainly(optimizer)
        return
    if way is Way.FUSED and not write_back and factor > TINY and can_lengthen(optimizer):
        with lengthened(optimizer, factor):
            _step_fused(optimizer, looks, None, None)
        return
    divisor = _number(1.0 / factor if factor else torch.inf)
    if way is Way.FUSED:  # its kernel does less where there is nothing to divide by, and nothing to skip
        _step_fused(optimizer, looks, divisor if factor != 1.0 else None, None)
    else:
        with way.prepared(optimizer, divisor, _number(0.0)):
            optimizer.step()


def _step_on_device(optimizer: Optimizer, check: GradientCheck, max_norm: float | None, write_back: bool) -> None:
    """The same with a scale, a norm and a verdict that lie on a device; only a plain step waits for the verdict."""
    looks = looks_at(optimizer, check.looks)
    way = way_of(optimizer, looks)
    if way is Way.FUSED and not write_back and adam_in_one_pass(optimizer, looks, check, max_norm, CLIP_EPSILON):
        return
    divisor = _device_divisor(check, max_norm)
    if way is Way.PLAIN:
        if check.found_inf.item():
            tell_of_skip(optimizer)
        else:
            _multiply_gradients(optimizer, divisor.reciprocal())
            _step_plainly(optimizer)
        return
    is_divided = _are_divided_first(optimizer, way, write_back)
    if is_divided:
        _multiply_gradients(optimizer, torch.where(check.found_inf > 0, torch.ones_like(divisor), divisor.reciprocal()))
    if way is Way.FUSED:
        _step_fused(optimizer, looks, None if is_divided else divisor, check.found_inf)
    else:
        with way.prepared(optimizer, torch.ones_like(divisor) if is_divided else divisor, check.found_inf):
            optimizer.step()


def _step_fused(optimizer: Optimizer, looks: Sequence[Look], divisor: Tensor | None, found_inf: Tensor | None) -> None:
    if not step_directly(optimizer, looks, divisor, found_inf):
        with Way.FUSED.prepared(optimizer, divisor, found_inf):
            optimizer.step()


def _step_plainly(optimizer: Optimizer) -> None:
    with Way.PLAIN.prepared(optimizer, None, None), as_foreach(optimizer):
        optimizer.step()


def _are_divided_first(optimizer: Optimizer, way: Way, write_back: bool) -> bool:
    """Whether others read the gradients before the step, or want them divided where its kernel does not write them back."""
    return is_preceded(optimizer) or (write_back and not _writes_back(optimizer, way))


def _writes_back(optimizer: Optimizer, way: Way) -> bool:
    """Whether the kernel leaves the divided gradients behind: PyTorch's do on the CPU and in CUDA."""
    return way is Way.FUSED and all(p.is_cpu or p.is_cuda for p in _with_gradient(optimizer))


def _host_factor(check: GradientCheck, max_norm: float | None) -> float:
    inverse = check.inverse_scale.item()
    if max_norm is None or check.norm is None:
        return inverse
    return inverse * min(1.0, float(max_norm) / (check.norm.item() + CLIP_EPSILON))


def _number(value: float) -> Tensor:
    """0-d float32 on the CPU, whatever the script made the default."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _device_divisor(check: GradientCheck, max_norm: float | None) -> Tensor:
    """What the gradients are to be divided by: the loss scale, or more where they are clipped."""
    if max_norm is None or check.norm is None:
        return check.inverse_scale.reciprocal()
    return (check.norm + CLIP_EPSILON).div_(max_norm).clamp_(min=1.0).div_(check.inverse_scale)


def _multiply_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """In place; of a sparse gradient the stored values, of a sharded one what lies here."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in _with_gradient(optimizer):
        here = local_part(p.grad)  # type: ignore[arg-type]
        values = here if here.layout is torch.strided else stored_values(here)
        alike.setdefault((values.device, values.dtype), []).append(values)
    with torch.no_grad():
        for (device, _), tensors in alike.items():
            multiply_all_(tensors, factor.to(device, non_blocking=True))


def _with_gradient(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _step_with_closure(
    optimizer: Optimizer, check: GradientCheck, max_norm: float | None, closure: Callable[[], Any] | None
) -> None:
    name = type(optimizer).__name__
    if closure is None:
        raise UsageError(
            f"{name} computes the loss several times within one step, so it needs a closure that does: "
            "pass closure=..., without a loss scale and without clipping."
        )
    if max_norm is not None or check.inverse_scale.item() != 1.0:
        raise UsageError(
            f"{name} was given a closure together with "
            + ("a loss scale" if max_norm is None else "max_norm")
            + ": the gradients that it computes inside its step would be neither unscaled nor clipped. "
            "Compute them before, and step without the closure; or train in float32 or bfloat16 without a loss scale "
            "and clip inside the closure (LBFGS knows no other way)."
        )
    if check.found_inf.item():
        tell_of_skip(optimizer)
    else:
        optimizer.step(closure)
