"""Models whose weights are in a low precision: the cast, and what it needs at the models' edges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ampguard import compat
from ampguard.compat import hooks_of, unwrapped
from ampguard.engine.casting import cast_floats, is_castable
from ampguard.engine.force_fp32.modules import ForcedModules, is_forced
from ampguard.engine.patterns import called_in
from ampguard.engine.precision.stand_ins import StandIns, places_in


class CastInputs:
    """A forward pre-hook: floating inputs of the model get the type of its weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = cast_floats((args, kwargs), self.dtype)
        return args, kwargs


class CastOutputs:
    """A forward hook: floating outputs of the model become float32, so that the loss is computed in it."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floats(output, torch.float32)


class CastToInputs:
    """A forward hook: what a module returns gets the type that the model's inputs get.

    Not inside a module that runs in float32; `around` are those that the hooked one lies in.
    """

    def __init__(self, inputs: CastInputs, around: Sequence[nn.Module]) -> None:
        self._inputs = inputs
        self._around = around

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if any(map(is_forced, self._around)) else cast_floats(output, self._inputs.dtype)


@contextlib.contextmanager
def inputs_cast_to(root: nn.Module, dtype: torch.dtype) -> Iterator[bool]:
    """Inside, models that an engine has cast get inputs of this type. Gives whether the root holds any such model."""
    hooks = [hook for module in compat.all_modules(root) for hook in hooks_of(module) if isinstance(hook, CastInputs)]
    before = [hook.dtype for hook in hooks]
    for hook in hooks:
        hook.dtype = dtype
    try:
        yield bool(hooks)
    finally:
        for hook, own in zip(hooks, before, strict=True):
            hook.dtype = own


class LowWeights:
    """Models that were cast to `dtype`; the modules in `kept` were not, and parametrizations are not.

    What weights are made from stays float32, and so does their making: many of its operators (QR, LU, a matrix
    exponential) do not exist in float16, or are not finite in it. The weights that are made are cast.
    """

    def __init__(self, models: Sequence[nn.Module], dtype: torch.dtype, kept: Sequence[nn.Module]) -> None:
        self._models = [unwrapped(model) for model in models]
        self._widened: contextlib.ExitStack | None = None
        """Inside `widened`: what puts the models' own back."""
        self._inputs = CastInputs(dtype)
        made = parametrizations_in(self._models)
        ForcedModules({f"parametrization {i}": module for i, module in enumerate(made)}, cast_back=False)
        for module, around in made.items():
            module.register_forward_hook(CastToInputs(self._inputs, around))
        self._kept = [*kept, *made]
        own = {id(t) for module in self._kept for t in compat.all_tensors(module)}
        tensors = {id(t): t for m in self._models for t in compat.all_tensors(m) if is_castable(t)}
        self.cast = [t for key, t in tensors.items() if key not in own]
        """Parameters and buffers that changed their type."""
        with torch.no_grad():
            for tensor in self.cast:
                tensor.data = tensor.data.to(dtype)
                if tensor.grad is not None:
                    tensor.grad = None
        for module in {called: None for model in self._models for called in called_in({"": model}).values()}:
            module.register_forward_pre_hook(self._inputs, prepend=True, with_kwargs=True)
            module.register_forward_hook(CastOutputs())

    def added_since(self) -> list[str]:
        """Names of parameters in float32 that would have been cast, had they been in the models then."""
        kept = {id(module) for root in self._kept for module in compat.all_modules(root)}
        return [
            f"{path}.{name}" if path else name
            for model in self._models
            for path, module in compat.named_modules_of_user(model).values()
            if id(module) not in kept
            for name, tensor in compat.parameters_of(module).items()
            if tensor is not None and tensor.dtype == torch.float32
        ]

    @contextlib.contextmanager
    def widened(self, wide: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """The weights are float32 inside: `wide(weight)` where it gives one, else the weight's own value.

        What was written to them there is theirs afterwards.
        """
        if self._widened is not None:
            yield
            return
        self._widened = self._widen(wide)
        try:
            yield
        finally:
            self._narrow()

    @contextlib.contextmanager
    def narrowed(self, wide: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """The weights are the models' own, inside `widened(wide)` too: for whoever saves or loads them."""
        if self._widened is None:
            yield
            return
        self._narrow()
        try:
            yield
        finally:
            self._widened = self._widen(wide)

    def _narrow(self) -> None:
        widened, self._widened = self._widened, None
        if widened is not None:
            widened.close()

    def _widen(self, wide: Callable[[Tensor], Tensor | None]) -> contextlib.ExitStack:
        """What undoes it."""
        made = self._in_float32(wide)
        dtype, self._inputs.dtype = self._inputs.dtype, torch.float32
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self._inputs, "dtype", dtype)
            placed: set[int] = set()
            for model in self._models:
                places = [place for place in places_in(model) if id(place.tensor) in made]
                placed |= {id(place.tensor) for place in places}
                pairs = [(place, made[id(place.tensor)]) for place in places]
                stand_ins = StandIns(model, pairs, follows_weights=True)
                stand_ins.enter()
                stack.callback(stand_ins.leave)
            for tensor in self.cast:
                if id(tensor) not in placed:  # TorchScript keeps its tables to itself
                    own, tensor.data = tensor.data, made[id(tensor)].detach()
                    stack.callback(_put_back, tensor, own, compat.version_of(tensor))
            return stack.pop_all()

    def _in_float32(self, wide: Callable[[Tensor], Tensor | None]) -> dict[int, Tensor]:
        """What stands in for each cast tensor. Differentiable where gradients are on: a model may be trained in evaluation
        mode."""
        is_on = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(is_on):  # what is written to them is seen by versions
            return {id(t): t.float() if (kept := wide(t)) is None else kept for t in self.cast}


@torch.no_grad()
def _put_back(tensor: Tensor, own: Tensor, version: int) -> None:
    """A tensor's own data, with what was written to it since that version, when it held other data."""
    now, is_written = tensor.data, compat.version_of(tensor) != version
    tensor.data = own
    if is_written:
        tensor.copy_(now)


def parametrizations_in(models: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """What computes weights of other modules (`torch.nn.utils.parametrize`), and the modules that each lies in."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for model in models:
        modules = dict(compat.named_modules(model, remove_duplicate=False))
        for path, module in modules.items():
            if isinstance(module, ParametrizationList):
                parts = path.split(".") if path else []
                found.setdefault(module, [modules[".".join(parts[:depth])] for depth in range(len(parts))])
    return found


NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LocalResponseNorm,
)


def norms_in(model: nn.Module) -> list[nn.Module]:
    """Normalisation layers: PyTorch's, and others that are called so and hold nothing but vectors."""
    return [module for module in compat.all_modules(model) if isinstance(module, NORMS) or _looks_like_norm(module)]


def _looks_like_norm(module: nn.Module) -> bool:
    if "norm" not in type(module).__name__.lower() or compat.own_children(module):
        return False
    own = compat.own_parameters(module)
    return bool(own) and all(p.ndim <= 1 for p in own)
