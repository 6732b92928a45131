"""All overrides of one run: installed over the guard's probes, taken out before them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampguard import compat, numerics
from ampguard.capture.barrier import FaultBarrier, captures_underway
from ampguard.capture.patches import Patches
from ampguard.capture.record import BadResult
from ampguard.incident import Incident
from ampguard.protocol.events import Breach
from ampguard.run.overrides.again import Again
from ampguard.run.overrides.as_options import in_options
from ampguard.run.overrides.asked import OnNonfinite, Overrides
from ampguard.run.overrides.cast_weights import ON_CASTS, CastWeights, low_by_itself
from ampguard.run.overrides.evaluations import Evaluations
from ampguard.run.overrides.forced import Forced
from ampguard.run.overrides.gradients_again import GradientsAgain
from ampguard.run.overrides.healed_ranks import HealedRanks
from ampguard.run.overrides.healing import PRECISION_OF, Healer
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.lightning import LightningPlugins
from ampguard.run.overrides.lines import LinesInFloat32
from ampguard.run.overrides.low_calls import LowCalls
from ampguard.run.overrides.memory import PeakMemory
from ampguard.run.overrides.not_borne import NotBorne
from ampguard.run.overrides.patience import Patience
from ampguard.run.overrides.places import why_weights_stay
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.reads import Reads
from ampguard.run.overrides.refused import refused
from ampguard.run.overrides.regions import Regions
from ampguard.run.overrides.remaking import Remaking
from ampguard.run.overrides.roots import RootCalls
from ampguard.run.overrides.scalers import Scalers
from ampguard.run.overrides.step_again import StepAgain
from ampguard.run.overrides.updates import Listener, Updates
from ampguard.stderr import stream

GAINED = "gained autocast around calls of the script's models"


class RunningOverrides:
    """What was asked for, while the script runs."""

    def __init__(
        self,
        asked: Overrides,
        on_nonfinite: OnNonfinite,
        listener: Listener,
        patience: Patience | None,
    ) -> None:
        """`patience`: None where an engine holds off its steps itself."""
        self._asked = asked
        self._listener = listener
        self._patience = patience
        self._healed_until = 0
        self._reads: Reads | None = None
        self._is_installed = False
        self._on_nonfinite = on_nonfinite
        self.ledger = Ledger()
        self.memory = PeakMemory()
        self._patches = Patches()
        self._plan = plan = Plan(asked.precision)
        self._regions = Regions(plan, self.ledger)
        self._forced = Forced(asked.force_fp32, self.ledger, plan)
        self._lines = LinesInFloat32()
        self._barrier = FaultBarrier(self._on_fault, acts_in_captures=True)
        not_borne = NotBorne(plan, self.ledger, self._forced)
        self._roots = RootCalls(self._regions, not_borne, self._barrier, self._on_root, self._on_gain)
        self._evaluations: Evaluations | None = None
        if asked.compare_eval:
            self._evaluations = Evaluations(
                asked.compare_eval, plan, self._regions, not_borne, listener.recorder, self.ledger
            )
            self._roots.evaluations = self._evaluations
        self._scalers = Scalers(plan, self.ledger)
        self._lightning = LightningPlugins(plan, self._regions, self.ledger)
        self._healer = Healer(plan, self._roots, self._forced, self._lines, self.ledger, self._lift_as_fix)
        holds_off = patience if on_nonfinite in ("skip", "heal") else None
        silent = FaultBarrier(self._on_fault)  # to look at losses and gradients would end a capture
        self._updates = Updates(
            plan, self._scalers, self._roots, holds_off, silent, self.ledger, listener, self._forced.first_step
        )
        self._roots.on_direct_forward = self._on_direct_forward
        self._updates.mixes_by_itself = lambda: bool(self._regions.of_script) or self._meets_low_weights
        self._meets_low_weights = False
        """Whether the script has made weights of a model low itself."""
        self._calls_gained = 0
        """Calls of models around which autocast was gained, before the script has opened any region itself."""
        self._weights: CastWeights | None = None
        if plan.weights_dtype != torch.float32:
            self._updates.weights = self._cast_weights()
        if on_nonfinite == "heal":
            self.begin_healing()

    def begin_healing(self) -> None:
        """Apply the fixes of what is explained from here on."""
        self._on_nonfinite = "heal"
        if self._roots.again is None:
            recorder = self._listener.recorder
            stays_out = lambda: recorder.paused or bool(captures_underway) or compat.several_ranks()  # noqa: E731
            healer = self._healer
            self._roots.again = Again(
                self.ledger, self._listener.output_is_bad, stays_out, healer.take_back, healer.is_borne
            )
            remaking = Remaking(recorder, self._plan, self._lines, self.ledger, self._heal_more, healer.did_not_help)
            self._updates.again = again = StepAgain(remaking)
            self._updates.gradients_again = gradients = GradientsAgain(remaking, self._updates.leaves)
            self._scalers.lowered = gradients.scale.updated
            self._roots.on_return = self._root_returned
            self._reads = Reads(recorder.judge, self._barrier, again.read)
            if self._is_installed:
                self._reads.install(self._patches)

    def _cast_weights(self) -> CastWeights:
        """Let models run on casts of their weights."""
        weights = self._weights = CastWeights(self._plan, self.ledger)
        recorder = self._listener.recorder
        self._roots.low_calls = LowCalls(weights, self._plan, self._regions, recorder, self._barrier)
        return weights

    def _lift_as_fix(self) -> None:
        self._plan.is_healed = True
        self._lift_weights()

    def _lift_weights(self) -> None:
        self._plan.lifts_own_weights = True
        if self._weights is None:
            self._cast_weights().install(self._patches)

    def install(self) -> None:
        for part in (self._regions, self._roots, self._scalers, self._lightning, self._updates):
            part.install(self._patches)
        if self._weights is not None:
            self._weights.install(self._patches)
        if self._reads is not None:
            self._reads.install(self._patches)
        self._is_installed = True

    def undo(self, has_failed: bool = False) -> None:
        """Put back every patched attribute; whatever of the overrides named nothing is said.

        `has_failed`: the script ended by an error; before its first model was called, there was nothing to override yet.
        """
        self._lightning.undo()
        self._patches.undo()
        self._lines.undo()
        self._forced.end()
        if self._weights is not None:
            self._weights.undo()
        if self._patience is not None:
            self._patience.close()
        if self._updates.gradients_again is not None:
            self._updates.gradients_again.scale.close()
        self._updates.ended()
        if not has_failed or self._roots.has_seen_any:
            self._say_what_never_came()

    def in_options(self, incident: Incident) -> Incident:
        """An incident whose fixes are told as options, where it was an option that made the precision low."""
        precision = self._asked.precision
        if precision is None or precision == "fp32":
            return incident
        is_gained = not self._regions.of_script
        return in_options(incident, precision, is_gained, self._updates.scale_is_gained)

    def heal(self, incident: Incident) -> None:
        """An incident was explained."""
        self._heal(self._healer.heal, incident)

    def heal_again(self, incident: Incident) -> None:
        """It has come back: in another model, or because its fix was not enough."""
        self._heal(self._healer.heal_again, incident)

    def _heal(self, apply: Callable[[Incident], object], incident: Incident) -> None:
        if self._on_nonfinite == "heal":
            before = len(self.ledger.healed)
            self._barrier.call(self._share_fixes)
            self._barrier.call(apply, incident)
            if len(self.ledger.healed) > before:
                self._healed_until = self._listener.events()

    def _share_fixes(self) -> None:
        """From now on ranks tell each other of their fixes, in the run folder."""
        if self._healer.shared is None and compat.several_ranks():
            from ampguard.run.session import guarding

            session = guarding()
            if session is not None and session.path is not None:
                self._healer.shared = HealedRanks(session.path, torch.distributed.get_rank(), self._healer.take)

    def _look_at_other_ranks(self) -> None:
        self._share_fixes()
        if self._healer.shared is not None and self._healer.shared.look():
            self._healed_until = self._listener.events()

    def _root_returned(self) -> None:
        if self._lines.are_forced and torch.is_grad_enabled():
            self._listener.keep_taping()

    def _heal_more(self, step: int) -> bool:
        is_done = self._healer.heal_more(step)
        if is_done:
            self._healed_until = self._listener.events()
        return is_done

    def is_own_doing(self, breach: Breach) -> bool:
        """Whether a fix that was applied explains it: with autocast in bfloat16 the script's scaler has nothing to do."""
        return breach.cause == "needless-scaler" and any(
            healed["action"] in PRECISION_OF for healed in self.ledger.healed
        )

    def was_before_healing(self, bad: BadResult) -> bool:
        """Whether a bad result was computed before the last fix was applied: run again, it would be finite.

        The fix may be another rank's, whose bad loss has spoilt this one's gradients.
        """
        if self._on_nonfinite == "heal" and compat.several_ranks():
            self._barrier.call(self._look_at_other_ranks)
        return max((event.index for event in bad.record.events), default=0) < self._healed_until

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {
            "precision": self._asked.precision,
            "force_fp32": list(self._asked.force_fp32),
            "in_float32": list(self._forced.names),
            "on_nonfinite": self._on_nonfinite,
            **self.ledger.as_dict(),
            "peak_memory_mib": self.memory.mib(),
            **({"evaluation": self._evaluations.as_dict()} if self._evaluations is not None else {}),
        }

    def _on_root(self, module: nn.Module, parts: dict[str, nn.Module]) -> None:
        self._forced.see(module, parts)
        if not self._plan.is_set:
            return
        if self._plan.dtype is not None:
            for name, part, why in refused(parts, self._plan.dtype, self._regions):
                if self._forced.force([(name, part)], cast_back=True):
                    self.ledger.done(why)
        self._see_types(module)

    def _see_types(self, module: nn.Module) -> None:
        """A model whose weights are not float32 by the script's own doing: what of it can be another type, and what not."""
        name, types = type(module).__name__, {p.dtype for p in compat.all_parameters(module) if p.is_floating_point()}
        low = next(filter(numerics.is_low_precision, types), None)
        self._meets_low_weights = self._meets_low_weights or low is not None
        if low is not None:
            stays = low_by_itself(module, low)
            if low in (self._plan.dtype, self._plan.weights_dtype):
                stays += ": it computes in that type already, and its updates are rounded as before"
            elif types == {low} and self._plan.weights_dtype == torch.float32 and why_weights_stay(module) is None:
                self._lift_weights()
                stays += ON_CASTS
            self.ledger.failed(stays)
        is_lowered = self._plan.dtype is not None or self._plan.weights_dtype != torch.float32
        if is_lowered and types == {torch.float64}:
            self.ledger.failed(f"the weights of {name} are float64, which autocast leaves as they are")

    def _on_fault(self, fault: Exception) -> None:
        self.ledger.failed(f"anything from here on: a fault of ampguard's own ({type(fault).__name__}: {fault})")
        if os.environ.get("AMPGUARD_DEBUG"):
            traceback.print_exception(fault, file=stream())

    def _on_gain(self) -> None:
        if self._regions.of_script:  # the first call of a model that opens them itself
            return
        self._calls_gained += 1
        self.ledger.done(GAINED)

    def _on_direct_forward(self, holder: nn.Module) -> None:
        name = type(holder).__name__
        self.ledger.failed(
            f"the script calls {name}.forward itself, not the module: only the modules inside it gain autocast, what it computes "
            "between them stays in float32. Call the module, as in model(x)"
        )

    def _say_what_never_came(self) -> None:
        if self._regions.of_script and self._calls_gained and GAINED in self.ledger.did:
            self.ledger.did.remove(GAINED)
            calls = "a call of a model" if self._calls_gained == 1 else f"{self._calls_gained} calls of models"
            self.ledger.failed(
                f"{calls} before the script's first autocast region gained autocast, for nothing told of that region yet"
            )
        has_low_weights = self._plan.weights_dtype != torch.float32
        is_plain = self._plan.dtype is None and not has_low_weights and not self._regions.is_on_without_region
        if self._plan.is_set and is_plain and not self.ledger.did:
            self.ledger.done("found no autocast region and no GradScaler to switch off")
        is_gained = self._plan.dtype is not None and not self._regions.of_script
        if (has_low_weights or is_gained) and not self._roots.has_seen_any:
            self.ledger.failed("the script called no module: what it computes by itself stays as it is")
