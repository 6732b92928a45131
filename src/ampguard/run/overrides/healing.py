"""`--on-nonfinite heal`: the smallest fix that was seen to work is applied to the running model."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ampguard import compat
from ampguard.engine.force_fp32.modules import is_forced
from ampguard.incident import Fix, Incident, Location
from ampguard.run.overrides.forced import Forced
from ampguard.run.overrides.healed_ranks import Healed, HealedRanks
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.lines import LinesInFloat32
from ampguard.run.overrides.plan import Plan
from ampguard.run.overrides.regions import any_low_dtype
from ampguard.run.overrides.roots import RootCalls
from ampguard.stderr import say

SMALLEST_FIRST = ("force-fp32", "use-bf16", "disable-amp")
AS_IN_FLOAT32 = 0.02
"""How far a replayed loss may be from that in float32, as a share of the larger: what the healed run is to keep within."""

PRECISION_OF = {"use-bf16": "bf16", "disable-amp": "fp32"}


Places = tuple[list[tuple[str, nn.Module]], list[tuple[str, int]]]
"""Modules by name, and lines."""


class Healer:
    """Applies verified precision fixes, each once."""

    def __init__(
        self,
        plan: Plan,
        roots: RootCalls,
        forced: Forced,
        lines: LinesInFloat32,
        ledger: Ledger,
        lift: Callable[[], None],
    ) -> None:
        """`lift`: have models whose weights the script made low run on float32 casts of them from now on."""
        self._lift = lift
        self._plan = plan
        self._roots = roots
        self._forced = forced
        self._lines = lines
        self._ledger = ledger
        self._applied: set[tuple[str, str | None]] = set()
        self._taken_back: set[tuple[str, str | None]] = set()
        """Of these, what a model's own code did not bear."""
        self._larger: tuple[Incident, list[Fix]] | None = None
        """The incident that was healed last, and its verified fixes beyond the one applied."""
        self._unproved: list[tuple[Incident, Fix, Callable[[], None]]] = []
        """The fixes of the last failing step that no replay of it has tried alone, and how each is undone."""
        self._in_vain: set[tuple[str, str | None, str, Location | None]] = set()
        """Of these, what did not help, and against which cause at which line."""
        self._on_trial: tuple[Fix, Callable[[], None]] | None = None
        """The fix that was applied last, until a model was called with it, and how it is undone."""
        self.shared: HealedRanks | None = None
        """What ranks that train together tell each other of their fixes; None where there is one only."""

    def heal(self, incident: Incident) -> None:
        """Apply the smallest verified fix of the incident, and say what was done, or that nothing can be."""
        if incident.severity != "error" or incident.phase == "protocol":  # no step is lost by it
            return
        if self._heal(incident, is_proved=True):
            return
        verified = self._verified(incident)
        larger = next((PRECISION_OF[fix.action] for fix in verified if fix.action in PRECISION_OF), None)
        if larger is not None and compat.several_ranks():
            say(
                f"{incident.cause} in step {incident.step}: not healed, one rank cannot change its precision and loss scale "
                f"alone. Run all ranks with --precision {larger}"
            )
            return
        others = ", ".join(dict.fromkeys(fix.action for fix in incident.fixes)) or "none"
        say(f"{incident.cause} in step {incident.step}: cannot be healed from outside (its fixes: {others})")

    def heal_again(self, incident: Incident) -> bool:
        """The same failure in a later step: apply the smallest fix that is not in force everywhere. Whether there was one."""
        return self._heal(incident, is_proved=False)

    def _heal(self, incident: Incident, is_proved: bool) -> bool:
        """`is_proved`: the fixes were verified by replaying this very step."""
        actions = ("force-fp32",) if compat.several_ranks() else SMALLEST_FIRST
        usable = [fix for fix in self._verified(incident) if fix.action in actions]
        if not is_proved:
            usable = [fix for fix in usable if _failure(fix, incident) not in self._in_vain]
        return incident.severity == "error" and self._apply_first(incident, in_order(usable), is_proved)

    def _verified(self, incident: Incident) -> list[Fix]:
        return [fix for fix in incident.fixes if fix.verified and not self._is_applied(fix, incident.location)]

    def heal_more(self, step: int) -> bool:
        """The fix applied in this step is not enough for its gradients: apply the next larger verified one."""
        if self._larger is None or self._larger[0].step != step:
            return False
        return self._apply_first(*self._larger, is_proved=False)

    def did_not_help(self, step: int) -> None:
        """The step was made again with all fixes, and is bad: take back those that were not verified by a replay of it.

        What fails by now may be another failure at the same line (one that float32 has as well).
        """
        while self._unproved and self._unproved[-1][0].step == step:
            incident, fix, undo = self._unproved.pop()
            undo()
            self._applied.discard((fix.action, fix.target))
            self._in_vain.add(_failure(fix, incident))
            self._ledger.healed.remove(_entry(step, incident.cause, fix))
            say(f"{incident.cause} in step {step}: {_where(fix)} does not help, and is taken back")
        self._unproved.clear()

    def take(self, healed: Healed, rank: int) -> bool:
        """Apply what another rank has found and applied; whether that could be done."""
        key = (healed.action, healed.target)
        fix = Fix(healed.action, healed.target, "")
        if healed.action != "force-fp32" or self._is_applied(fix, healed.location):
            return False
        if not self._apply(fix, healed.location):
            return False
        self._applied.add(key)
        self._note(healed, f"healed as on rank {rank}", fix)
        return True

    def is_borne(self) -> None:
        """A model was called with all fixes, and did not fail."""
        self._on_trial = None

    def take_back(self, error: Exception) -> bool:
        """The model's own code fails since the last fix (types that do not go together): undo it. Whether there was one."""
        if self._on_trial is None:
            return False
        (fix, undo), self._on_trial = self._on_trial, None
        self._taken_back.add((fix.action, fix.target))
        undo()
        healed = self._ledger.healed.pop()
        say(
            f"{healed['cause']} in step {healed['step']}: not healed after all, with {_where(fix)} the model's own code fails "
            f"({str(error).splitlines()[0]})"
        )
        return True

    def _apply_first(self, incident: Incident, fixes: list[Fix], is_proved: bool) -> bool:
        """Apply the first of the fixes that can be."""
        self._unproved = [one for one in self._unproved if one[0].step == incident.step]
        self._larger = None
        for position, fix in enumerate(fixes):
            if self._apply(fix, incident.location):
                self._lift_own_casts(incident, fix)
                self._applied.add((fix.action, fix.target))
                self._larger = (incident, fixes[position + 1 :])
                if not is_proved and self._on_trial is not None and self._on_trial[0] is fix:
                    self._unproved.append((incident, fix, self._on_trial[1]))
                self._tell(incident, fix)
                return True
        return False

    def _lift_own_casts(self, incident: Incident, fix: Fix) -> None:
        """Where the script itself casts to low precision, it would undo the fix: these lines run in float32."""
        names = list(incident.evidence.get("own_casts", ()))
        if fix.action in PRECISION_OF:
            names += incident.evidence.get("casts_behind", ())
        if names:
            self._lines.add(places_in(names))

    def _apply(self, fix: Fix, location: Location | None) -> bool:
        if fix.action in PRECISION_OF:
            return self._change_precision(fix)
        places = self._places_of(fix, location)
        if places is None:
            return False
        modules, lines = places
        # The replay that verified it left the results in float32 where autocast casts them as it wants: cast back they
        # might overflow again. Low-precision weights need inputs of their own type.
        has_low_weights = self._plan.weights_dtype != torch.float32
        if modules and not self._forced.force(modules, cast_back=has_low_weights):
            return False
        if modules:
            self._on_trial = fix, functools.partial(self._forced.release, modules)
        if lines:
            self._lines.add(lines)
        return True

    def _places_of(self, fix: Fix, location: Location | None) -> Places | None:
        """The modules, by name, and the lines outside them that a fix is about; None where one of them is not known."""
        modules: list[tuple[str, nn.Module]] = []
        lines: list[tuple[str, int]] = []
        named = self._roots.named()
        for target in (fix.target if fix.target is not None else "").split(", "):
            file, _, number = target.rpartition(":")
            if not target:
                modules += [(type(m).__name__, m) for m in running_line(self._roots.unnamed(), location)]
            elif target in named:
                modules += [(target, module) for module in named[target]]
            elif file and number.isdigit():
                lines.append((file, int(number)))
            else:
                return None
        return modules, lines

    def _is_applied(self, fix: Fix, location: Location | None) -> bool:
        """Whether a fix is in force: what has the same name in another model may not be so yet."""
        key = (fix.action, fix.target)
        if fix.action in PRECISION_OF or key not in self._applied or key in self._taken_back:
            return key in self._applied
        places = self._places_of(fix, location)
        return places is None or all(is_forced(module) for _, module in places[0])

    def _change_precision(self, fix: Fix) -> bool:
        """Another autocast for all that comes; where the script itself made the weights low, float32 ones too."""
        is_own = self._plan.weights_dtype == torch.float32 and any(any_low_dtype(root) for root in self._roots.roots)
        if is_own and PRECISION_OF[fix.action] != "fp32":
            return False  # autocast is not what made them low
        self._on_trial = fix, self._plan.change(PRECISION_OF[fix.action])
        if is_own:
            self._lift()
        return True

    def _tell(self, incident: Incident, fix: Fix) -> None:
        healed = Healed(incident.step, incident.cause, fix.action, fix.target, incident.location)
        self._note(healed, "healed", fix)
        if self.shared is not None:
            self.shared.share(healed)

    def _note(self, healed: Healed, how: str, fix: Fix) -> None:
        self._ledger.healed.append(_entry(healed.step, healed.cause, fix))
        where = (
            "float16 weights run as float32 casts"
            if fix.action == "disable-amp" and self._plan.lifts_own_weights
            else _where(fix)
        )
        say(f"{healed.cause} in step {healed.step}: {how}, {where} from now on")


