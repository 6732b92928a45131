"""PyTorch's fused kernels for optimizers that were not asked to be fused.

`torch.optim.AdamW(parameters)` runs one operator after another over the model; its fused kernel reads and writes
everything once, and computes the same but for the last digits. For the time of a step the groups say `fused=True`;
what the optimizer keeps and saves has the same keys and values as before.

A fused kernel takes what it is given for plain memory, all of it laid out like the parameter. On the CPU it does so
unchecked: with a transposed gradient it pairs the wrong elements, with a parameter that is a slice of a larger tensor
it writes between its elements. So every tensor is looked at first, also for an optimizer that was asked to be fused.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ampguard.compat import cuda_is_capturing, has_foreign_pre_hooks, has_step_hooks, unscales_as_it_steps
from ampguard.engine.step.kernels import family, is_sound
from ampguard.engine.step.layout import Look, lie_alike, look_at_group, types_agree

_FUSED_WORDS: dict[str, Any] = {"fused": True, "foreach": False}
_PLAIN_WORDS: dict[str, Any] = {"fused": None}


class Way(enum.Enum):
    """How an optimizer takes the factor and the verdict of a step."""

    FUSED = "in the pass of PyTorch's fused kernel"
    OWN = "by itself, from the attributes that GradScaler sets"
    PLAIN = "not at all: its gradients must be multiplied before, and the verdict read"

    @contextlib.contextmanager
    def prepared(self, optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
        """Let the next `optimizer.step()` go this way, divide by `grad_scale`, and do nothing if `found_inf` is 1."""
        with _saying(optimizer, self):
            if grad_scale is None and found_inf is None:
                yield
                return
            with _told(optimizer, grad_scale, found_inf):
                yield


def way_of(optimizer: Optimizer, looks: Sequence[Look] = ()) -> Way:
    """The quickest way for the coming step, with the gradients as they are now.

    One of PyTorch's kernels is not taken where the script decided otherwise (`fused=False`, `foreach=True` or `False`,
    `differentiable=True`). Momentum that is missing is begun here, so that the kernel need not know which parameters
    have a gradient for the first time. Nor where a hook of the script's runs before the step: it may put other gradients
    in place of those that were looked at. `looks`: one at each group, as `looks_at` gives them.
    """
    known = family(type(optimizer))
    if known is not None:
        if _may_get_others(optimizer):
            return Way.PLAIN
        looks = looks or looks_at(optimizer)
        fits = bool(looks) and all(_group_fits(optimizer, i, known, look) for i, look in enumerate(looks))
        return Way.FUSED if fits else Way.PLAIN
    if unscales_as_it_steps(optimizer) and "grad_scaler" not in inspect.signature(optimizer.step).parameters:
        return Way.OWN
    return Way.PLAIN


def _may_get_others(optimizer: Optimizer) -> bool:
    """Whether a hook may give it gradients of another layout, unless the script has taken that upon itself."""
    is_asked = all(group.get("fused") for group in optimizer.param_groups)
    return not is_asked and has_foreign_pre_hooks(optimizer) and not cuda_is_capturing()


def looks_at(optimizer: Optimizer, before: Sequence[Look] = ()) -> list[Look]:
    """One look at each group, where a fused kernel may make the step: that of the check just before, if it still holds."""
    if not takes_kernel(optimizer):
        return []
    groups = optimizer.param_groups
    return [
        before[i] if i < len(before) and before[i].is_of(group["params"]) else look_at_group(optimizer, i)
        for i, group in enumerate(groups)
    ]


def may_divide(optimizer: Optimizer) -> bool:
    """Whether the way of a step may be another than PLAIN. Looks at no tensor, and begins no momentum."""
    if family(type(optimizer)) is not None:
        return takes_kernel(optimizer)
    return unscales_as_it_steps(optimizer)


def takes_kernel(optimizer: Optimizer) -> bool:
    """Whether one of PyTorch's fused kernels may make the step, where all tensors suit it."""
    return family(type(optimizer)) is not None and not any(map(_is_decided, optimizer.param_groups))


def _is_decided(group: dict[str, Any]) -> bool:
    """Whether the script chose an implementation that divides nothing."""
    return group.get("foreach") is not None or bool(group.get("differentiable")) or group.get("fused") is False


