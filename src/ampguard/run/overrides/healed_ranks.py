"""What one rank has healed is healed on the others as well.

A fix that keeps to float32 in some modules or lines changes nothing that ranks have in common, so each can apply it by
itself. The rank that found it writes it into the run folder before it differentiates the bad loss. The others learn of the
failure by their gradients, which are there only after that: then they look. Where ranks do not share the folder, each
heals what it sees itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from ampguard.incident import Location

_FILE = re.compile(r"healed-by-(\d+)\.json")


class Healed(msgspec.Struct, frozen=True):
    """A fix that was applied, and where the failure was that it is for."""

    step: int
    cause: str
    action: str
    target: str | None
    location: Location | None


class HealedRanks:
    """The fixes of all ranks of a run: one file for each that has healed something."""

    def __init__(self, folder: Path, rank: int, take: Callable[[Healed, int], bool]) -> None:
        """`take`: apply the fix that a rank has found; whether it could be."""
        self._folder = folder / "ranks"
        self._rank = rank
        self._take = take
        self._own: list[Healed] = []
        self._seen: dict[int, int] = {}
        """How many fixes of each other rank have been looked at."""

    def share(self, healed: Healed) -> None:
        """Write a fix of this rank down, whole or not at all. What cannot be written is this rank's alone."""
        self._own.append(healed)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / f".healed-by-{self._rank}.json"
            temporary.write_bytes(msgspec.json.encode(self._own))
            temporary.replace(self._folder / f"healed-by-{self._rank}.json")

    def look(self) -> bool:
        """Apply what other ranks have found since; whether any of it could be applied."""
        is_any = False
        with contextlib.suppress(OSError):
            for file in sorted(self._folder.iterdir()):
                named = _FILE.fullmatch(file.name)
                if named is not None and int(named[1]) != self._rank:
                    is_any = self._look_at(file, int(named[1])) or is_any
        return is_any

    def _look_at(self, file: Path, rank: int) -> bool:
        try:
            fixes = msgspec.json.decode(file.read_bytes(), type=list[Healed])
        except (OSError, msgspec.DecodeError):
            return False
        new, self._seen[rank] = fixes[self._seen.get(rank, 0) :], len(fixes)
        taken = [self._take(healed, rank) for healed in new]
        return any(taken)
