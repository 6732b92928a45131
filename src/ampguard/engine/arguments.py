"""What `Amp` refuses to be given, and what it says then."""

from __future__ import annotations

import difflib
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine import closures
from ampguard.engine.casting import is_castable
from ampguard.engine.force_fp32.modules import ForcedModules
from ampguard.engine.patterns import listed_patterns, matching_modules
from ampguard.engine.precision.base import Precision
from ampguard.engine.setup import parameters_of
from ampguard.errors import LossError, PatternError, PrecisionError, SetupError, UnknownCallError

logger = logging.getLogger("ampguard")

_converted: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models and optimizers that some Amp has changed."""


def refuse_combinations(mode: Precision, evaluation: Precision, flat: Mapping[str, Sequence[Tensor]]) -> None:
    """An evaluation that needs other weights; flat buffers, whose memory a cast would leave."""
    if evaluation is not mode and evaluation.weights_dtype != torch.float32:
        raise PrecisionError(
            f"eval_precision={evaluation.name!r} needs {evaluation.weights_dtype} weights, the training mode "
            f"{mode.name!r} has {mode.weights_dtype}\n"
            f"  do    evaluate in {mode.name!r} (leave eval_precision out), fp32, fp16 or bf16"
        )
    for name, buffers in flat.items():
        if buffers and mode.weights_dtype != torch.float32:
            raise SetupError(
                f"`{name}` updates a flat buffer in whose memory the model's weights lie; precision {mode.name!r} casts "
                "them, and they would leave it\n"
                "  do    use fp32, fp16 or bf16, or build the optimizer without the flat buffer (contiguous=False)"
            )


def refuse_converted(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """What another Amp has changed."""
    for name, thing in (*models.items(), *optimizers.items()):
        if thing in _converted:
            raise SetupError(
                f"`{name}` was changed by an Amp before, whose mode keeps its weights in a low precision\n"
                "  do    go on with that Amp, or make model and optimizer anew"
            )


def refuse_low_weights(optimizers: Mapping[str, Optimizer], mode: Precision) -> None:
    """Weights that are in a low precision already, where the mode needs them in float32."""
    low = {p.dtype for o in optimizers.values() for p in parameters_of(o) if p.dtype.itemsize < 4 and p.requires_grad}
    if mode.weights_dtype != torch.float32 or not low:
        return
    if torch.float16 in low:
        raise PrecisionError(
            f"the optimizers update float16 weights, precision {mode.name!r} needs float32 ones: small updates are lost "
            "in float16 [fp16-parameters]\n"
            "  do    load the model in float32 (model.float() before the optimizer is made); to save memory, use "
            "precision='O2' on the float32 model"
        )
    mode.notes.append("the optimizers update bfloat16 weights and lose small updates; precision='bf16-true' does not")


def refuse_wide_weights(models: Mapping[str, nn.Module], mode: Precision) -> None:
    """A model that has no weight for the mode to cast, and would be given inputs in its low precision.

    Under autocast float64 weights are harmless, and the mode is without effect: that is a warning.
    """
    for name, model in models.items():
        weights = [p for p in compat.all_parameters(model) if p.is_floating_point()]
        if mode.weights_dtype != torch.float32 and weights and not any(map(is_castable, weights)):
            raise PrecisionError(
                f"precision {mode.name!r} casts float32 weights, and those of `{name}` are {weights[0].dtype}\n"
                "  do    model.float() before its optimizer is made; or use precision='fp32', which leaves them as they are"
            )
        if mode.autocast_dtype is not None and weights and all(p.dtype == torch.float64 for p in weights):
            logger.warning(
                "precision %s: autocast leaves float64 as it is, and all weights of `%s` are float64: nothing of it "
                "will be computed in %s. Call model.float() before its optimizer is made, or use precision='fp32'.",
                mode.name,
                name,
                str(mode.autocast_dtype).removeprefix("torch."),
            )


def refuse_hookless(optimizers: Mapping[str, Optimizer], mode: Precision) -> None:
    """A wrapper whose own steps cannot be followed, where the loop calls them."""
    for name, optimizer in optimizers.items():
        if mode.weights_dtype != torch.float32 and not compat.takes_step_hooks(optimizer):
            raise SetupError(
                f"`{name}` is a wrapper around an optimizer that has no step hooks, which {mode.name} needs to follow its steps: "
                "its __init__ does not call that of torch.optim.Optimizer\n"
                f"  do    use ampguard.Amp(model, optimizer, precision={mode.name!r}), which steps it itself; or let __init__ "
                "call super().__init__(optimizer.param_groups, {})"
            )


def note_converted(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], mode: Precision) -> None:
    """Remember what cannot be given to another Amp."""
    if mode.weights_dtype != torch.float32:
        _converted.update([*models.values(), *optimizers.values()])


def refuse_closures(optimizers: Mapping[str, Optimizer], mode: Precision) -> None:
    """LBFGS does not go together with every mode."""
    for name, optimizer in optimizers.items():
        if not mode.takes_closures and closures.needs_closure(optimizer):
            raise closures.refusal(name, mode)


def refuse_missing_closure(optimizers: Mapping[str, Optimizer], chosen: Sequence[str], closure: Any) -> None:
    for name in chosen:
        if closure is None and closures.needs_closure(optimizers[name]):
            raise SetupError(
                f"`{name}` computes the loss several times in one step\n"
                "  do    amp.step(optimizer, closure), with a closure that computes the loss, calls amp.backward(loss) and "
                "returns the loss"
            )


def force_patterns(models: Mapping[str, nn.Module], patterns: str | Sequence[str], mode: Precision) -> list[nn.Module]:
    """Every model is asked for every pattern, which must match in at least one. Nothing is changed if one does not."""
    forced: dict[str, dict[str, nn.Module]] = {name: {} for name in models}
    for pattern in listed_patterns(patterns):
        missed: list[PatternError] = []
        for name, model in models.items():
            try:
                forced[name] |= matching_modules(compat.unwrapped(model), [pattern])
            except PatternError as error:
                missed.append(error)
        if len(missed) == len(models):
            raise missed[0]
    for found in forced.values():
        ForcedModules(found, without_floats=mode.low_dtype)
    return [module for found in forced.values() for module in found.values()]


_OF_GRAD_SCALER = {
    "scale": "amp.backward(loss) multiplies the loss by the scale: call it in place of amp.scale(loss).backward()",
    "update": "amp.step() updates the loss scale after the last optimizer of an iteration: delete the call",
    "unscale": "amp.unscale_(optimizer) divides the gradients now",
    "is_enabled": "the precision says whether there is a loss scale: amp.mode.scales_loss",
    "parameters": "ask the model, or what the optimizer holds; to clip, give Amp(max_grad_norm=...)",
}


def unknown_call(name: str, known: Iterable[str] = ()) -> UnknownCallError:
    """What `Amp` does not have, perhaps because GradScaler has it, or by a slip of the keys (`known`: what it has)."""
    do = _OF_GRAD_SCALER.get(name)
    if do is None and not name.startswith("_"):  # Python itself asks for names that begin so
        near = difflib.get_close_matches(name, [own for own in known if not own.startswith("_")], 1)
        do = f"call amp.{near[0]}, if that is meant" if near else None
    return UnknownCallError(f"Amp has no {name!r}" + (f"\n  do    {do}" if do else ""), name=name)


def refuse_late_option(name: str, value: Any, options: Iterable[str]) -> None:
    """An option that is written to the `Amp` after it was made, where nobody would look."""
    if name not in options:
        return
    clip = "to clip by another norm, leave it out: amp.unscale_(), then torch.nn.utils.clip_grad_norm_, then amp.step()"
    raise SetupError(
        f"amp.{name} = {value!r}: the options of an Amp are those that it was made with\n"
        f"  do    {clip if name == 'max_grad_norm' else f'give it to Amp(..., {name}=)'}"
    )


def unknown_optimizer(given: Any, names: Sequence[str]) -> SetupError:
    if isinstance(given, str):
        what = f"there is no optimizer {given!r}"
    elif isinstance(given, Optimizer):
        what = f"this {type(given).__name__} is not one of the optimizers that Amp was given"
    else:
        what = f"a {type(given).__name__} is no optimizer"
    closure = "; a closure is the second argument: amp.step(optimizer, closure)" if callable(given) else ""
    return SetupError(f"{what}\n  do    name one of {', '.join(map(repr, names))}, or pass the very object{closure}")


def listed_losses(given: Any) -> list[Tensor]:
    """One loss or several, each of which can be differentiated. Raises LossError."""
    if isinstance(given, Mapping):
        raise LossError(
            f"amp.backward() takes a loss tensor or several, not a mapping of {', '.join(map(repr, given))}\n"
            "  do    amp.backward(list(losses.values())), or their sum"
        )
    losses = list(given) if isinstance(given, (list, tuple)) else [given]
    if not losses:
        raise LossError("amp.backward() was given no loss: the list is empty")
    for loss in losses:
        refuse_loss(loss)
    return losses


def refuse_loss(loss: Any, call: str = "amp.backward()") -> None:
    """Raises LossError for what cannot be differentiated."""
    if not isinstance(loss, Tensor):
        hint = "\n  do    pass the tensor itself: loss.item() has lost what made it" if isinstance(loss, float) else ""
        raise LossError(f"{call} takes a loss tensor, not a {type(loss).__name__}{hint}")
    if not loss.requires_grad:
        why = (
            "it was computed under no_grad"
            if not torch.is_grad_enabled()
            else "nothing that requires a gradient is in it"
        )
        raise LossError(
            f"the loss (a {tuple(loss.shape)} tensor) needs no gradient: {why}\n"
            "  do    compute it from the model's outputs, without detach(), item() or no_grad; unfreeze some parameters"
        )
    if loss.is_complex():
        raise LossError(
            f"the loss is complex ({loss.dtype}), and has no gradient\n  do    take loss.abs(), loss.real or loss.imag"
        )
    if loss.numel() != 1:
        raise LossError(
            f"the loss has shape {tuple(loss.shape)}; a gradient is that of one number\n  do    take loss.mean() or .sum()"
        )
