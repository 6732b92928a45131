"""Calls of the script's models on low-precision weights: floating inputs go in like the weights, float32 comes out."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.recorder import FlightRecorder
from ampguard.engine.casting import cast_floats, is_castable, map_tensors
from ampguard.engine.precision.weights import inputs_cast_to
from ampguard.numerics import is_finite
from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import Variant
from ampguard.run.overrides.cast_weights import CastWeights
from ampguard.run.overrides.not_borne import REFUSALS, is_of_types
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.regions import Regions, device_of


class LowCalls:
    """Around each call of a root module that has weights.

    Where the module's own code brings float32 tensors to them (`self.head(x.float())`, an embedding of the time), the call
    is made again, and so are its later ones, inside an autocast region of their type; where it fails there too, in
    float32, which is said.
    """

    def __init__(
        self, weights: CastWeights, plan: Plan, regions: Regions, recorder: FlightRecorder, barrier: FaultBarrier
    ) -> None:
        self._regions = regions
        self._has_told = False
        self._has_run: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Roots that have returned from a call on low-precision weights."""
        self._mixed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Roots whose own code brings float32 tensors to these weights."""
        self._weights = weights
        self._plan = plan
        self._recorder = recorder
        self._barrier = barrier

    def call(self, run: Callable[[Any, Any], Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """`run(args, kwargs)`, which is the module's call, on low-precision weights."""
        replay = running_replay()
        if replay is not None:
            return self._call_in_replay(run, module, args, kwargs, replay)
        self._barrier.call(self._settle, module)
        tells_forward, self._recorder.tells_forward = self._recorder.tells_forward, False  # it was told above
        try:
            return self._call(run, module, args, kwargs)
        finally:
            self._recorder.tells_forward = tells_forward or self._recorder.tells_forward

    def _call(self, run: Callable[[Any, Any], Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        own, dtype = self._weights.types_of(module)
        leave = self._barrier.call(self._weights.enter, module, None)
        if leave is None:
            return run(args, kwargs)
        if dtype == torch.float32:
            return self._lifted(run, module, args, kwargs, own, leave)
        self._barrier.call(self._tell_precision, module, args, kwargs)
        is_mixed = module in self._mixed
        random_numbers = torch.get_rng_state() if module not in self._has_run else None
        try:
            with _quiet_compiler(module), self._region(module, args, kwargs, dtype) if is_mixed else _no_region():
                output = run(*cast_floats((args, kwargs), dtype))
        except REFUSALS as error:
            if not is_of_types(error):
                raise
            refusal = error
        else:
            self._has_run.add(module)
            return cast_floats(output, torch.float32)
        finally:
            leave()
        if random_numbers is not None:
            torch.set_rng_state(random_numbers)
        if is_mixed:
            self._barrier.call(self._weights.give_up, module, refusal, not self._has_run)
            return run(args, kwargs)
        self._mixed.add(module)
        return self._call(run, module, args, kwargs)

    def _lifted(
        self,
        run: Callable[[Any, Any], Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        own: torch.dtype,
        leave: Callable[[], None],
    ) -> Any:
        """The call on float32 casts of weights that the script made low; its results are the script's type, where they fit."""
        random_numbers = torch.get_rng_state() if module not in self._has_run else None
        try:
            with _quiet_compiler(module), inputs_cast_to(module, torch.float32) as are_cast:
                output = run(*cast_floats((args, kwargs), torch.float32))
        except BaseException as error:
            self._weights.forget_call(module)
            if self._plan.is_healed or random_numbers is None or not is_of_types(error):
                raise  # a fix that is not borne is taken back
            refusal = error
        else:
            self._has_run.add(module)
            return output if are_cast else map_tensors(lambda t: _as_it_fits(t, own), output)
        finally:
            leave()
        torch.set_rng_state(random_numbers)
        self._barrier.call(self._weights.keep_own, module, refusal)
        return run(args, kwargs)

    def _region(
        self, module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[None]:
        self._barrier.call(self._weights.mix, module)
        device = device_of(module, args, kwargs)
        return self._regions.around(self._regions.make(device, dtype)) if device is not None else _no_region()

    def _tell_precision(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Let the guard know of a low precision that no region of autocast shows: a scaler has something to do here."""
        device = device_of(module, args, kwargs)
        if self._has_told or device is None or not torch.is_grad_enabled():
            return
        self._has_told = True
        with self._regions.make(device, self._plan.weights_dtype):
            pass

    def _settle(self, module: nn.Module) -> None:
        """What is bad by now is explained while the models still hold the script's own weights."""
        recorder = self._recorder
        if not recorder.active or recorder.paused:
            return
        if recorder.log.has_open_events or recorder.judge.has_open_questions:
            recorder.judge.settle(module)
        if recorder.tells_forward:
            recorder.listener.on_forward()

    def _call_in_replay(
        self, run: Callable[[Any, Any], Any], module: nn.Module, args: Any, kwargs: Any, replay: Variant
    ) -> Any:
        """The recorded arguments were cast already, and so were the results that are recorded after them.

        Not through the barrier, which would hide the casts from the mode of the replay.
        """
        _, dtype = self._weights.types_of(module)
        leave = self._weights.enter(module, replay)
        try:
            if leave is None or dtype != torch.float32:
                return run(args, kwargs)
            with inputs_cast_to(module, dtype):  # the step may be from before the fix
                return run(*cast_floats((args, kwargs), dtype))
        finally:
            if leave is not None:
                leave()


def running_replay() -> Variant | None:
    """How the guard runs the step again, where it does so now."""
    return next((mode.variant for mode in reversed(compat.dispatch_modes()) if isinstance(mode, ReplayMode)), None)


def _as_it_fits(result: Tensor, own: torch.dtype) -> Tensor:
    """A result in the type that the script's code is written for; in float32 where that cannot hold it.

    So are losses, which keep the digits that were asked for: a tensor without dimensions does not change another's type.
    """
    if not is_castable(result) or result.dtype == own or not result.dim():
        return result
    low = result.to(own)
    return low if is_finite(low) or not is_finite(result) else result


def _no_region() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _quiet_compiler(module: nn.Module) -> Iterator[None]:
    """The compiler asks every weight for its `.grad`, about which PyTorch warns where the weight is a cast."""
    if not compat.any_compiled(module):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield
