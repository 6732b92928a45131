"""What the guard has found out about the step that is just failing, for the message of an exception."""

from __future__ import annotations

import sys
from typing import Any

from ampguard.incident import Incident

WITHOUT_GUARD = "ampguard: run the same script with `ampguard run` to be told the operator, the line and a fix"


def with_diagnosis(error: FloatingPointError) -> FloatingPointError:
    """The same exception, its message followed by the guard's answer, or by how to get one."""
    session = _session()
    if session is None:
        told = WITHOUT_GUARD
    else:
        incident: Incident | None = session.explain_now(error)
        told = _told(incident) if incident is not None else "ampguard: not explained yet; the report may say more"
    error.args = (f"{error.args[0] if error.args else ''}\n{told}", *error.args[1:])
    return error


def _session() -> Any:
    """The guard that is on; asks nothing of a process in which none was begun."""
    guarding = getattr(sys.modules.get("ampguard.run.session"), "guarding", None)
    return guarding() if guarding is not None else None


def _told(incident: Incident) -> str:
    lines = [f"ampguard: {incident.cause} in step {incident.step}: {incident.explanation}"]
    if incident.location is not None:
        where = f"  at    {incident.location.file}:{incident.location.line}  {incident.location.code}"
        lines.append(where + (f"  (module {incident.module})" if incident.module else ""))
    for fix in incident.fixes[:1]:
        first, *more = fix.how.splitlines() or [fix.action]
        lines += [f"  {'fix' if fix.verified else 'try'}   {first}", *(f"        {line}" for line in more)]
    return "\n".join([*lines, f"  more  ampguard explain {incident.cause}"])
