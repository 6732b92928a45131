"""rank-divergence: ranks that should have the same weights, loss scale and skipped steps do not have them.

What happens   one rank alone skips a step, changes its loss scale or its learning rate (a schedule that follows the rank's
               own loss), loads another checkpoint, or writes to its weights.
               DistributedDataParallel copies the weights once, when it is made, and averages gradients from then on: it
               never looks whether the weights are still the same. And it averages only after a call of its own: what
               `model.module(x)` trains, past the wrapper, each rank trains by itself.
Why it hurts   every rank adds the mean gradient to other weights. Nothing fails; the loss is that of no model, and the
               checkpoint, which rank 0 writes, is not what the others trained.
Instead        decide on all ranks alike: reduce the condition first, torch.distributed.all_reduce(found_inf, op=MAX), and
               let every rank skip or none. Load checkpoints, and change weights, on all ranks.
               Broadcast the weights once where gradients are averaged by hand.
               And average the gradients of all weights then: those that are left out each rank trains by itself. So it
               is with a head or a criterion that has weights and lies outside of what DistributedDataParallel wraps.
Not this       models that are another on each rank on purpose: without DistributedDataParallel, weights are compared only
               while the gradients of two ranks are the same, bit for bit, or those of a part are (or DDP sees to a part) and
               the others began alike.
               A model that sends something in its forward pass (layers that are spread over ranks, experts) is only judged
               as a whole. Nor shards (FSDP), buffers, steps inside
               no_sync(), or training under join().
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampguard.capture.ranks.by_hand import Reduced
from ampguard.capture.ranks.past_wrapper import PastWrapper
from ampguard.capture.ranks.settings import is_learning_rate
from ampguard.capture.record import Line
from ampguard.diagnose import words
from ampguard.incident import Fix, Incident

MAX_NAMES = 12

SYNCHRONISE = (
    "bring the weights together again: for p in model.parameters(): torch.distributed.broadcast(p.detach(), src=0), or load "
    "the same checkpoint on every rank"
)
BEGIN_ALIKE = (
    "send the weights of rank 0 to all once the model is made, before the first step: for t in model.state_dict().values(): "
    "torch.distributed.broadcast(t, src=0); or wrap it: DistributedDataParallel(model), which does that and averages"
)
DECIDE_TOGETHER = (
    "let all ranks decide alike: flag = torch.tensor(float(bad)); torch.distributed.all_reduce(flag, "
    "op=torch.distributed.ReduceOp.MAX); then every rank skips, or none"
)
AVERAGE_FIRST = (
    "average the gradients before scaler.unscale_(optimizer), so that the scaler of every rank sees what any rank's gradients "
    "hold; or give all the same verdict: torch.distributed.all_reduce(found_inf, op=torch.distributed.ReduceOp.MAX)"
)
SAME_SCALE = (
    "make the scaler with the same init_scale on every rank, update it on every rank alike, and load its state on each: "
    "scaler.load_state_dict(checkpoint['scaler'])"
)
WRITE_EVERYWHERE = (
    "do on every rank what changes weights outside the optimizer (initialisation, loading, clamping, an average), from the "
    "same numbers"
)
SAME_RATE = (
    "let every rank step with the same learning rate: what a schedule is decided by has to be the same number on all of "
    "them, torch.distributed.all_reduce(metric); metric /= torch.distributed.get_world_size(), before scheduler.step(metric)"
)
SAME_SETTINGS = (
    "build the optimizer with the same settings on every rank, change them on all alike, and load its state on each"
)
AVERAGE_ALL = (
    "average the gradients of all that the optimizer updates, for p in model.parameters(): if p.grad is not None: "
    "torch.distributed.all_reduce(p.grad); p.grad /= torch.distributed.get_world_size(), before the optimizer's step; or wrap "
    "the model: DistributedDataParallel(model)"
)
WRAP_ALL = (
    "wrap the whole of what is trained, DistributedDataParallel(model), and call that: what is outside goes into one module "
    "with it; or average the gradients of what is outside by hand, torch.distributed.all_reduce(p.grad); p.grad /= "
    "torch.distributed.get_world_size(), before they are clipped and the optimizer steps"
)
CALL_THE_WRAPPER = (
    "call the DistributedDataParallel model itself, model(x), for what is differentiated; put what is called by another name "
    "(model.module.loss(x)) into the forward of one module, and wrap that"
)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Weights whose gradients the script does not average, while it does average those of `averaged` others at `line`.

    `by_wrapper`: a DDP model does, which was made (or is called) there.
    """

    names: list[str]
    averaged: int
    line: Line
    by_wrapper: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a rank differs from the first of those that hold the same model.

    `parameters`: the weights that differ, of `of` in all. `course`: the first step in which the loss scale or skipping
    differs, as (step, "scale" or "skipped", this rank's, the other's). `past`: the call that this rank trained past DDP.
    """

    step: int
    rank: int
    other: int
    last_equal: int | None
    parameters: list[str]
    of: int
    course: tuple[int, str, Any, Any] | None
    past: PastWrapper | None = None
    by_hand: bool = False
    """No wrapper of PyTorch's keeps the model alike: that the gradients are averaged, their bits have shown."""
    setting: tuple[str, float, float] | None = None
    """What the optimizers of the two step with that differs: where it stands, this rank's, the other's."""
    forgotten: LeftOut | None = None
    """Set where `by_hand` holds for a part of the weights alone."""
    reduced: Reduced | None = None
    """Where the script averages gradients: weights and gradients were alike by that before."""


