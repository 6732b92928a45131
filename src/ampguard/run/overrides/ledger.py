"""What the overrides did, and what they could not do: said once on the terminal, kept for the report."""

from __future__ import annotations

from typing import Any

from ampguard.stderr import say


class Ledger:
    """Remembers and says. stdout belongs to the script."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.could_not: list[str] = []
        self.held_off = 0
        self.healed: list[dict[str, Any]] = []
        self.made_again: set[int] = set()
        """Steps that were made again with a fix."""
        self.at_lower_scale: set[int] = set()
        """Steps whose gradients overflowed because of the loss scale alone, and that were made again at a lower one."""

    def done(self, what: str) -> None:
        """Something was overridden that the user should know of: kept, and not said."""
        if what not in self.did:
            self.did.append(what)

    def not_done(self, what: str) -> None:
        """What was kept as done has turned out otherwise."""
        if what in self.did:
            self.did.remove(what)

    def failed(self, what: str, instead_of: str | None = None) -> None:
        """Something asked for could not be overridden. `instead_of`: what was said of it before and has turned out otherwise."""
        if instead_of in self.could_not:
            self.could_not.remove(instead_of)
        if what not in self.could_not:
            self.could_not.append(what)
            say(f"not overridden: {what}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "did": list(self.did),
            "could_not": list(self.could_not),
            "steps_held_off": self.held_off,
            "healed": list(self.healed),
            "steps_made_again": sorted(self.made_again),
            "steps_at_lower_loss_scale": sorted(self.at_lower_scale),
        }
