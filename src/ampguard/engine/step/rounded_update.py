"""Any optimizer of `torch.optim` on bfloat16 or float16 parameters, with its arithmetic and its state in float32.

For the time of a step every such parameter has a float32 stand-in, on which the optimizer works as on any
parameter; then the parameter takes the stand-in's value: in bfloat16 by a rounding that loses no small update, in float16 by
rounding to nearest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard.compat import tell_of_skip, unseen
from ampguard.engine.step.check import GradientCheck
from ampguard.engine.step.rounding import compensated_round_, joined, stochastic_round_
from ampguard.engine.step.update import apply_update
from ampguard.errors import UsageError

_LOW = (torch.bfloat16, torch.float16)

REST = "rounding_rest"
"""The key in an optimizer's state under which a parameter's rest is kept."""


class RoundedUpdate:
    """Updates an optimizer's low-precision parameters in float32 and rounds them at random, or with compensation.

    "stochastic" keeps nothing beside the parameters; "kahan" keeps a bfloat16 rest for each in the optimizer's state.
    Both are for bfloat16; float16 parameters are rounded to nearest with "nearest", and that is for them only.
    That state is float32, also after `optimizer.load_state_dict`. A step needs 8 bytes a parameter for its own time.
    Random bits come from generators of its own, so the script's random numbers are left alone, and replicas with the
    same `seed` round alike. Parameters of other types are updated as always.
    """

    def __init__(
        self, optimizer: Optimizer, rounding: Literal["stochastic", "kahan", "nearest"] = "stochastic", seed: int = 0
    ) -> None:
        if rounding not in ("stochastic", "kahan", "nearest"):
            raise UsageError(f'rounding={rounding!r} is not known; choose "stochastic", "kahan" or "nearest".')
        self.optimizer, self.rounding, self.seed = optimizer, rounding, seed
        self._dtype = torch.float16 if rounding == "nearest" else torch.bfloat16
        self._generators: dict[str, torch.Generator] = {}
        self._coming: Mapping[str, Any] | None = None
        optimizer.register_load_state_dict_pre_hook(self._note_coming_state)
        optimizer.register_load_state_dict_post_hook(self._keep_float32)

    def apply(self, check: GradientCheck, max_norm: float | None = None, *, write_back: bool = False) -> None:
        """`apply_update` in float32. Where the step is skipped, no parameter changes."""
        if check.found_inf.is_cpu and check.found_inf.item():
            tell_of_skip(self.optimizer)
            return
        with self.in_float32(write_back=write_back):
            apply_update(self.optimizer, check, max_norm, write_back=write_back)

    @contextlib.contextmanager
    def in_float32(self, *, write_back: bool = False) -> Iterator[None]:
        """Inside, the optimizer's low-precision parameters that have a gradient are float32 stand-ins; after it, rounded."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        theirs = [group["params"] for group in groups]
        due = [p for params in theirs for p in params if p.dtype is self._dtype and p.grad is not None]
        rests = {p: state[p].pop(REST) for p in due if REST in state.get(p, ())}
        with unseen():  # a watcher of operators would take these for the loop's own
            stand_ins = {p: _stand_in(p, rests.get(p)) for p in due}
        for p, stand_in in stand_ins.items():
            _move(state, p, stand_in)
        for group, params in zip(groups, theirs, strict=True):
            group["params"] = [stand_ins.get(p, p) for p in params]
        try:
            yield
        finally:
            for group, params in zip(groups, theirs, strict=True):
                group["params"] = params
            for p, stand_in in stand_ins.items():
                _move(state, stand_in, p)
            for p, rest in rests.items():
                state[p][REST] = rest
        with unseen():
            self._round(stand_ins, write_back)

    def state_dict(self) -> dict[str, Any]:
        """Where the random bits have got to. Rests and moments are in the optimizer's own state."""
        return {
            "rounding": self.rounding,
            "generators": {device: generator.get_state() for device, generator in self._generators.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`. Raises UsageError for one of another rounding, and changes nothing then."""
        if saved.get("rounding") != self.rounding or not isinstance(saved.get("generators"), Mapping):
            raise UsageError(
                f"The saved state is of rounding={saved.get('rounding')!r}, not of {self.rounding!r}: "
                "train on with the rounding that it was saved with."
            )
        restored = {device: torch.Generator(device) for device in saved["generators"]}
        for device, generator in restored.items():
            generator.set_state(saved["generators"][device])
        self._generators = restored

    @torch.no_grad()
    def _round(self, stand_ins: Mapping[Tensor, Tensor], write_back: bool) -> None:
        for p, stand_in in stand_ins.items():
            if self.rounding == "kahan":
                kept = self.optimizer.state[p]
                if REST not in kept:
                    kept[REST] = torch.zeros_like(p, memory_format=torch.preserve_format)
                compensated_round_(p, kept[REST], stand_in)
            elif self.rounding == "nearest":
                p.copy_(stand_in)
            else:
                stochastic_round_(p, stand_in, self._generator(p.device))
            if write_back and stand_in.grad is not None and p.grad is not None:
                p.grad.copy_(stand_in.grad)

    def _generator(self, device: torch.device) -> torch.Generator:
        key = str(device)
        if key not in self._generators:
            self._generators[key] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[key]

    def _note_coming_state(self, optimizer: Optimizer, coming: dict[str, Any]) -> None:
        self._coming = coming

    def _keep_float32(self, optimizer: Optimizer) -> None:
        """PyTorch casts a loaded state to its parameter's type: take the float32 values that were in the file."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        names = [name for group in coming["param_groups"] for name in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, p in zip(names, parameters, strict=True):
            for key, value in coming["state"].get(name, {}).items():
                if p.dtype is self._dtype and _is_moment(value, p):
                    optimizer.state[p][key] = value.detach().to(p.device, copy=True)


def _is_moment(value: object, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32 and value.shape == p.shape


def _stand_in(p: Tensor, rest: Tensor | None) -> Tensor:
    stand_in = p.detach().float() if rest is None else joined(p, rest)
    stand_in.grad = p.grad.float() if p.grad is not None else None
    return stand_in


def _move(state: dict[Tensor, Any], here: Tensor, there: Tensor) -> None:
    """Hand a parameter's state on, in the type of the tensor that it is now for."""
    if here not in state:
        return
    values = state.pop(here)
    wide = there.dtype is torch.float32
    state[there] = {
        key: value.float() if wide and isinstance(value, Tensor) and value.dtype in _LOW else value
        for key, value in values.items()
    }
