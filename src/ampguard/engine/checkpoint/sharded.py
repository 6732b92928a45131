"""The state of an `Amp` on several ranks, through torch.distributed.checkpoint: every rank writes what it holds.

Weights and optimizer state are stored under the names that the model gives them, so a run can go on with another number
of ranks. The random streams are each process's own and are not stored: seed them when resuming.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ampguard.engine.checkpoint.poison import nonfinite_leaves
from ampguard.errors import CheckpointError, PoisonedStateError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp

FORMAT = 1


def save_sharded(amp: Amp, folder: str | os.PathLike[str]) -> None:
    """Write the checkpoint; every rank has to call this. Raises the same on all ranks, before anything is written."""
    from torch.distributed.checkpoint.state_dict_saver import save

    _refuse_what_cannot_be_split(amp)
    models, optimizers = _both(amp)
    bad = nonfinite_leaves({"models": models, "optimizers": optimizers})
    if _anywhere(bool(bad)):
        where = f"`{bad[0]}` of this rank holds" if bad else "tensors of another rank hold"
        raise PoisonedStateError(
            f"the state is not saved: {where} NaN or Inf\n"
            "  do    go on from the last checkpoint; `ampguard run` says where it began"
        )
    state = {"models": models, "optimizers": optimizers, "amp": json.dumps(_rest(amp))}
    save(state, checkpoint_id=os.fspath(folder))


def load_sharded(amp: Amp, folder: str | os.PathLike[str]) -> None:
    """Go on from `save_sharded`, with any number of ranks; every rank has to call this. Raises CheckpointError."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    _refuse_what_cannot_be_split(amp)
    models, optimizers = _both(amp)
    state = {"models": models, "optimizers": optimizers, "amp": ""}
    try:
        load(state, checkpoint_id=os.fspath(folder))
    except Exception as error:
        first = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"the checkpoint {os.fspath(folder)!r} was not loaded: {first}\n"
            "  do    give the models and optimizers that amp.save_sharded() was called with, and its folder"
        ) from error
    rest = json.loads(state["amp"])
    _check(rest, amp)
    set_state_dict(
        _all_models(amp),
        list(amp.optimizers.values()),
        model_state_dict=models,
        optim_state_dict=optimizers,
    )
    _load_rest(amp, rest)


def _both(amp: Amp) -> tuple[dict[str, Any], Any]:
    """Weights and optimizer state by name. A new optimizer is stepped once without effect, to have a state to load into."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    with amp.stepper.stepping():
        return get_state_dict(_all_models(amp), list(amp.optimizers.values()))


def _all_models(amp: Amp) -> nn.Module:
    """One module that holds all models, so that every parameter has one name."""
    return nn.ModuleDict({f"model_{number}": model for number, model in enumerate(amp.models.values())})


def _rest(amp: Amp) -> dict[str, Any]:
    return {
        "ampguard": FORMAT,
        "precision": amp.mode.name,
        "accumulate": amp.accumulate,
        "scale": amp.loss_scale.state_dict() if amp.mode.scales_loss else None,
        "schedulers": amp.followers.state_dict()["schedulers"],
        "progress": {
            "steps": amp.verdicts.steps,
            "attempts": amp.verdicts.attempts,
            "in_a_row": amp.verdicts.in_a_row,
        },
    }


def _load_rest(amp: Amp, rest: dict[str, Any]) -> None:
    for holding in amp.holdings.values():
        holding.refresh()
        holding.clear()
        holding.micro_steps = 0
        amp.stepper.rules.cleared(holding)
    amp.stepper.found_infs = {}
    amp.followers.load_state_dict({"schedulers": rest["schedulers"], "averages": []})
    if rest["scale"] is not None:
        amp.loss_scale.load_state_dict(rest["scale"])
    amp.stepper.restored(was_loaded=True)
    progress = rest["progress"]
    amp.verdicts.steps, amp.verdicts.attempts = progress["steps"], progress["attempts"]
    amp.verdicts.in_a_row = progress["in_a_row"]


def _check(rest: dict[str, Any], amp: Amp) -> None:
    for what, own in (("ampguard", FORMAT), ("precision", amp.mode.name), ("accumulate", amp.accumulate)):
        if rest.get(what) != own:
            raise CheckpointError(
                f"the checkpoint was not loaded: it was made with {what}={rest.get(what)!r}, here it is {own!r}"
            )
    if len(rest["schedulers"]) != len(amp.followers.schedulers):
        raise CheckpointError(f"the checkpoint was not loaded: it holds {len(rest['schedulers'])} schedulers")


def _refuse_what_cannot_be_split(amp: Amp) -> None:
    amp.verdicts.settle()
    if any(holding.micro_steps for holding in amp.holdings.values()):
        raise CheckpointError(
            "a sharded checkpoint is made between accumulation windows: call it after amp.step() has stepped"
        )
    if amp.mode.state_dict() or amp.followers.averages:
        what = (
            "averages (ema=)"
            if amp.followers.averages
            else f"precision={amp.mode.name!r}, which has weights of its own"
        )
        raise CheckpointError(
            f"a sharded checkpoint cannot hold {what}: use amp.state_dict() on each rank, as many ranks as now"
        )


def _anywhere(here: bool) -> bool:
    """Whether it is so on any rank. All ranks take part."""
    if not (dist.is_available() and dist.is_initialized()):
        return here
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    flag = torch.tensor(float(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
