"""Where the vital signs are read: the backward call, the scaler, the gradient norm, the optimizers' steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.patches import Patches
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.sampling.keeper import StretchKeeper
from ampguard.capture.sampling.vitals import Vitals


class DynamicsProbes:
    """Installs the probes of one run, and takes them out again."""

    def __init__(
        self,
        vitals: Vitals,
        keeper: StretchKeeper,
        barrier: FaultBarrier,
        recorder: FlightRecorder,
        stepping: Callable[[Optimizer], None],
    ) -> None:
        self._vitals = vitals
        self._keeper = keeper
        self._barrier = barrier
        self._recorder = recorder
        self._stepping = stepping
        self._patches = Patches()
        self._handles: list[Any] = []
        self._scaling: list[bool] = []
        self._last: weakref.ref[Optimizer] | None = None

    def install(self) -> None:
        self._patches.replace(compat.GRAD_SCALER, "unscale_", self._watch_unscale)
        self._patches.replace(compat.GRAD_SCALER, "step", self._watch_scaler_step)
        norm = compat.total_norm_function()
        if norm is not None:
            self._patches.replace(*norm, self._watch_norm)
        add_before, add_after = compat.optimizer_step_hooks()
        self._handles += [add_before(self._before), add_after(self._after)]

    def undo(self) -> None:
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def _is_on(self) -> bool:
        recorder = self._recorder
        is_others = recorder.turns.are_several and recorder.turns.passes_over()
        return recorder.active and not self._barrier.tripped and not is_others

    def _watch_unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        scaling = self._recorder.scaling

        @functools.wraps(original)
        def unscale_(scaler: Any, optimizer: Optimizer) -> Any:
            result = original(scaler, optimizer)
            scaling.is_unscaled = True
            return result

        return unscale_

    def _watch_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        scaling, recorder, barrier, turns = self._scaling, self._recorder, self._barrier, self._recorder.turns

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active or barrier.tripped or (turns.are_several and turns.passes_over()):
                return original(scaler, optimizer, *args, **kwargs)
            scaling.append(True)
            try:
                result = original(scaler, optimizer, *args, **kwargs)
                if scaling[-1]:  # the optimizer's own hooks did not run
                    is_skipped = isinstance(optimizer, Optimizer) or not self._barrier.call(
                        compat.let_step_unseen, scaler, optimizer
                    )
                    self._barrier.call(self._vitals.after_update, optimizer, is_skipped)
                    if is_skipped:
                        self._barrier.call(self._keeper.before_update, optimizer, True)
            finally:
                scaling.pop()
            return result

        return step

    def _watch_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            norm = original(tensors, norm_type, *args, **kwargs)
            if self._is_on and norm_type == 2.0 and not torch.compiler.is_compiling():
                self._barrier.call(self._vitals.norm_seen, norm)
            return norm

        return get_total_norm

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if not recorder.active or (recorder.turns.are_several and recorder.turns.passes_over()):
            return
        is_known = self._last is not None and self._last() is optimizer
        if self._vitals.looks or not is_known:
            self._barrier.call(self._before_update, optimizer)
        self._barrier.call(self._keeper.before_update, optimizer, bool(self._scaling))

    def _before_update(self, optimizer: Optimizer) -> None:
        if self._last is None or self._last() is not optimizer:
            self._stepping(optimizer)
            self._last = weakref.ref(optimizer)
        self._vitals.before_update(optimizer, bool(self._scaling))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if not recorder.active or (recorder.turns.are_several and recorder.turns.passes_over()):
            return
        flag: Tensor | None = None
        if self._scaling:
            self._scaling[-1] = False
            flag = compat.held_found_inf(optimizer) if compat.FOUND_INF in optimizer.__dict__ else None
        if flag is None and not self._vitals.weights.is_open:
            self._vitals.stepped()
        else:
            self._barrier.call(self._vitals.after_update, optimizer, False if flag is None else flag)