def _entry(step: int, cause: str, fix: Fix) -> dict[str, Any]:
    """A fix as the report keeps it."""
    return {"step": step, "cause": cause, "action": fix.action, "target": fix.target}


def _failure(fix: Fix, incident: Incident) -> tuple[str, str | None, str, Location | None]:
    """A fix of what fails at a line."""
    return fix.action, fix.target, incident.cause, incident.location


def places_in(texts: Sequence[str]) -> list[tuple[str, int]]:
    """`["model.py:8"]` as lines of files."""
    named = (text.rpartition(":") for text in texts)
    return [(file, int(number)) for file, _, number in named if number.isdigit()]


def _where(fix: Fix) -> str:
    names = fix.target.split(", ") if fix.target else []
    if names and all(name.replace(".", "").isdigit() for name in names):  # places in a list
        in_float32 = f"module{'s' if len(names) > 1 else ''} {fix.target} in float32"
    else:
        in_float32 = f"{fix.target or 'the root module'} in float32"
    return {"use-bf16": "autocast in bfloat16", "disable-amp": "autocast off"}.get(fix.action, in_float32)


def in_order(fixes: Sequence[Fix]) -> list[Fix]:
    """The smallest first, of those that give the step the loss that it has in float32; then the others.

    A step that is finite and has another loss is not cured: what overflowed is gone, and what was rounded away is not back.
    """
    exact = next(
        (loss for fix in fixes if fix.action == "disable-amp" and (loss := replayed_loss(fix)) is not None), None
    )

    def rank(fix: Fix) -> tuple[bool, int]:
        loss = replayed_loss(fix)
        is_off = exact is not None and loss is not None and not math.isclose(loss, exact, rel_tol=AS_IN_FLOAT32)
        return is_off, SMALLEST_FIRST.index(fix.action)

    return sorted(fixes, key=rank)


def replayed_loss(fix: Fix) -> float | None:
    """The loss of the step that was replayed with the fix, as its outcome tells it (docs/diagnosis.md)."""
    told = re.search(r"the loss is (\S+)$", fix.outcome or "")
    return float(told[1]) if told is not None else None


def running_line(roots: list[nn.Module], location: Location | None) -> list[nn.Module]:
    """Those of the roots whose own `forward` holds the line; all of them where none does."""
    if location is None:
        return roots
    found = []
    for root in roots:
        code = getattr(inspect.unwrap(type(compat.unwrapped(root)).forward), "__code__", None)
        if code is None:
            continue
        lines = [number for *_, number in code.co_lines() if number is not None]
        if lines and code.co_filename == location.file and min(lines) <= location.line <= max(lines):
            found.append(root)
    return found or roots
