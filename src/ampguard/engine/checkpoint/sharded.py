"""The state of an `Amp` on several ranks, through torch.distributed.checkpoint: every rank writes what it holds.

Weights and optimizer state are stored under the names that the model gives them, so a run can go on with another number
of ranks. Where a mode has weights of its own, which have no names, all ranks hold the same and one of them writes it. The
random streams are each process's own and are not stored: seed them when resuming.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ampguard import compat
from ampguard.engine.checkpoint import by_name, replicated
from ampguard.engine.checkpoint.poison import nonfinite_leaves
from ampguard.engine.checkpoint.seal import is_sealed, leaves, seal_of
from ampguard.engine.checkpoint.sharded_seal import altered, sums_of
from ampguard.errors import CheckpointError, PoisonedStateError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp

FORMAT = 2


def save_sharded(amp: Amp, folder: str | os.PathLike[str]) -> None:
    """Write the checkpoint; every rank has to call this. Raises the same on all ranks, before anything is written."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    _refuse_what_cannot_be_split(amp)
    rest = {**_rest(amp), "replicated": _has_own_state(amp)}
    parts = _whole(amp) if rest["replicated"] else _named(amp)
    if not rest["replicated"]:
        rest["sums"] = sums_of(parts)
    state = {"amp": _written({**rest, "seal": seal_of(rest)}), **parts}
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # statistics of a batch differ: let them be one rank's
    try:
        save(state, checkpoint_id=os.fspath(folder), planner=planner)
    except _failures() as error:
        raise CheckpointError(f"the checkpoint {os.fspath(folder)!r} was not written: {_last_line(error)}") from error


def load_sharded(amp: Amp, folder: str | os.PathLike[str]) -> None:
    """Go on from `save_sharded`, with any number of ranks; every rank has to call this. Raises CheckpointError."""
    _refuse_what_cannot_be_split(amp)
    rest = _read_rest(folder)
    _check(rest, amp)
    if rest.get("replicated", False):
        amp.load_without_streams(_whole_read(folder))
        return
    names = _names_in(folder)
    state = by_name.to_load_into(amp, names)
    _refuse_surplus(state, names, folder)
    known = nonfinite_leaves(state)
    _load(state, folder)
    _refuse_bad_numbers(state, known, folder)
    sums = sums_of(state)
    if sums is not None and rest.get("sums"):
        where = altered(rest["sums"], sums)
        if where is not None:
            raise _was_altered(folder, f"`{where}` is not what was saved")
    by_name.load(amp, state)
    _load_rest(amp, rest)


