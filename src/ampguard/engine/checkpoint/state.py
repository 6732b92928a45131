"""The state of an `Amp`: everything that decides what the next step does."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ampguard import compat
from ampguard.engine.checkpoint.check import check, models_in
from ampguard.engine.checkpoint.optimizers import has_own_format, load_optimizer, state_of
from ampguard.engine.checkpoint.poison import nonfinite_leaves, refuse_poisoned
from ampguard.engine.checkpoint.rng import rng_state, set_rng_state
from ampguard.engine.checkpoint.seal import seal_of
from ampguard.errors import CheckpointError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp

FORMAT = 1


class Checkpoint:
    """Makes the state of one `Amp`, and loads it after all of it was found fit."""

    def __init__(self, amp: Amp) -> None:
        self._amp = amp
        self._known = nonfinite_leaves({**self._of_models(), "optimizers": self._of_optimizers_if_any()})
        """Not finite from the beginning: masks of -Inf that are buffers."""

    def state_dict(self) -> dict[str, Any]:
        """Raises PoisonedStateError."""
        self._amp.follow_groups()
        self._amp.mode.before_reading()
        judged = self._judged()
        refuse_poisoned(judged, self._known)
        state = {"ampguard": FORMAT, "precision": self._amp.mode.name, **judged, **self._rest()}
        return {**state, "seal": seal_of(state)}

    def known_of(self, model: str) -> list[str]:
        """Names in a model's state of what was not finite from the beginning."""
        prefix = f"models.{model}."
        return [path.removeprefix(prefix) for path in self._known if path.startswith(prefix)]

    def poisoned_buffers(self) -> list[str]:
        """Those that are saved, and were finite at the beginning."""
        models = {name: compat.named_buffers(compat.unwrapped(model)) for name, model in self._amp.models.items()}
        bad = (path.removeprefix("models.") for path in nonfinite_leaves({"models": models}) if path not in self._known)
        single = len(models) == 1
        return [path.partition(".")[2] if single else path for path in bad]

    def load(self, state: Mapping[str, Any], rng: bool = True, skips: bool = True) -> None:
        """Raises CheckpointError before anything has changed."""
        self._amp.follow_groups()
        check(
            state, {"ampguard": FORMAT, "precision": self._amp.mode.name, **self._judged(), **self._rest()}, self._amp
        )
        amp = self._amp
        amp.followers.load_state_dict(state["followers"])  # first: these are other people's, and may yet refuse theirs
        own = {name for name, saved in state["optimizers"].items() if has_own_format(saved)}  # these may refuse, too
        for name, optimizer in sorted(amp.optimizers.items(), key=lambda pair: pair[0] not in own):
            load_optimizer(optimizer, state["optimizers"][name])
            amp.holdings[name].refresh()
        models = models_in(state, amp.models)
        for name, model in amp.models.items():
            compat.unwrapped(model).load_state_dict(models[name])
        amp.mode.load_state_dict(state["mode"])
        if state["scale"] is not None:
            amp.loss_scale.load_state_dict(state["scale"])
        amp.stepper.restored(was_loaded=rng)
        self._load_progress(state, skips)
        if rng:
            set_rng_state(state["rng"])

    def _judged(self) -> dict[str, Any]:
        """What must be finite."""
        optimizers = {name: state_of(name, optimizer) for name, optimizer in self._amp.optimizers.items()}
        return {**self._of_models(), "optimizers": optimizers}

    def _of_models(self) -> dict[str, Any]:
        amp = self._amp
        models = {name: compat.unwrapped(model).state_dict() for name, model in amp.models.items()}
        return {"models": models, "mode": amp.mode.state_dict()}

    def _of_optimizers_if_any(self) -> dict[str, Any]:
        """One without a state can train all the same."""
        states = {}
        for name, optimizer in self._amp.optimizers.items():
            with contextlib.suppress(CheckpointError):
                states[name] = state_of(name, optimizer)
        return states

    def _rest(self) -> dict[str, Any]:
        amp = self._amp
        return {
            "followers": amp.followers.state_dict(),
            "scale": amp.loss_scale.state_dict() if amp.mode.scales_loss else None,
            "kinds": {name: type(optimizer).__name__ for name, optimizer in amp.optimizers.items()},
            "accumulate": amp.accumulate,
            "progress": {
                "steps": amp.verdicts.steps,
                "attempts": amp.verdicts.attempts,
                "in_a_row": amp.verdicts.in_a_row,
                "micro_steps": {name: h.micro_steps for name, h in amp.holdings.items()},
                "found_infs": {name: float(flag) for name, flag in amp.stepper.found_infs.items()},
                "unscaled": {name: float(flag) for name, flag in amp.stepper.found_when_unscaled.items()},
                "statistics": amp.statistics.of_open_window(),
            },
            "gradients": {name: [p.grad for p in h.parameters] for name, h in amp.holdings.items()},
            "rng": rng_state(),
        }

    def _load_progress(self, state: Mapping[str, Any], skips: bool) -> None:
        amp, progress = self._amp, state["progress"]
        amp.verdicts.steps = progress["steps"]
        if skips:
            amp.verdicts.attempts, amp.verdicts.in_a_row = progress["attempts"], progress["in_a_row"]
        amp.statistics.restore(progress.get("statistics", {}) if skips else {})
        device = amp.loss_scale.value.device
        amp.stepper.found_infs = {
            name: torch.tensor(flag, device=device) for name, flag in progress["found_infs"].items()
        }
        for name, holding in amp.holdings.items():
            holding.clear()
            amp.stepper.rules.cleared(holding)
            saved = state["gradients"][name]
            holding.micro_steps = progress["micro_steps"][name]
            if all(gradient is None for gradient in saved):
                continue
            for p, gradient in zip(holding.parameters, saved, strict=True):
                _load_gradient(p, gradient)
            amp.stepper.rules.restored(holding)
            if name in progress.get("unscaled", ()):
                amp.stepper.restored_unscaled(holding, progress["unscaled"][name])


@torch.no_grad()
def _load_gradient(parameter: torch.Tensor, saved: torch.Tensor | None) -> None:
    if saved is None:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.copy_(saved)  # in place: it may be a flat buffer
    else:
        parameter.grad = saved.to(parameter.device, copy=True)