@contextlib.contextmanager
def _saying(optimizer: Optimizer, way: Way) -> Iterator[None]:
    """For the time of a step, what the groups say of the implementation."""
    if way is Way.OWN or family(type(optimizer)) is None:
        yield
        return
    said = _FUSED_WORDS if way is Way.FUSED else _PLAIN_WORDS
    if way is Way.FUSED and cuda_is_capturing():
        said = {**said, "capturable": True}
    before = [{key: group[key] for key in said if key in group} for group in optimizer.param_groups]
    for group, had in zip(optimizer.param_groups, before, strict=True):
        group.update({key: said[key] for key in had if way is Way.FUSED or had[key]})
    try:
        yield
    finally:
        for group, had in zip(optimizer.param_groups, before, strict=True):
            group.update(had)


@contextlib.contextmanager
def _told(optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Set the two attributes from which an optimizer takes its scale and its verdict, as GradScaler does."""
    own = optimizer.__dict__
    new = {key: value for key, value in (("grad_scale", grad_scale), ("found_inf", found_inf)) if value is not None}
    before = {key: own[key] for key in new if key in own}
    if "grad_scale" in before and before["grad_scale"] is not None:
        new["grad_scale"] = new["grad_scale"] * before["grad_scale"]
    own.update(new)
    try:
        yield
    finally:
        for key in new:
            del own[key]
        own.update(before)


def can_lengthen(optimizer: Optimizer) -> bool:
    """Whether the factor can go into the learning rate: plain SGD is linear in its gradients.

    Not where a hook could see the learning rate that a step is made with.
    """
    return (
        family(type(optimizer)) is SGD
        and not has_step_hooks(optimizer)
        and all(
            not group["momentum"] and type(group["lr"]) is float and type(group["weight_decay"]) in (float, int)
            for group in optimizer.param_groups
        )
    )


@contextlib.contextmanager
def lengthened(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """For the time of a step: `lr * (factor * g + decay * p)` as `(lr * factor) * (g + decay / factor * p)`."""
    before = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
        group["weight_decay"] /= factor
    try:
        yield
    finally:
        for group, (lr, weight_decay) in zip(optimizer.param_groups, before, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay


def _group_fits(optimizer: Optimizer, number: int, known: type[Optimizer], look: Look) -> bool:
    group = optimizer.param_groups[number]
    parameters, gradients, layout = look.parameters, look.gradients, look.layout
    if not parameters:
        return True
    if layout is None:
        return bool(group.get("fused"))  # a subclass of tensors, such as FSDP's shards, has operators of its own
    if not look.is_plain or not types_agree(layout, parameters, gradients):
        return False
    if not lie_alike(optimizer, layout, parameters, gradients):
        return False
    if not all(is_sound(known, kind, dtype) for kind in layout.kinds for dtype in layout.dtypes):
        return False
    if isinstance(optimizer, SGD):
        return _begin_momentum(optimizer, group, parameters)
    if layout.kinds != {"cpu"}:
        _bring_steps(optimizer, parameters, layout.kept if layout.kept is not None else {})
    return True


def _begin_momentum(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Give every parameter a momentum buffer. Zero is right only without dampening, which spares the first gradient.

    The kernel knows one "first step" for all, fails where only some buffers are missing, and leaves them full of
    leftover memory where it skips the first step.
    """
    if not group["momentum"]:
        return True
    missing = [p for p in parameters if optimizer.state[p].get("momentum_buffer") is None]
    if not missing:
        return True
    if group["dampening"] != 0:
        return len(missing) == len(parameters) and all(p.is_cpu for p in parameters)
    for p in missing:
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return True


def _bring_steps(optimizer: Optimizer, parameters: Sequence[Tensor], kept: dict[str, Any]) -> None:
    """Move the counts of steps to their parameters' device: only there can a skipped step leave them alone unasked.

    Once, until a checkpoint is loaded, or a parameter steps for the first time.
    """
    known = kept.get("brought")
    if known is not None and known[0] is optimizer.state and known[1] == len(optimizer.state):
        return
    for p in parameters:
        state = optimizer.state.get(p, {})
        step = state.get("step")
        if isinstance(step, Tensor) and step.device != p.device:
            state["step"] = step.to(p.device, torch.float32, non_blocking=True)
    kept["brought"] = (optimizer.state, len(optimizer.state))
