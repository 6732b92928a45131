"""What shows only over some iterations: a scaler that is not needed, a scheduler that runs ahead, a checkpoint.

Also a region of autocast that outlasts a step, in which the casts of the old weights go on being used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.compiled.functions import hides_autocast
from ampguard.capture.protocol.checkpoints import Contents, contents_of, moments_in, spoiled
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.idle_scaler import IdleScalers
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.moves import Frame, Moves
from ampguard.capture.protocol.renewed import RenewedScalers
from ampguard.capture.protocol.schedules import Schedules
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.capture.record import Line
from ampguard.protocol.events import Breach

NEEDLESS_STEPS = 3
JOINING_STEPS = 8
"""Steps for which autocast is watched when a scaler joins late."""
NEEDLESS_LIVE_STEPS = 64
"""Steps without any float16 after which a scaler is called needless while the run goes on; before, at its end."""
UNNAMED = "a stream"
"""The path of a checkpoint that was not written to a file with a name."""


class Habits:
    """Everything that needs no state machine. Every method is called through the fault barrier."""

    def __init__(self, moves: Moves, models: Models) -> None:
        self._moves = moves
        self._models = models
        self._regions: dict[str, int] = {}
        """Regions of autocast entered with gradients on, by their type."""
        self.region: Line | None = None
        """Where the outermost region was entered that is in force."""
        self.watches_regions = True
        """False once enough steps have passed, and no region is in force at a step."""
        self._stepped_in_region: dict[OptimizerWatch, Line | None] = {}
        self._stale: dict[OptimizerWatch, tuple[Breach, int]] = {}
        """Old casts were used after one step; whether the region outlasts a second one is not known yet."""
        self.schedules = Schedules(moves)
        self.idle = IdleScalers(moves, models)
        self.renewed = RenewedScalers(moves)
        self._told_needless: set[ScalerWatch] = set()
        self._suspected: dict[ScalerWatch, int] = {}
        """Scalers that look needless, and since which step."""
        self._joined: dict[ScalerWatch, int] = {}
        """Scalers that began in the middle of a run and are not judged yet: how many steps are left for it."""
        self.saved_without: tuple[Breach, int] | None = None
        """A checkpoint without the scaler was written just now."""
        self._model_loaded = False

    # --- autocast -----------------------------------------------------------------------------------------------------

    def entered_autocast(self, region: Any, frame: Frame) -> None:
        """A region of autocast begins, in steps in which it is counted what the regions are of."""
        if not compat.is_region_on(region):
            return
        if torch.is_grad_enabled():
            kind = str(region.fast_dtype).removeprefix("torch.")
            self._regions[kind] = self._regions.get(kind, 0) + 1
            self.idle.entered(kind)

    def cache_cleared(self) -> None:
        """The outermost region ends: the casts are forgotten."""
        self._stepped_in_region.clear()
        stale, self._stale = self._stale, {}
        for breach, step in stale.values():
            breach.facts["within_iteration"] = True
            self._moves.tell([breach], step)

    def stepped(self, watch: OptimizerWatch) -> None:
        """Weights have changed; inside a region of autocast their casts have not."""
        self._joined = {of: left - 1 for of, left in self._joined.items() if left > 1}
        if watch in self._stale:
            breach, step = self._stale.pop(watch)
            self._moves.tell([breach], step)
        device = next((p.device.type for p in watch.sample), "cpu")
        if self.region is not None and torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
            self._moves.routine.spoil()
            self._stepped_in_region.setdefault(watch, self._moves.machine.ledger(watch).stepped_at)

    def differentiated(self, reached: tuple[Any, ...]) -> None:
        """A backward pass: its forward pass used casts from before the step."""
        for watch in reached if self._stepped_in_region else ():
            if watch not in self._stepped_in_region:
                continue
            weights = [p for p in watch.parameters() if p.dtype is torch.float32 and p.dim() > 1]
            if weights:
                stepped = self._stepped_in_region[watch]
                facts = {"stale": True, "weights": len(weights), "parameters": weights}
                breach = Breach("autocast-cache", watch, None, self.region, stepped, None, facts)
                self._stale[watch] = breach, self._moves.recorder.steps.count

    # --- a scaler that does nothing ---------------------------------------------------------------------------------

    @property
    def suspects_scaler(self) -> bool:
        """Whether some scaler looks needless so far, or is not judged yet: regions of autocast are to be counted on."""
        return bool(self._suspected or self._joined or self.idle.suspected)

    def after_scaler_step(self, of: ScalerWatch, watch: OptimizerWatch) -> None:
        """Has any forward pass been in float16 at all?"""
        steps = of.steps
        if steps >= NEEDLESS_STEPS:
            self._joined.pop(of, None)
        if steps < NEEDLESS_STEPS or not of.is_enabled or of in self._told_needless:
            return
        if steps != NEEDLESS_STEPS and (of not in self._suspected or steps & (steps - 1)):
            return
        breach = self._needless(of, watch)
        if breach is None:
            self._told_needless.add(of)
            self._suspected.pop(of, None)
            self._moves.listener.on_suspicion(("needless", of), None, 0)
        elif steps < NEEDLESS_LIVE_STEPS:
            first = of.first_step if of.first_step is not None else self._moves.attempt
            since = self._suspected.setdefault(of, first)
            self._moves.listener.on_suspicion(("needless", of), breach, since)
        else:
            self._told_needless.add(of)
            self._moves.listener.on_suspicion(("needless", of), None, 0)
            self._moves.tell([breach], self._suspected.pop(of))

    def _needless(self, of: ScalerWatch, watch: OptimizerWatch) -> Breach | None:
        """The numbers that say so; None where something is computed in float16, or nothing is known."""
        called = {name.removeprefix("torch.") for name in self._models.autocasts}
        roots = self._models.roots()
        tensors = {id(t): t for t in (*watch.parameters(), *self._models.parameters())}
        held = dtype_counts(tensors.values())
        buffers = dtype_counts(b for module, _ in roots for b in compat.all_buffers(module))
        cast = {str(d).removeprefix("torch.") for m, _ in roots for d in compat.sharded_compute_dtypes(m)}
        self._models.look()
        if not roots or self._models.made_half or "float16" in {*self._regions, *called, *held, *buffers, *cast}:
            return None
        if any(hides_autocast(module) for module, _ in roots):
            return None
        is_bf16 = "bfloat16" in {*self._regions, *called, *held, *buffers, *cast}
        first = of.first_scale
        facts = {
            "dtype": "bfloat16" if is_bf16 else "float32",
            "steps": of.steps,
            "skipped": max(watch.steps - watch.taken, 0),
            "first_scale": float(first) if first is not None else None,
            "scale": float(of.current_scale()),
            "regions": dict(self._regions),
            "parameter_dtypes": held,
        }
        return Breach("needless-scaler", watch, of, of.made_or_used_at, of.made_or_used_at, None, facts)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def saving(self, saved: Any, file: Any, frame: Frame) -> None:
        """`torch.save`: are the weights finite, and is the scaler among them?"""
        found = contents_of(saved)
        where = script_line(frame)
        path = (
            str(Path(os.fspath(file))) if isinstance(file, (str, os.PathLike)) else str(getattr(file, "name", UNNAMED))
        )
        trained = {compat.storage_key(p) for w in self._moves.watches.optimizers for p in w.parameters()}
        with compat.unseen():
            bad = spoiled(found, trained, self._models.state)
        step = max(self._moves.recorder.steps.count - 1, 0)
        if bad:
            facts = {
                "path": path,
                "names": [name for name, *_ in bad],
                "values": [t for _, t, _ in bad],
                "largest": max((largest for *_, largest in bad if largest is not None), default=None),
                "of": len(found.weights),
                "last_good_step": self._moves.recorder.judge.last_good_step,
                "bad_since": self._moves.recorder.judge.bad_since,
            }
            self._moves.tell([Breach("nonfinite-parameter", None, None, None, where, None, facts)], step)
        used = [s for s in self._moves.watches.scalers if s.is_enabled and s.uses]
        if found.has_scaler:
            for scaler in used:
                scaler.state_asked = True
            return
        used = self._scalers_of(found, used)
        if found.has_optimizer and used and not any(s.state_asked for s in used):
            own = used[0].ref()
            facts = {
                "path": path,
                "scale": float(used[0].current_scale()),
                "has_moved": own is None or not compat.is_at_initial_scale(own),
                "has_model": found.has_model,
            }
            self.saved_without = (Breach("scaler-not-saved", None, used[0], used[0].created, where, None, facts), step)
            self._moves.listener.on_suspicion(("saved",), self.saved_without[0], step)

    def _scalers_of(self, found: Contents, scalers: list[ScalerWatch]) -> list[ScalerWatch]:
        """Those that serve the optimizers whose weights or state are saved.

        Where nobody is known to update them (copies), all there are, unless an optimizer goes without a scaler.
        """
        memory = {compat.storage_key(t) for _, t in found.weights} - {0}
        stepping = [w for w in self._moves.watches.optimizers if w.steps]
        holders = [w for w in stepping if any(compat.storage_key(p) in memory for p in w.parameters())]
        holders = holders or [w for w in stepping if found.moments & moments_in(getattr(w.ref(), "state", None))]
        if not holders and any(w.scaled_by is None for w in stepping):
            return []
        return [s for s in scalers if not holders or any(w.scaled_by is s for w in holders)]

    def tick(self) -> None:
        """An iteration after a checkpoint without a scaler: nobody has saved it beside."""
        if self.saved_without is None:
            return
        breach, step = self.saved_without
        if self._moves.attempt > step + 1:
            self.saved_without = None
            self._moves.listener.on_suspicion(("saved",), None, 0)
            if isinstance(breach.scaler, ScalerWatch) and not breach.scaler.state_asked:
                self._moves.tell([breach], step)

    def state_asked(self, scaler: Any) -> None:
        """`scaler.state_dict()`: somebody saves it."""
        self._moves.watches.scaler(scaler).state_asked = True
        if self.saved_without is not None:
            self.saved_without = None
            self._moves.listener.on_suspicion(("saved",), None, 0)

    def optimizer_loaded(self, optimizer: Any, state: Any, frame: Frame) -> None:
        """An optimizer goes on from a checkpoint."""
        if isinstance(state, dict) and state.get("state"):
            self._moves.watches.optimizer(optimizer).resumed_at = script_line(frame)

    def first_use(self, of: ScalerWatch) -> None:
        """A scaler begins to scale: does it begin anew beside an optimizer that goes on?"""
        of.first_scale = of.current_scale()
        of.first_scale.keep()
        of.first_step = self._moves.recorder.steps.count
        if not self.watches_regions:
            self._joined[of] = JOINING_STEPS
            self.watches_regions = True
        resumed = [w for w in self._moves.watches.optimizers if w.resumed_at is not None and w.steps == 0]
        if resumed and not of.loaded and of.is_enabled:
            facts = {"resumed": True, "scale": float(of.current_scale())}
            breach = Breach("scaler-not-saved", resumed[0], of, of.created, resumed[0].resumed_at, None, facts)
            self._moves.tell([breach], self._moves.recorder.steps.count)


def dtype_counts(tensors: Iterable[Tensor]) -> dict[str, int]:
    """How many of the floating-point tensors have which type."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            counts[kind] = counts.get(kind, 0) + 1
    return counts
