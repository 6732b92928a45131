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
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ampguard.compat import has_step_hooks, unscales_as_it_steps
from ampguard.engine.step.kernels import family, is_sound

_contiguous: weakref.WeakKeyDictionary[Optimizer, tuple[Any, int]] = weakref.WeakKeyDictionary()
_PLAIN = frozenset((Tensor, nn.Parameter))
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
        with _saying(optimizer, self), _told(optimizer, grad_scale, found_inf):
            yield


def way_of(optimizer: Optimizer) -> Way:
    """The quickest way for the coming step, with the gradients as they are now.

    One of PyTorch's kernels is not taken where the script decided otherwise (`fused=False`, `foreach=True` or `False`,
    `differentiable=True`). Momentum that is missing is begun here, so that the kernel need not know which parameters
    have a gradient for the first time.
    """
    known = family(type(optimizer))
    if known is not None:
        fits = all(_group_fits(optimizer, group, known) for group in optimizer.param_groups)
        return Way.FUSED if fits else Way.PLAIN
    if unscales_as_it_steps(optimizer) and "grad_scaler" not in inspect.signature(optimizer.step).parameters:
        return Way.OWN
    return Way.PLAIN


@contextlib.contextmanager
def _saying(optimizer: Optimizer, way: Way) -> Iterator[None]:
    """For the time of a step, what the groups say of the implementation."""
    if way is Way.OWN or family(type(optimizer)) is None:
        yield
        return
    said = _FUSED_WORDS if way is Way.FUSED else _PLAIN_WORDS
    if way is Way.FUSED and _is_capturing():
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


def _group_fits(optimizer: Optimizer, group: dict[str, Any], known: type[Optimizer]) -> bool:
    is_asked = bool(group.get("fused"))
    if group.get("foreach") is not None or group.get("differentiable") or group.get("fused") is False:
        return False
    pairs = [(p, gradient) for p in group["params"] if (gradient := p.grad) is not None]
    if not pairs:
        return True
    parameters, gradients = zip(*pairs, strict=True)
    if is_asked and not _are_plain(parameters):
        return True  # a subclass of tensors, such as FSDP's shards, has operators of its own
    dtypes = [p.dtype for p in parameters]
    if dtypes != [g.dtype for g in gradients] or not _lie_alike(optimizer, parameters, gradients):
        return False
    kinds = {"cpu"} if False not in [p.is_cpu for p in parameters] else {p.device.type for p in parameters}
    if not all(is_sound(known, kind, dtype) for kind in kinds for dtype in set(dtypes)):
        return False
    if isinstance(optimizer, SGD):
        return _begin_momentum(optimizer, group, parameters)
    if kinds != {"cpu"}:
        _bring_steps(optimizer, parameters)
    return True


def _lie_alike(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether gradients and state are plain tensors that lie in memory as their parameters do, without gaps.

    Looked at in every step, so in loops that run in C where there are such.
    """
    if not (_are_plain(parameters) and _are_plain(gradients)):
        return False
    try:
        if all(map(Tensor.is_contiguous, chain(parameters, gradients))) and _is_state_contiguous(optimizer):
            return True
    except RuntimeError:  # a sparse tensor does not even answer
        return False
    if any(g.layout is not torch.strided for g in gradients):
        return False
    state = optimizer.state
    return all(_lies_alike(p, g, state.get(p, {})) for p, g in zip(parameters, gradients, strict=True))


def _is_state_contiguous(optimizer: Optimizer) -> bool:
    """Remembered until a checkpoint is loaded, which replaces the whole state, or a parameter steps for the first time."""
    state = optimizer.state
    known = _contiguous.get(optimizer)
    if known is None or known[0] is not state or known[1] != len(state):
        kept = [t for values in state.values() for t in values.values() if isinstance(t, Tensor)]
        if not all(map(Tensor.is_contiguous, kept)):
            return False
        _contiguous[optimizer] = (state, len(state))
    return True


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    return set(map(type, tensors)) <= _PLAIN


def _lies_alike(p: Tensor, g: Tensor, state: dict[str, Any]) -> bool:
    """The same of one parameter in any order of dimensions, such as channels last."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    others = [g, *(s for s in state.values() if isinstance(s, Tensor) and s.shape == p.shape)]
    return all(other.stride() == p.stride() for other in others)


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


def _bring_steps(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Move the counts of steps to their parameters' device: only there can a skipped step leave them alone unasked."""
    for p in parameters:
        state = optimizer.state.get(p, {})
        step = state.get("step")
        if isinstance(step, Tensor) and step.device != p.device:
            state["step"] = step.to(p.device, torch.float32, non_blocking=True)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
