"""Fixes of a precision that came from outside: as options, for a script that must not be edited."""

from __future__ import annotations

import shlex

import msgspec

from ampguard.diagnose.words import ROOT
from ampguard.incident import Fix, Incident


def in_options(incident: Incident, precision: str, is_gained: bool, scale_is_gained: bool) -> Incident:
    """The incident with its fixes of the precision told as options of `ampguard run`.

    `precision`: what `--precision` asked for. `is_gained`: whether the script has no autocast of its own, in which a line
    of it could leave autocast. `scale_is_gained`: whether it has no scaler of its own, which could begin lower.
    """
    fixes = tuple(_as_option(fix, precision, is_gained, scale_is_gained) for fix in incident.fixes)
    return msgspec.structs.replace(incident, fixes=fixes)


def _as_option(fix: Fix, precision: str, is_gained: bool, scale_is_gained: bool) -> Fix:
    how = None
    if fix.action == "use-bf16":
        how = f"use bfloat16, which has float32's range: --precision bf16 in place of {precision}"
    elif fix.action == "disable-amp":
        how = f"compute in float32: --precision fp32 in place of {precision}"
    elif fix.action == "force-fp32" and is_gained and _are_patterns(names := (fix.target or "").split(", ")):
        options = " ".join(f"--force-fp32 {shlex.quote(name)}" for name in names)
        how = f"beside --precision {precision}: {options}\n# or, in the code:\n{fix.how}"
    elif fix.action == "lower-loss-scale" and scale_is_gained:
        how = (
            f"beside --precision {precision}: --on-nonfinite heal, which makes such a step again at the scale that fits"
        )
    return fix if how is None else msgspec.structs.replace(fix, how=how)


def _are_patterns(names: list[str]) -> bool:
    """Whether a fix is aimed at modules that have names; neither at lines nor at a whole model."""
    return not any(not name or ":" in name or name == ROOT for name in names)
