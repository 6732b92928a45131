"""What to do when a step is not finite: one file per policy."""

from __future__ import annotations

from ampguard.engine.policies.base import BadStep, Policy
from ampguard.engine.policies.heal import Heal
from ampguard.engine.policies.raising import Raise
from ampguard.engine.policies.rollback import Rollback
from ampguard.engine.policies.skip import Skip
from ampguard.errors import SetupError

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Skip, Raise, Rollback, Heal)}


def policy_named(given: str | Policy) -> Policy:
    """A policy by its name, or the given one."""
    if isinstance(given, Policy):
        return given
    if not isinstance(given, str) or given not in POLICIES:
        made = f": {given.__name__}()" if isinstance(given, type) and issubclass(given, Policy) else ""
        raise SetupError(
            f"unknown on_nonfinite={given!r}\n"
            f"  do    use one of {', '.join(map(repr, POLICIES))}, or a Policy that was made{made}"
        )
    return POLICIES[given]()


__all__ = ["POLICIES", "BadStep", "Heal", "Policy", "Raise", "Rollback", "Skip", "policy_named"]
