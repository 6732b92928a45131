"""Since when a parameter or buffer is bad that was so before the step began, and what made it bad."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch

from ampguard import compat
from ampguard.capture.record import BadResult
from ampguard.capture.recorder import FlightRecorder
from ampguard.diagnose.cases.case import Case
from ampguard.diagnose.words import spelled_out
from ampguard.incident import Fix, Incident, Location
from ampguard.numerics import is_finite, is_low_precision


class BadSince:
    """What the run has seen of its weights before they failed."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.weights_bad_since: int | None = None
        """The first step in which a look at the weights found some that were not finite."""
        self.changed_gradients: list[BadResult] = []
        """Bad gradients of steps that have finite ones when they are run again."""
        self._recorder = recorder

    def weights_were_bad(self, step: int) -> None:
        """A look at the weights has found some that were not finite."""
        if self.weights_bad_since is None:
            self.weights_bad_since = step

    def changed_before(self, incident: Incident) -> BadResult | None:
        """Gradients that something changed before the optimizer used them, in a step before the incident's."""
        return next((bad for bad in self.changed_gradients if bad.step < incident.step), None)

    def told(self, incident: Incident, spoiled_by: Case | None, is_incomplete: bool) -> Incident:
        """A `nonfinite-parameter` with its past.

        `spoiled_by`: the case that spoiled this buffer. `is_incomplete`: there are failures of which nothing was found out.
        """
        facts = dict(incident.evidence)
        changed = self.changed_before(incident)
        last_good = self._recorder.judge.last_good_step
        facts["since_step"] = None
        if spoiled_by is not None:
            text = f"It was {spoiled(spoiled_by.incident, facts)}"
            incident = _reset_behind(incident, spoiled_by)
        elif facts.get("made_before") is not None:
            return msgspec.structs.replace(incident, evidence=facts)  # all is said
        elif (memory := facts.get("uninitialised_at")) is not None:
            where = f"{Path(memory['file']).name}:{memory['line']}"
            text = (
                f"It is memory that was asked for at {where} (`{memory['code']}`), and nobody has initialised it since."
            )
        elif (written := facts.get("written_at")) is not None:
            facts["since_step"] = incident.step
            where = f"{Path(written['file']).name}:{written['line']}"
            text = f"The script itself has given it these values in this step, at {where}: {written['code']}"
        elif (loaded := facts.get("loaded_at")) is not None:
            where = f"{Path(loaded['file']).name}:{loaded['line']}"
            text = f"These values were loaded at {where}: {loaded['code']}. Nothing has written to it since."
            text += _held_in(facts)
        elif facts.get("role") == "buffer" and facts.get("batches_tracked"):
            text = (
                f"Its module has updated it in {facts['batches_tracked']} batches of training: one that was not finite gave "
                f"it these values."
            )
        elif facts.get("role") == "buffer" and facts.get("times_written") == 0:
            text = (
                "PyTorch has counted no write to it since it was made: its construction, a checkpoint or an assignment gave it "
                "these values (or a write through `.data`)."
            )
        elif _is_infinite_in_low_precision(facts) and self._was_cast():
            facts["since_step"] = last_good
            low = facts["values"]["dtype"]
            text = (
                f"It was trained in float32, as its optimizer's state still is: the cast to {low} since then (`.half()`, "
                f"`.to(dtype)`) made Inf of values beyond {torch.finfo(getattr(torch, low)).max:.5g}."
            )
            how = f"cast the model to bfloat16, which has float32's range, or keep {facts['name']} in float32"
            incident = msgspec.structs.replace(incident, fixes=(Fix("use-bf16", facts["name"], how),))
        elif (reason := self._was_bad_before_it_was_used(facts)) is not None:
            text = f"{reason} The steps before this one did not use it: initialisation or a checkpoint."
        elif last_good is not None and incident.mode == "eval" and self._is_only_evaluated(facts):
            writes, last = facts.get("times_written") or 0, facts.get("last_written_at")
            where = f", last at {Path(last['file']).name}:{last['line']}: {last['code']}" if last else ""
            text = (
                "No optimizer trains it, nor anything else in its model: the script itself has written these values to it, in "
                f"this step or before it (it was written to {writes} times{where}). The losses need not have used it."
            )
            incident = _without_initialising(incident)
        elif last_good is not None and incident.mode == "eval" and self._recorder.updated.were_written():
            facts["written_by_script"] = True
            text = (
                "The script itself has written to the weights since the optimizer's last step (averaged weights that it lends "
                "the model for an evaluation, say): look at what it writes there. The losses need not have used these values."
            )
            incident = _without_initialising(incident)
        elif last_good is not None:
            facts["since_step"] = last_good
            is_reduced = self._recorder.collectives.reduces_unscaled
            if changed is not None or is_incomplete or is_reduced or not self._recorder.steps.made_since(0):
                facts["gradients_were_looked_at"] = False  # (without an optimizer nobody does)
            text = f"The loss of step {last_good} was still finite{self._since(facts)}."
            if last_good == incident.step and self._is_of_another_model(facts):
                facts["since_step"] = incident.step - 1
                text = f"Its losses were finite until its last update{self._since(facts, update='that')}."
            incident = _without_initialising(incident)
            incident = msgspec.structs.replace(incident, fixes=(*_rate_fixes(facts), *incident.fixes))
        else:
            text = "It was so before the first step: initialisation or a checkpoint."
        if changed is not None:
            facts["gradients_changed_in_step"] = changed.step
        if changed is not None and (line := self._changed_at(changed)) is not None:
            where = f"{Path(line.file).name}:{line.line}"
            text += (
                f" The backward pass of step {changed.step} left finite gradients, and {where} (`{line.code}`) made others of "
                f"them that are not: something bad was in what it adds, an average perhaps that the script keeps over the steps, "
                f"and that an overflow stays in although that step was skipped."
            )
            facts["gradients_changed_at"] = msgspec.to_builtins(line)
            how = f"leave what is kept over the steps as it is in a step whose gradients are not finite: see {where}"
            incident = msgspec.structs.replace(incident, fixes=(Fix("call-order", None, how), *incident.fixes))
        elif changed is not None:
            text += (
                f" The gradients that the optimizer used in step {changed.step} were not finite, and those of the same step run "
                f"again are: something changed them between backward and the optimizer's step (a hook, also one on tensors "
                f"saved for backward; the script; another rank)."
            )
        return msgspec.structs.replace(incident, explanation=f"{incident.explanation} {text}", evidence=facts)

    def _changed_at(self, changed: BadResult) -> Location | None:
        """The line of the script's that made bad gradients of good ones in that step."""
        step, line = self._recorder.gradients.remade.bad_at or (None, None)
        return line.location() if line is not None and step == changed.step else None

    def _since(self, facts: dict[str, Any], update: str = "the update after it") -> str:
        """What has made it bad since the last finite loss."""
        recorder = self._recorder
        within = recorder.in_closure_of
        if within is not None and not compat.is_of_pytorch(type(within)) and facts.get("is_trained", True):
            facts["written_by_script"] = True
            return (
                f": {type(within).__name__}'s own step has written these values to it before it called its closure. In an ascent "
                f"such as SAM's a gradient of norm 0 is divided by that norm: add 1e-12 to it"
            )
        is_updating = recorder.is_in_closure or recorder.steps.attempts > recorder.judge.attempts_when_good
        is_updating = is_updating or self._is_of_another_model(facts)
        if is_updating or not recorder.steps.made_since(0) or not facts.get("is_trained", True):
            setting = self._bad_setting() if facts.get("is_trained", True) else None
            if setting is None:
                return _since(facts, update)
            facts["bad_setting"] = dict(zip(("optimizer", "name", "value"), setting, strict=True))
            return ": {0} poisoned it, for the `{2}` of {1} is {3}".format(update, *setting)
        facts["written_by_script"] = True
        return (
            ", and no optimizer has stepped since: the script itself has written these values to it. In an ascent such as SAM's "
            "a gradient of norm 0 is divided by that norm: add 1e-12 to it"
        )

    def _was_cast(self) -> bool:
        """Whether a parameter that is not finite has another type than when its optimizer began to keep state for it."""
        stepped = self._recorder.steps.made_since(0)
        for optimizer in (
            o for o in stepped if compat.is_of_pytorch(type(o))
        ):  # others may keep another type on purpose
            for p, state in optimizer.state.items():
                if isinstance(p, torch.Tensor) and is_low_precision(p.dtype) and not is_finite(p.detach()):
                    kept = (t for t in state.values() if isinstance(t, torch.Tensor) and t.shape == p.shape)
                    if any(t.dtype == torch.float32 for t in kept):
                        return True
        return False

    def _poisoned(self) -> list[torch.optim.Optimizer]:
        """The optimizers, of those that have stepped, that hold a parameter that is not finite now."""
        each = {id(optimizer): optimizer for optimizer in self._recorder.steps.made_since(0)}
        return [
            optimizer
            for optimizer in each.values()
            if not all(is_finite(p.detach()) for group in optimizer.param_groups for p in group["params"])
        ]

    def _is_of_another_model(self, facts: dict[str, Any]) -> bool:
        """Whether the last finite loss need not have used this parameter: others have an optimizer of their own, and its
        own has not stepped since."""
        recorder = self._recorder
        poisoned = {id(optimizer) for optimizer in self._poisoned()}
        since = {id(optimizer) for optimizer in recorder.steps.made_since(recorder.judge.attempts_when_good)}
        others = {id(optimizer) for optimizer in recorder.steps.made_since(0)} - poisoned
        return bool(facts.get("is_trained") and poisoned and others) and not poisoned & since

    def _is_only_evaluated(self, facts: dict[str, Any]) -> bool:
        """Whether it belongs to a model of which nothing is trained: averaged weights (they may want gradients), frozen ones."""
        is_held_by_none = bool(self._recorder.steps.made_since(0)) and not self._poisoned()
        return bool(facts.get("is_only_evaluated")) or (facts.get("role") == "parameter" and is_held_by_none)

    def _bad_setting(self) -> tuple[str, str, str] | None:
        """(optimizer, name, value) of a number that such an optimizer works with and that is none: a schedule's 0/0 as its
        learning rate."""
        for optimizer in self._poisoned():
            for group in optimizer.param_groups:
                for name, value in group.items():
                    number = value if isinstance(value, float) else _number(value)
                    if number is not None and not math.isfinite(number):
                        return type(optimizer).__name__, name, str(number)
        return None

    def _was_bad_before_it_was_used(self, facts: dict[str, Any]) -> str | None:
        """What shows that a parameter was bad while the losses were still finite; None where nothing does."""
        last_good, seen = self._recorder.judge.last_good_step, self.weights_bad_since
        is_its_own = not self._is_of_another_model(facts)
        if seen is not None and last_good is not None and seen < last_good and is_its_own:
            return f"The weights were not finite already in step {seen}, when they were looked at."
        poisoned = self._poisoned()
        if not poisoned:
            return None  # (no optimizer holds it: averaged weights, which may want gradients and get none)
        if any(_have_moved_bad_ones(optimizer) for optimizer in poisoned):
            return None  # (though not in all of its steps: a part that was frozen until then)
        written, stepped = facts.get("times_written"), Counter(map(id, self._recorder.steps.made_since(0)))
        steps = [stepped[id(optimizer)] for optimizer in poisoned]
        if facts.get("is_trained") and written is not None and written < min(steps, default=sum(stepped.values())):
            return f"It was written to {written} times since it was made, less often than the optimizers have stepped."
        return None