def rank_divergence(difference: Difference, digest: str) -> Incident:
    """The incident, told by the rank that differs from the first. `digest`: what stands for this rank's weights."""
    course = difference.course
    step = difference.step if course is None else min(course[0], difference.step)
    past = difference.past
    unseen = CALL_THE_WRAPPER if past is not None else WRITE_EVERYWHERE
    setting = difference.setting
    if setting is not None and past is None:
        unseen = SAME_RATE if is_learning_rate(setting[0]) else SAME_SETTINGS
    fixes = [Fix("call-order", None, unseen)] if course is None else _fixes_of(course[1])
    forgotten = difference.forgotten
    if forgotten is not None:
        fixes = [
            Fix("call-order", None, WRAP_ALL if forgotten.by_wrapper else AVERAGE_ALL),
            Fix("load-weights", None, SYNCHRONISE),
        ]
    elif difference.by_hand and difference.last_equal is None and course is None:
        fixes = [Fix("load-weights", None, BEGIN_ALIKE), *(fixes if setting is not None else ())]
    elif difference.parameters:
        fixes.append(Fix("load-weights", None, SYNCHRONISE))
    evidence: dict[str, Any] = {
        "compared_with_rank": difference.other,
        "last_equal_step": difference.last_equal,
        "seen_at_step": difference.step,
        "parameters": difference.parameters[:MAX_NAMES],
        "parameter_count": len(difference.parameters),
        "of": difference.of,
        "digest": digest,
    }
    if course is not None:
        evidence |= {"differs": course[1], "here": course[2], "there": course[3]}
    if setting is not None:
        evidence["setting"] = {"name": setting[0], "here": setting[1], "there": setting[2]}
    if past is not None:
        evidence["trained_past_wrapper"] = {"module": past.part, "type": past.type_name}
    if forgotten is not None:
        evidence["averaged_count"] = forgotten.averaged
    reduced = difference.reduced
    if reduced is not None and reduced.is_behind_unscale:
        fixes.insert(0, Fix("call-order", None, AVERAGE_FIRST))
    line = past.line if past is not None else forgotten.line if forgotten is not None else None
    line = reduced.line if reduced is not None else line
    return Incident(
        step=step,
        rank=difference.rank,
        mode="train",
        phase="optimizer",
        severity="error" if forgotten is None or forgotten.by_wrapper else "warning",
        cause="rank-divergence",
        module=past.part if past is not None else _owner(forgotten.names) if forgotten is not None else None,
        op=None,
        dtype=None,
        location=line.location() if line is not None else None,
        explanation=" ".join(_sentences(difference)),
        evidence=evidence,
        fixes=tuple(fixes),
    )


def _fixes_of(which: str) -> list[Fix]:
    return [Fix("call-order", None, SAME_SCALE if which == "scale" else DECIDE_TOGETHER)]


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more


def _owner(names: list[str]) -> str:
    """The innermost module under which all these parameters hang."""
    paths = [name.split(".")[:-1] for name in names]
    common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ".".join(common)


def _in_words(d: Difference, forgotten: LeftOut) -> str:
    at = words.line_name(forgotten.line)
    if forgotten.by_wrapper:
        averaged = (
            f"DistributedDataParallel averages the gradients of the {forgotten.averaged} weights that it wraps ({at}), and "
            f"{_shown(forgotten.names)} {'is' if len(forgotten.names) == 1 else 'are'} outside of it: they"
        )
    else:
        averaged = (
            f"The script averages the gradients of {forgotten.averaged} of {d.of} weights over the ranks ({at}), and those of "
            f"{_shown(forgotten.names)} it leaves out: they"
        )
    return (
        f"{averaged} began alike, each rank updates them by its own gradients, and after "
        f"step {d.step} rank {d.rank} has others than rank {d.other}. The ranks train different models; if each is to have these "
        f"for itself (a personal head), nothing is wrong."
    )


def _behind(reduced: Reduced) -> str:
    at = words.line_name(reduced.line)
    if not reduced.is_behind_unscale:
        return f"The script averages the gradients over the ranks ({at})."
    return (
        f"The script averages the gradients ({at}) when each rank's scaler has looked at its own already: a rank whose own were "
        f"finite steps with what the others bring, and one that skips is alone with that."
    )


def _sentences(d: Difference) -> list[str]:
    found = []
    if d.course is not None:
        step, which, here, there = d.course
        if which == "scale":
            found.append(
                f"In step {step} the loss scale of rank {d.rank} is {here:g} and that of rank {d.other} {there:g}."
            )
        else:
            skips, steps = (d.rank, d.other) if here else (d.other, d.rank)
            found.append(f"Rank {skips} skipped step {step}, and rank {steps} made it.")
    if d.forgotten is not None:
        found.append(_in_words(d, d.forgotten))
    elif d.parameters:
        shown = _shown(d.parameters)
        since = (
            f"after step {d.last_equal} they were equal" if d.last_equal is not None else "they were never seen equal"
        )
        consequence = "From here on the ranks train different models."
        if d.reduced is not None:
            found.append(_behind(d.reduced))
        elif d.by_hand:
            consequence = (
                "Their gradients are the same, bit for bit, as averaged ones are: the ranks train different models."
            )
        found.append(
            f"After step {d.step} {len(d.parameters)} of {d.of} weights of rank {d.rank} are not those of rank {d.other} "
            f"({shown}); {since}. {consequence}"
        )
    elif d.course is not None and d.course[1] == "scale":
        found.append("Gradients that are multiplied by different numbers were averaged.")
    if d.setting is not None:
        name, here, there = d.setting
        found.append(f"`{name}` is {here:g} on rank {d.rank} and {there:g} on rank {d.other}.")
    if d.past is not None:
        which = f"`{d.past.part}` ({d.past.type_name})" if d.past.part else f"`{d.past.type_name}`"
        found.append(
            f"{which} was called past its DistributedDataParallel wrapper, and the wrapper was not called in this step: so DDP "
            f"averaged no gradients, and each rank updated its weights by its own."
        )
    return found