def _load(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(state, checkpoint_id=os.fspath(folder))
    except _failures() as error:
        raise _not_loaded(folder, error) from error


def _written(rest: dict[str, Any]) -> bytes:
    written = io.BytesIO()
    torch.save(rest, written)
    return written.getvalue()


def _read_rest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What is no tensor of a model or an optimizer."""
    state: dict[str, Any] = {"amp": b""}
    _load(state, folder)
    try:
        rest = dict(torch.load(io.BytesIO(state["amp"]), weights_only=True))
    except Exception as error:
        raise _was_altered(folder, f"what it says of itself cannot be read ({type(error).__name__})") from error
    if not is_sealed(rest, rest.pop("seal", None)):
        raise _was_altered(folder, "what it says of itself does not match its seal")
    return rest


def _names_in(folder: str | os.PathLike[str]) -> set[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return set(FileSystemReader(os.fspath(folder)).read_metadata().state_dict_metadata)
    except _failures() as error:
        raise _not_loaded(folder, error) from error


def _refuse_surplus(state: dict[str, Any], names: set[str], folder: str | os.PathLike[str]) -> None:
    own = {f"models.{path}" for path, _ in leaves(state["models"])}
    surplus = sorted(name for name in names if name.startswith("models.") and name not in own)
    if surplus:
        raise CheckpointError(
            f"the checkpoint {os.fspath(folder)!r} was not loaded: its models are others: {len(surplus)} of its tensors are "
            f"not in them (`{surplus[0].removeprefix('models.')}`{', ...' if len(surplus) > 1 else ''})"
        )


def _was_altered(folder: str | os.PathLike[str], what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {os.fspath(folder)!r} was not loaded: {what}: it was altered since it was made\n"
        "  do    use another one"
    )


def _whole_read(folder: str | os.PathLike[str]) -> Any:
    try:
        return replicated.read(folder)
    except _failures() as error:
        raise _not_loaded(folder, error) from error


def _refuse_bad_numbers(state: dict[str, Any], known: Collection[str], folder: str | os.PathLike[str]) -> None:
    """On all ranks alike."""
    bad = [path for path in nonfinite_leaves(state) if path not in known]
    if _anywhere(bool(bad)):
        where = f"`{bad[0]}`" if bad else "a part that another rank reads"
        raise CheckpointError(f"the checkpoint {os.fspath(folder)!r} was not loaded: {where} holds NaN or Inf")


def _failures() -> tuple[type[BaseException], ...]:
    """What torch.distributed.checkpoint raises; its own exception is none that `except Exception` would catch."""
    from torch.distributed.checkpoint.api import CheckpointException

    return Exception, CheckpointException


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _not_loaded(folder: str | os.PathLike[str], error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {os.fspath(folder)!r} was not loaded: {_last_line(error)}\n"
        "  do    give the models and optimizers that amp.save_sharded() was called with, and its folder"
    )


def _named(amp: Amp) -> dict[str, Any]:
    """Weights and optimizer state by their names. Raises PoisonedStateError on all ranks where any holds NaN or Inf."""
    state = by_name.present_state(amp)
    known = {f"models.model_{i}.{path}" for i, name in enumerate(amp.models) for path in amp.nonfinite_from_start(name)}
    bad = [path for path in nonfinite_leaves(state) if path not in known]
    _raise_on_all(f"`{bad[0]}` of this rank holds" if bad else None)
    return state


def _whole(amp: Amp) -> dict[str, Any]:
    """The whole state of this rank, which is that of all. Raises PoisonedStateError on all ranks."""
    problem, state = None, None
    try:
        state = amp.state_dict()
    except PoisonedStateError as error:
        problem = f"{str(error).splitlines()[0]}: tensors of this rank hold"
    _raise_on_all(problem)
    assert state is not None
    return replicated.parts_of(state)


def _raise_on_all(problem: str | None) -> None:
    if _anywhere(problem is not None):
        raise PoisonedStateError(
            f"the state is not saved: {problem or 'tensors of another rank hold'} NaN or Inf\n"
            "  do    go on from the last checkpoint; `ampguard run` says where it began"
        )


def _has_own_state(amp: Amp) -> bool:
    """Whether the mode or averages hold tensors that belong to no name in a model, or optimizers in another type."""
    return bool(amp.mode.low_dtype is not None or amp.mode.state_dict() or amp.followers.averages)


def _rest(amp: Amp) -> dict[str, Any]:
    return {
        "ampguard": FORMAT,
        "precision": amp.mode.name,
        "accumulate": amp.accumulate,
        "kinds": [type(optimizer).__name__ for optimizer in amp.optimizers.values()],
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
    kinds = [type(optimizer).__name__ for optimizer in amp.optimizers.values()]
    expected = {"ampguard": FORMAT, "precision": amp.mode.name, "accumulate": amp.accumulate, "kinds": kinds}
    for what, own in expected.items():
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
    if amp.followers.averages and any(compat.needs_other_ranks(model) for model in amp.models.values()):
        raise CheckpointError(
            "a sharded checkpoint of a model that is spread over ranks cannot hold averages (ema=): leave them out"
        )


def _anywhere(here: bool) -> bool:
    """Whether it is so on any rank. All ranks take part."""
    if not (dist.is_available() and dist.is_initialized()):
        return here
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    flag = torch.tensor(float(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
