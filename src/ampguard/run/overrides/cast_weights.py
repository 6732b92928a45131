"""Low-precision weights from outside: calls of the script's models run on casts of its float32 parameters.

Whatever the script holds stays what it is: its optimizer, its clipping, DDP's buckets, averages and checkpoints know
float32 parameters and float32 gradients. For the time of a call from outside every module, the model's tables of
parameters and buffers hold casts, which are differentiable: the gradients arrive at the parameters. In O2 these are the
master weights, and norms compute in float32; else they hold nothing that the low precision cannot (`stored_low.py`).
In a backward pass the last casts stand there again, for what activation checkpointing computes a second time.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat, numerics
from ampguard.capture.patches import Patches
from ampguard.engine.force_fp32 import ForcedModules
from ampguard.engine.force_fp32.modules import is_forced
from ampguard.engine.precision.stand_ins import Place, StandIns, places_in
from ampguard.engine.precision.weights import CastInputs, CastToInputs, norms_in, parametrizations_in
from ampguard.errors import PatternError
from ampguard.replay.variants import Variant
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.not_borne import first_line_of
from ampguard.run.overrides.places import is_not_made_yet, why_weights_stay
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.regions import any_low_dtype, own_low_dtype
from ampguard.run.overrides.stored_low import StoredLow


@functools.cache
def _sparse_cast() -> type[torch.autograd.Function]:
    """A cast whose gradient may be sparse: that of `Tensor.to` raises for one."""

    class SparseCast(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
            ctx.dtype = tensor.dtype
            return tensor.to(dtype)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0].to(ctx.dtype), None

    return SparseCast


def cast(tensor: Tensor, dtype: torch.dtype, gets_sparse: bool) -> Tensor:
    """The tensor in another type; differentiable."""
    made: Tensor = _sparse_cast().apply(tensor, dtype) if gets_sparse else tensor.to(dtype)
    return made


def casts_of(
    root: nn.Module, places: list[Place], dtype: torch.dtype, beside: Callable[[], Callable[[], None]] | None = None
) -> StandIns:
    """Casts of what stands in these places of a root; tied weights have one. `beside`: see `StandIns`."""
    made: dict[int, Tensor] = {}
    with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
        for place in places:
            if id(place.tensor) not in made:
                made[id(place.tensor)] = cast(place.tensor, dtype, place.gets_sparse)
    return StandIns(root, [(place, made[id(place.tensor)]) for place in places], beside)


ON_CASTS = ": its calls run on float32 casts of them, its updates are rounded as before"


def low_by_itself(root: nn.Module, low: torch.dtype) -> str:
    """Whose weights the script itself made low."""
    return f"the weights of {type(root).__name__} are {numerics.dtype_name(low)} by the script's own doing"


class CastWeights:
    """Makes the casts of each root call, and keeps those of its last one for the backward pass."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self._last: weakref.WeakKeyDictionary[nn.Module, list[StandIns]] = weakref.WeakKeyDictionary()
        self._sizes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._in_float32: list[ForcedModules] = []
        """Norms (in O2) and parametrizations."""
        self._inputs = CastInputs(torch.float32)
        """The type of the weights in the call that is running: that of weights which parametrizations make."""
        self._hooks: list[Any] = []
        self._cast: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """What calls run on casts of, by identity."""
        self._stored = StoredLow(ledger)
        self._given_up: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Roots whose own code does not go together with low-precision weights."""

    def install(self, patches: Patches) -> None:
        engine = compat.backward_engine()
        if engine is not None:
            patches.replace(*engine, self._watch_engine)

    def undo(self) -> None:
        for forced in self._in_float32:
            forced.undo()
        self._in_float32.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._last.clear()

    def enter(self, root: nn.Module, replay: Variant | None) -> Callable[[], None] | None:
        """Put casts of the root's weights in their places, made for this call."""
        own, dtype = self.types_of(root)
        if own == dtype or root in self._given_up or self._stays(root):
            return None
        self._put_in_float32(root)
        if replay is None:
            self._last.pop(root, None)
        forced = replay.force_fp32 if replay is not None else frozenset()
        places = []
        for place in places_in(root, forced):
            if place.tensor.dtype == own and not (place.in_float32 and dtype != torch.float32):
                places.append(place)
            elif replay is None:
                self._cast.pop(id(place.tensor), None)  # put in float32 since
        if not any(place.is_weight or place.tensor.requires_grad for place in places):
            return None
        if replay is None and dtype != torch.float32:
            self._cast.update((id(place.tensor), place.tensor) for place in places)
        casts = casts_of(root, places, dtype, functools.partial(self._computing_in, dtype))
        if torch.is_grad_enabled():
            self._last.setdefault(root, []).append(casts)
        casts.enter()
        self._ledger.done(on_casts(dtype))
        return casts.leave

    def types_of(self, root: nn.Module) -> tuple[torch.dtype, torch.dtype]:
        """The type of the weights that are cast for a call of the root, and what they become; twice the same: none are."""
        if self._plan.lifts_own_weights:
            return any_low_dtype(root) or torch.float32, torch.float32
        own = own_low_dtype(root)
        return (own, own) if own is not None else (torch.float32, self._plan.weights_dtype)

    def forget_call(self, root: nn.Module) -> None:
        """A call has failed, and nothing of it will be differentiated."""
        self._last.pop(root, None)

    def mix(self, root: nn.Module) -> None:
        """The root's own code brings float32 tensors to low-precision weights: its calls run under autocast too."""
        self._ledger.done(self._mixed(root))

    def _mixed(self, root: nn.Module) -> str:
        low = numerics.dtype_name(self._plan.weights_dtype)
        return f"{type(root).__name__} runs under {low} autocast too: its own code mixes its weights with float32"

    def give_up(self, root: nn.Module, refusal: Exception, is_only: bool = False) -> None:
        """A call of the root on low-precision weights has failed: from now on it keeps the script's own.

        `is_only`: no call of any model has succeeded on such weights yet.
        """
        self._given_up.add(root)
        self._ledger.not_done(self._mixed(root))
        if is_only:
            self._ledger.not_done(on_casts(self._plan.weights_dtype))
        self._last.pop(root, None)
        for parameter in compat.all_parameters(root):
            self._cast.pop(id(parameter), None)
        self._ledger.failed(
            f"{type(root).__name__} stays in float32: its own code does not go with "
            f"{numerics.dtype_name(self._plan.weights_dtype)} weights ({first_line_of(refusal)}); use --precision fp16 "
            "or bf16 (autocast)"
        )

    def keep_own(self, root: nn.Module, refusal: BaseException) -> None:
        """A call of the root on float32 casts of the script's low weights has failed: from now on it keeps these."""
        self._given_up.add(root)
        low = next(p.dtype for p in compat.all_parameters(root) if p.is_floating_point())
        self._ledger.failed(
            f"{type(root).__name__} computes in the type of its own weights after all: its code casts to that itself "
            f"({first_line_of(refusal)})",
            instead_of=low_by_itself(root, low) + ON_CASTS,
        )

    @contextlib.contextmanager
    def updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Around an optimizer's own step."""
        dtype = self._plan.weights_dtype
        if self._plan.keeps_masters or dtype == torch.float32:
            yield
            return
        weights = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._cast]
        self._stored.before(optimizer, weights, dtype)
        yield
        self._stored.after(optimizer, weights, dtype)

    def _stays(self, root: nn.Module) -> bool:
        why = why_weights_stay(root)
        if why is not None:
            self._ledger.failed(why)
        return why is not None or is_not_made_yet(root)

    def _computing_in(self, dtype: torch.dtype) -> Callable[[], None]:
        before, self._inputs.dtype = self._inputs.dtype, dtype
        return lambda: setattr(self._inputs, "dtype", before)

    def _put_in_float32(self, root: nn.Module) -> None:
        """What weights are made from, and norms where there are master weights."""
        size = len(compat.all_modules(root))
        if self._sizes.get(root) == size:
            return
        self._sizes[root] = size
        made = {module: around for module, around in parametrizations_in([root]).items() if not is_forced(module)}
        hooks = ((module, CastToInputs(self._inputs, around)) for module, around in made.items())
        self._hooks += [module.register_forward_hook(hook) for module, hook in hooks]
        for module in (*made, *(norms_in(root) if self._plan.keeps_masters else ())):
            try:
                forced = ForcedModules({type(module).__name__: module}, module not in made, copies_too=False)
                self._in_float32.append(forced)
            except PatternError as error:
                self._ledger.failed(str(error).splitlines()[0])

    def _watch_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Beneath everybody else who watches a backward pass: they see the script's own parameters."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._last or compat.in_backward():
                return original(*args, **kwargs)
            entered = [casts for several in list(self._last.values()) for casts in several]
            for casts in entered:
                casts.enter()
            try:
                return original(*args, **kwargs)
            finally:
                for casts in reversed(entered):
                    casts.leave()

        return run


def on_casts(dtype: torch.dtype) -> str:
    """What the report says was done."""
    return f"models run on {numerics.dtype_name(dtype)} casts of the script's weights"
