"""Between the loss and the weights: the gained loss scale, and steps that are held off where numbers are not finite."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.judging.own_scale import factor_of, is_usual_scale
from ampguard.capture.patches import Patches
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.hand_updates import HandMade
from ampguard.capture.steps import optimizers_alive
from ampguard.numerics import is_finite
from ampguard.run.overrides.all_ranks import carry_bad_losses
from ampguard.run.overrides.cast_weights import CastWeights
from ampguard.run.overrides.changed_buffers import ChangedBuffers
from ampguard.run.overrides.closures import calls_closure_once, without_closure
from ampguard.run.overrides.gained_scale import GainedScale
from ampguard.run.overrides.gradients import all_finite, bad_gradients, parameters_of
from ampguard.run.overrides.gradients_again import GradientsAgain
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.not_borne import first_line_of, is_of_types
from ampguard.run.overrides.patience import Patience
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.roots import RootCalls
from ampguard.run.overrides.scalers import Scalers
from ampguard.run.overrides.step_again import StepAgain

TRY_FORCING = "--force-fp32 PATTERN leaves the module that it runs through in float32"


class Listener(Protocol):
    """The guard, which cannot see by itself what happens over its probes."""

    def loss_scaled(self, loss: Tensor, scaled: Tensor, scale: GainedScale) -> None: ...
    def held_off(self, optimizer: Optimizer, scale: GainedScale | None) -> None: ...
    def output_is_bad(self, output: Tensor | None) -> None: ...
    def events(self) -> int: ...
    def keep_taping(self) -> None: ...

    @property
    def recorder(self) -> FlightRecorder: ...


class Updates:
    """`backward` and every optimizer's `step`."""

    def __init__(
        self,
        plan: Plan,
        scalers: Scalers,
        roots: RootCalls,
        patience: Patience | None,
        barrier: FaultBarrier,
        ledger: Ledger,
        listener: Listener,
        on_first_step: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._scalers = scalers
        self._roots = roots
        self._patience = patience
        self._buffers: ChangedBuffers | None = None
        if patience is not None:
            self._buffers = roots.buffers = ChangedBuffers()
        self._barrier = barrier
        self._ledger = ledger
        self._listener = listener
        self._on_first_step: Callable[[], None] | None = on_first_step
        self._gained = GainedScale()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._older: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those from before the guard: nobody knows whether they are in use."""
        self._stray: tuple[tuple[int, int], list[Tensor]] = ((-1, -1), [])
        self._strays: list[Tensor] = []
        """What the running backward pass also reaches: leaves of no model and no optimizer, which a script updates by hand."""
        self._is_searching = False
        """Whether an optimizer evaluates losses inside its own step (LBFGS)."""
        self._is_spoilt: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Optimizers whose gradients were not finite as the last backward pass left them."""
        self._is_spoilt_elsewhere = False
        """The same of parameters that no optimizer holds: the script may copy theirs to what one does (masters)."""
        self._bad_loss = False
        self._stepped_since_backward = False
        self._stepping: set[int] = set()
        self._differentiates_otherwise = False
        """Whether gradients were computed that no `backward()` has brought."""
        self.again: StepAgain | None = None
        self.gradients_again: GradientsAgain | None = None
        """These make steps that failed again; None where nothing is healed."""
        self.weights: CastWeights | None = None
        """What the script's weights are made in another precision by."""
        self.mixes_by_itself: Callable[[], bool] = lambda: False
        """Whether the script opens autocast regions or lowers weights itself."""
        self._patches: Patches | None = None

    def install(self, patches: Patches) -> None:
        self._patches = patches
        patches.replace(torch.autograd, "backward", self._watch_backward)
        if self._plan.dtype is not None or self._plan.scales_loss:
            patches.replace(torch.autograd, "grad", self._watch_grad)
        if self._plan.scales_loss:
            self._roots.on_output = self._gained.see
            self._gained.inner.install(patches)
        patches.replace(Optimizer, "__init__", self._watch_init)
        self._scalers.on_skipped = self._skipped_by_scaler
        self._scalers.on_attempt = self._patience.attempting if self._patience is not None else None
        if self._patience is not None:
            for owner in (Optimizer, nn.Module):
                patches.replace(owner, "zero_grad", self._watch_clear)
        for optimizer in optimizers_alive():
            self._older.add(optimizer)
            self._adopt(optimizer)

    # --- backward -----------------------------------------------------------------------------------------------------

    def _watch_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        guarded = self._barrier.call

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or compat.in_backward() or self._listener.recorder.paused:
                return original(tensors, *args, **kwargs)  # also a replay's, of a fix that was tried
            losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
            if self._plan.scales_loss:
                guarded(self._see_thrown_away)
            if self.again is not None:
                losses = guarded(self.again.losses, losses) or losses
            # One loss goes on as it came: the guard knows what a scaler gave by its identity.
            passed_on = losses[0] if isinstance(tensors, Tensor) else losses
            if self._patience is not None and compat.several_ranks():
                args, kwargs = guarded(carry_bad_losses, losses, args, kwargs) or (args, kwargs)
            else:
                guarded(self._see_losses, losses)
            if not guarded(self._is_to_be_scaled, losses, args, kwargs):
                owner = self._listener.recorder.scaling.scaler if self._scalers.scales else None
                self._differentiate(lambda: original(passed_on, *args, **kwargs), losses, owner)
                if self._patience is not None and not self._scalers.scales:
                    guarded(self._look_at_gradients)
                return None
            scaled = self._gained.scaled(losses)
            for loss, product in zip(losses, scaled, strict=True):
                self._listener.loss_scaled(loss, product, self._gained)
            guarded(self._find_strays, scaled)
            run = lambda: self._differentiate(lambda: original(scaled, *args, **kwargs), scaled, self._gained)  # noqa: E731
            self._gained.backward(run, self.leaves)
            guarded(self._look_at_gradients)
            guarded(self._hold_by_hand, losses)
            self._strays = []
            return None

        return backward

    def _differentiate(self, run: Callable[[], None], losses: tuple[Tensor, ...], scale: object | None) -> None:
        """Backward; where it leaves bad gradients that can be healed, those of the step made again."""
        again = self.gradients_again
        before = self._barrier.call(again.before, losses) if again is not None else None
        try:
            run()
        except RuntimeError as error:
            self._say_not_borne(error)
            raise
        if again is not None and before is not None:
            self._barrier.call(again.after, before, scale)

    def _say_not_borne(self, error: RuntimeError) -> None:
        if self._plan.dtype is not None and not self.mixes_by_itself() and is_of_types(error):
            said = first_line_of(error)
            self._ledger.failed(f"a backward pass does not go with gained autocast ({said}); {TRY_FORCING}")

    def _look_at_gradients(self) -> None:
        """Backward has returned: look before the script clips its gradients, which can hide an infinite one."""
        for optimizer in list(self._optimizers):
            gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            self._is_spoilt[optimizer] = bool(gradients) and not all_finite(gradients)
        held = {id(p) for optimizer in list(self._optimizers) for p in parameters_of(optimizer)}
        others = [p.grad for p in self._unheld(held) if p.grad is not None]
        self._is_spoilt_elsewhere = not all_finite(others)

    def _find_strays(self, losses: tuple[Tensor, ...]) -> None:
        known = {id(leaf) for leaf in self.leaves()}
        self._strays = [leaf for leaf in compat.leaves_behind(losses) if id(leaf) not in known]

    def _hold_by_hand(self, losses: tuple[Tensor, ...]) -> None:
        """An update that the script writes out cannot be held off: where the loss scale alone has spoilt it, it is by 0."""
        has_optimizer = any(not isinstance(optimizer, HandMade) for optimizer in self._optimizers)
        leaves = self._strays if has_optimizer else list(self.leaves())
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        is_good = all_finite(gradients)
        if not has_optimizer:
            self._gained.attempted(is_good)
        if is_good or self._gained.get_scale() <= 1.0 or not all(map(is_finite, losses)):
            return
        self._gained.attempted(False)
        with torch.no_grad(), compat.unseen():
            for gradient in gradients:
                gradient.zero_()
        self._ledger.done(
            "gave tensors that the script updates itself a gradient of 0 where the loss scale was too large"
        )

    def _see_thrown_away(self) -> None:
        """A loop that looks at its gradients itself, and leaves a step out, does not come to any optimizer's step."""
        spoilt = [optimizer for optimizer, is_bad in self._is_spoilt.items() if is_bad]
        if self._stepped_since_backward or not spoilt:
            return
        held = [p.grad for optimizer in spoilt for p in parameters_of(optimizer) if p.grad is not None]
        if all_finite(held):  # they were cleared: no window that still adds to them
            self._gained.attempted(False)
            self._is_spoilt.clear()

    def _see_losses(self, losses: tuple[Tensor, ...]) -> None:
        if self._stepped_since_backward or (self._bad_loss and self._is_cleared()):
            self._stepped_since_backward = self._bad_loss = False
        if self._patience is not None and not self._bad_loss:
            # Not as they are scaled: a loss may be finite, and too large for its type with its scale.
            plain = map(self._listener.recorder.scaling.unscaled, losses)
            self._bad_loss = not all(is_finite(loss) for loss in plain if compat.has_values(loss))
            if self._bad_loss and self._is_updated_elsewhere():
                self._ledger.failed("bad steps are not held off: what updates the weights is no torch.optim.Optimizer")

    def _is_cleared(self) -> bool:
        """Whether no gradient is left: an engine that skips a bad step by itself drops them, and calls no optimizer."""
        gradients = [leaf.grad for leaf in self.leaves() if leaf.grad is not None]
        with torch.no_grad(), compat.unseen():
            return all(g.layout == torch.strided and not g.any() for g in gradients)

    def _is_updated_elsewhere(self) -> bool:
        """Whether no optimizer of PyTorch's holds any weight of the models that were called."""
        trained = [
            p for root in self._roots.roots for p in compat.all_parameters(root) if p.requires_grad and not p.is_meta
        ]
        if not trained:
            return all(isinstance(optimizer, HandMade) for optimizer in self._optimizers)
        held = {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}
        return not any(id(p) in held for p in trained)

    def _watch_clear(self, original: Callable[..., None]) -> Callable[..., None]:
        """A loop that throws the gradients of a bad loss away has dealt with it."""

        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            self._bad_loss = False
            original(owner, *args, **kwargs)

        return zero_grad

    def _is_to_be_scaled(self, losses: tuple[Tensor, ...], args: Any, kwargs: Any) -> bool:
        if not self._plan.scales_loss or self._scalers.scales or not losses or self._is_searching:
            return False
        if kwargs.get("create_graph") or (len(args) > 2 and args[2]):
            self._ledger.failed("a backward pass with create_graph=True runs without a loss scale")
            return False
        made_since = [optimizer for optimizer in self._optimizers if optimizer not in self._older]
        if any(p.dtype == torch.float16 for o in made_since for p in parameters_of(o)):
            self._ledger.failed("the weights themselves are float16: their gradients get no loss scale")
            return False
        if not self._gained.is_in_use and self.mixes_by_itself():
            scale = max(factor_of(loss) for loss in losses)
            if is_usual_scale(scale):
                self._scalers.scales = True
                self._ledger.done(
                    f"left the loss scale to the script, which multiplies its losses by {scale:.0f} itself"
                )
                return False
        self._ledger.done("gained a dynamic loss scale")
        return True

    def leaves(self) -> Iterator[Tensor]:
        """Whatever may have a gradient: what optimizers hold, other parameters of models, inputs of models."""
        seen: set[int] = set()
        inputs = [t for ref in self._roots.inputs if (t := ref()) is not None]
        for optimizer in list(self._optimizers):
            for parameter in parameters_of(optimizer):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter
        for leaf in (*self._unheld(seen), *inputs, *self._strays):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf

    def _unheld(self, held: set[int]) -> list[Tensor]:
        """Parameters of models that no optimizer holds; looked for again when there are new ones of either."""
        roots = self._roots.roots
        now = (len(roots), len(held))
        if self._stray[0] != now:
            found = {
                id(p): p for root in roots for p in compat.all_parameters(root) if p.requires_grad and id(p) not in held
            }
            self._stray = (now, list(found.values()))
        return self._stray[1]

    # --- the optimizers' steps ----------------------------------------------------------------------------------------

    def _watch_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(optimizer, *args, **kwargs)
            self._adopt(optimizer)

        return __init__

    def _adopt(self, optimizer: Optimizer) -> None:
        """An optimizer exists: its steps are to be asked about."""
        self._optimizers.add(optimizer)
        kind = type(optimizer)
        if self._patches is not None and not hasattr(kind.step, "_ampguard_holds"):
            self._patches.replace(kind, "step", self._watch_step)

    def _watch_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if id(optimizer) in self._stepping or torch.compiler.is_compiling():
                return original(optimizer, *args, **kwargs)
            self._stepping.add(id(optimizer))
            try:
                return self._attempt(original, optimizer, args, kwargs)
            finally:
                self._stepping.discard(id(optimizer))

        step.__dict__["_ampguard_holds"] = True
        inner = getattr(original, "__wrapped__", None)
        if inner is not None:  # who looks through PyTorch's hooks finds what he looks for
            step.__dict__["__wrapped__"] = inner
        return step

    def _attempt(self, original: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._on_first_step is not None:
            first, self._on_first_step = self._on_first_step, None
            self._barrier.call(first)
        self._stepped_since_backward = True
        if self._patience is not None and not self._scalers.stepping:
            self._patience.attempting()
        is_scaled = self._plan.scales_loss and not self._scalers.scales
        if self._scalers.stepping and self._patience is not None and self._bad_loss:
            return None  # the gradients of a bad loss may be finite: where a part of it has none that overflowed
        if self._scalers.stepping:  # the script's scaler has looked at the gradients
            self._scalers.has_stepped = not compat.is_told_to_skip(optimizer)
            return self._update(original, optimizer, args, kwargs)
        if is_scaled and not self._gained.is_in_use and any(p.grad is not None for p in parameters_of(optimizer)):
            self._barrier.call(self._say_unscaled)
        if not (is_scaled or self._patience is not None or self.weights is not None):
            return original(optimizer, *args, **kwargs)
        closure, args, kwargs = without_closure(args, kwargs)
        result = None
        if closure is not None:
            if not calls_closure_once(optimizer):
                unscaled = ", and get no loss scale" if is_scaled else ""
                self._ledger.failed(
                    f"steps of {type(optimizer).__name__} are not held off{unscaled}: it calls its closure by itself"
                )
                return self._search(lambda: original(optimizer, closure, *args, **kwargs))
            with torch.enable_grad():
                result = closure()
            self._stepped_since_backward = True
        if self._barrier.call(self._is_good, optimizer) is not False:
            self._gained.attempted(True)
            if self._patience is not None:
                self._stepped(optimizer, self._patience)
            returned = self._update(original, optimizer, args, kwargs)
            return returned if closure is None else result
        self._hold(optimizer, is_scaled)
        return result

    def _search(self, step: Callable[[], Any]) -> Any:
        """A step that evaluates losses by itself. An overflow of scaled gradients would stay in its history for good."""
        self._is_searching = True
        try:
            return step()
        finally:
            self._is_searching = False

    def _watch_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What `torch.func` differentiates goes through it as well."""

        @functools.wraps(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            if not self._differentiates_otherwise:
                self._differentiates_otherwise = self._plan.scales_loss and not self._listener.recorder.paused
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                if not self._listener.recorder.paused:
                    self._say_not_borne(error)
                raise

        return grad

    @property
    def scale_is_gained(self) -> bool:
        """Whether the loss scale is ours: there is no scaler in the script that could be given another one."""
        return self._gained.is_in_use and not self._scalers.scales

    def ended(self) -> None:
        """The run is over: perhaps all its gradients came from elsewhere, and it has no optimizer that would have shown it."""
        if self._differentiates_otherwise and not self._gained.is_in_use and not self._scalers.scales:
            self._say_unscaled()

    def _say_unscaled(self) -> None:
        """There are gradients, and no backward pass has made them that could be scaled."""
        if not self._ledger.could_not:
            self._ledger.failed("gradients that come from torch.func or torch.autograd.grad get no loss scale")

    def _update(self, original: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.weights is None:
            return original(optimizer, *args, **kwargs)
        with self.weights.updating(optimizer):
            return original(optimizer, *args, **kwargs)

    def _is_good(self, optimizer: Optimizer) -> bool:
        if self._is_spoilt.pop(optimizer, False) or self._bad_loss:
            return False
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if self._patience is None and not compat.in_backward() and not self._is_spoilt_elsewhere:
            return True  # they were looked at as backward returned
        return all_finite(gradients)

    def _hold(self, optimizer: Optimizer, is_scaled: bool) -> None:
        self._gained.attempted(False)
        self._ledger.held_off += 1
        self._listener.held_off(optimizer, self._gained if is_scaled and not self._bad_loss else None)
        if self._patience is not None:
            self._held_off(optimizer, self._patience, self._gained.get_scale() if is_scaled else None)

    def _skipped_by_scaler(self, optimizer: Optimizer, scale: float, was_skipped: bool) -> None:
        """A scaler of the script's was to let an optimizer step."""
        self._stepped_since_backward = True  # one that was skipped has not come to the optimizer
        if self._patience is None:
            return
        if not was_skipped:
            self._stepped(optimizer, self._patience)
            return
        self._ledger.held_off += 1
        self._held_off(optimizer, self._patience, scale)

    def _stepped(self, optimizer: Optimizer, patience: Patience) -> None:
        patience.stepped(optimizer)
        if self._buffers is not None:
            self._buffers.stepped()

    def _held_off(self, optimizer: Optimizer, patience: Patience, scale: float | None) -> None:
        what = "the loss" if self._bad_loss else bad_gradients(optimizer, self._roots.parameter_names())
        if self._buffers is not None:
            # Gradients that overflow under a loss scale say nothing against the batch: its statistics stay, as GradScaler has it.
            is_settling = not self._bad_loss and scale is not None and scale > 1.0
            self._barrier.call(self._buffers.put_back, is_settling)
        patience.held_off(optimizer, what, scale)
