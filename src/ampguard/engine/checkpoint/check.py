"""Whether a saved state belongs here and is whole; asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampguard.engine.checkpoint.optimizers import has_own_format
from ampguard.engine.checkpoint.poison import nonfinite_leaves
from ampguard.engine.checkpoint.seal import is_sealed
from ampguard.engine.patterns import nearest
from ampguard.errors import CheckpointError

if TYPE_CHECKING:
    from ampguard.engine.amp import Amp


def check(state: Any, own: Mapping[str, Any], amp: Amp) -> None:
    """Raise CheckpointError with what is wrong first; `own` is the present state of `amp`."""
    _check_kind(state, own)
    try:
        _check_parts(state, own, amp)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"a part of it is missing or of another kind ({type(error).__name__}: {error})"
        raise CheckpointError(_not_loaded(f"{what}: it was altered since it was made", "use another one")) from error


def models_in(state: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """The saved models by the names that they have here.

    Earlier versions called a model without a name by what was wrapped around it: then their order tells which is which.
    """
    saved: Mapping[str, Any] = state["models"]
    if len(saved) != len(own) or not any(name.partition(" ")[0] in _WRAPPERS for name in saved):
        return saved
    return saved if set(saved) == set(own) else dict(zip(own, saved.values(), strict=True))


_WRAPPERS = ("OptimizedModule", "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def _check_parts(state: Any, own: Mapping[str, Any], amp: Amp) -> None:
    models = models_in(state, own["models"])
    for name in _same_names(models, own["models"], "models"):
        _check_model(f"the model `{name}`", models[name], own["models"][name])
    for name in _same_names(state["optimizers"], own["optimizers"], "optimizers"):
        if state["kinds"].get(name) != own["kinds"][name]:
            kinds = f"{state['kinds'].get(name)}, here it is {own['kinds'][name]}"
            raise CheckpointError(_not_loaded(f"`{name}` is of another kind: it was {kinds}"))
        _check_optimizer(name, state["optimizers"][name], own["optimizers"][name])
    for name in _same_names(state["gradients"], own["gradients"], "gradients"):
        if len(state["gradients"][name]) != len(own["gradients"][name]):
            raise CheckpointError(_not_loaded(f"the gradients of `{name}` are of another number of parameters"))
    for what in ("schedulers", "averages"):
        saved, have = len(state["followers"][what]), len(own["followers"][what])
        if saved != have:
            raise CheckpointError(
                _not_loaded(f"it holds {saved} {what}, this Amp has {have}", f"give Amp the same {what}")
            )
        were, are = state["followers"]["kinds"][what], own["followers"]["kinds"][what]
        if were != are:
            raise CheckpointError(_not_loaded(f"its {what} are {were}, this Amp has {are}"))
    for number, average in enumerate(own["followers"]["averages"]):
        _check_model(f"average {number}", state["followers"]["averages"][number], average)
    amp.mode.check_state(state["mode"])
    since = {"unscaled", "statistics"}  # which earlier versions did not have
    _refuse_missing(own["progress"].keys() - since, state["progress"])
    if not is_sealed({key: value for key, value in state.items() if key != "seal"}, state["seal"]):
        raise CheckpointError(
            _not_loaded(
                "its content does not match its seal: it was altered since it was made",
                "use another checkpoint; where it was kept in memory, copy it (copy.deepcopy) before training goes on",
            )
        )


def _check_kind(state: Any, own: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or "ampguard" not in state:
        kind = f"a {type(state).__name__}" + (
            f" with {sorted(map(str, state))[:6]}" if isinstance(state, Mapping) else ""
        )
        raise CheckpointError(_not_loaded(f"{kind} is no state of Amp", "pass what amp.state_dict() returned"))
    if state["ampguard"] != own["ampguard"]:
        raise CheckpointError(
            _not_loaded(f"it has format {state['ampguard']!r}, this ampguard reads {own['ampguard']}")
        )
    if state.get("precision") != own["precision"]:
        raise CheckpointError(
            _not_loaded(
                f"it was made with precision={state.get('precision')!r}, this Amp has {own['precision']!r}",
                "make Amp with that precision; to change it, load the model's weights alone: state['models']",
            )
        )
    missing = [key for key in (*own, "seal") if key not in state]
    if missing:
        raise CheckpointError(_not_loaded(f"it lacks {', '.join(map(repr, missing))}: it is truncated"))
    if state["accumulate"] != own["accumulate"]:
        raise CheckpointError(
            _not_loaded(f"it was made with accumulate={state['accumulate']}, this Amp has {own['accumulate']}")
        )


def _refuse_missing(names: Set[str], saved: Mapping[str, Any]) -> None:
    missing = names - saved.keys()
    if missing:
        raise KeyError(min(missing))


def _same_names(saved: Mapping[str, Any], own: Mapping[str, Any], what: str) -> list[str]:
    if set(saved) != set(own):
        raise CheckpointError(_not_loaded(f"its {what} are {sorted(saved)}, this Amp has {sorted(own)}"))
    return list(own)


def _check_model(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    missing = [key for key in own if key not in saved]
    surplus = [key for key in saved if key not in own]
    if missing or surplus:
        near = nearest(surplus[0], missing) if surplus and missing else []
        hint = f" (`{surplus[0]}` may be `{near[0]}`)" if near else ""
        raise CheckpointError(
            _not_loaded(
                f"{name} is another one: {len(missing)} of its tensors are missing{_first(missing)}, "
                f"{len(surplus)} are not in it{_first(surplus)}{hint}"
            )
        )
    for key, value in own.items():
        if isinstance(value, Tensor) and not _is_alike(saved[key], value):
            raise CheckpointError(_not_loaded(f"`{key}` of {name} is {_shown(saved[key])}, here it is {_shown(value)}"))
    bad = [path for path in nonfinite_leaves(saved) if path not in nonfinite_leaves(own)]
    if bad:
        raise CheckpointError(_not_loaded(f"`{bad[0]}` of {name} holds NaN or Inf"))


def _check_optimizer(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if has_own_format(own):
        if saved.keys() != own.keys():
            raise CheckpointError(
                _not_loaded(f"the state of `{name}` holds {sorted(saved)}, here it holds {sorted(own)}")
            )
        return
    _refuse_missing({"state", "param_groups"}, saved)
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in own["param_groups"]]
    if sizes != here:
        raise CheckpointError(
            _not_loaded(f"`{name}` updates parameter groups of {here} tensors, the saved one had {sizes}")
        )


def _is_alike(saved: Any, own: Tensor) -> bool:
    return isinstance(saved, Tensor) and saved.shape == own.shape and saved.dtype == own.dtype


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _first(names: list[str]) -> str:
    return f" (`{names[0]}`{', ...' if len(names) > 1 else ''})" if names else ""


def _not_loaded(what: str, do: str | None = None) -> str:
    return f"the checkpoint was not loaded: {what}" + (f"\n  do    {do}" if do else "")