def _have_moved_bad_ones(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its own state says that it has updated a parameter which is not finite now."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    for state in (optimizer.state[p] for p in held if p in optimizer.state and not is_finite(p.detach())):
        counts = [float(v) for v in state.values() if _is_count(v)] if isinstance(state, dict) else []
        if any(count > 0 for count in counts) if counts else bool(state):
            return True
    return False


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _rate_fixes(facts: dict[str, Any]) -> tuple[Fix, ...]:
    """What to do about a learning rate that is no number. No replay can show it: the weights of before are gone."""
    setting = facts.get("bad_setting")
    if setting is None or setting["name"] != "lr":
        return ()
    how = (
        f"repair the schedule, which gave {setting['optimizer']} a learning rate of {setting['value']} in step "
        f"{facts['since_step']}: keep the last rate beyond its end, and do not divide by a length that may be 0"
    )
    return (Fix("lower-learning-rate", None, how),)


def _without_initialising(incident: Incident) -> Incident:
    """It began well."""
    kept = tuple(fix for fix in incident.fixes if fix.action != "initialise-parameter")
    return msgspec.structs.replace(incident, fixes=kept)


def _reset_behind(incident: Incident, first: Case) -> Incident:
    """It began well, and has to be made well again after the step that spoiled it."""
    name, others = incident.evidence.get("name"), incident.evidence.get("others")
    what = f"{name} and the {others} more" if others else name
    how = f"repair the {first.incident.cause} of step {first.incident.step}, which poisoned it; or reset {what} after that step"
    fixes = (msgspec.structs.replace(f, how=how) if f.action == "initialise-parameter" else f for f in incident.fixes)
    return msgspec.structs.replace(incident, fixes=tuple(fixes))


def _held_in(facts: dict[str, Any]) -> str:
    """The low precision in which the script holds what was loaded."""
    held = facts.get("held_in")
    if held is None:
        return ""
    low, reaches = held["dtype"], held["reaches"]
    limit = torch.finfo(getattr(torch, low)).max
    text = f" The script holds them in {low}, under {held['key']!r} of a dictionary. {low} ends at {limit:.5g}"
    return (
        f"{text}." if reaches is None else f"{text}, and the numbers that it has there in float32 reach {reaches:.6g}."
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
    return float(value) if is_number else None


def _is_infinite_in_low_precision(facts: dict[str, Any]) -> bool:
    """Whether nothing but infinities is bad in a parameter of a low precision."""
    values = facts.get("values", {})
    dtype = getattr(torch, str(values.get("dtype")), None)
    is_low = isinstance(dtype, torch.dtype) and is_low_precision(dtype)
    return is_low and not values.get("nan") and bool(values.get("+inf") or values.get("-inf"))


def spoiled(first: Incident, facts: dict[str, Any]) -> str:
    """ "poisoned in step 4 by the cast at model.py:7 (fp16-overflow)"; `facts` is given the same."""
    at = f"{first.location.file}:{first.location.line}" if first.location else "an unknown line"
    facts["since_step"] = first.step
    facts["poisoned_by"] = {"step": first.step, "cause": first.cause, "op": first.op, "line": at}
    name = spelled_out(first.op.split(".")[1]) if first.op else "what failed"
    return f"poisoned in step {first.step} by {name} at {Path(at).name} ({first.cause})."


def _since(facts: dict[str, Any], update: str) -> str:
    """What has made a parameter or buffer bad that was not when training began."""
    if not facts.get("is_trained", True):
        return ": it was written to since"
    if not facts.get("gradients_were_looked_at"):
        return f": {update} poisoned it"
    return (
        f": {update} poisoned it, and the gradients of that update were finite. So the optimizer's own arithmetic did "
        "(a division by 0 in its state, a step far too large, a learning rate that is not a number), or a write of the "
        "script's to the parameter"
    )
