"""How ranks compare notes: through small files in the run folder, never by a collective.

A collective of ours could wait for a rank that is somewhere else, and the script's own would then wait for it. A file
that is not there yet is looked for again later. Of the ranks that share a model and a run folder the first one writes;
the others read what it wrote about a step and compare it with their own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

KEPT = 16
"""Checks that stay on disk: all of the first 64 steps. Ranks that wait for each other in collectives are never so far apart."""

_SIGNED_IN = re.compile(r"\.rank-(\d+)-\d+")


class Check(msgspec.Struct, frozen=True):
    """What one rank had after a step. `course`: of its last steps, [step, loss scale, was skipped].

    `number` counts the checks: the number of a step comes twice where steps turn out to be longer than they seemed.
    """

    number: int
    step: int
    digest: str
    course: list[tuple[int, float | None, bool | None]]
    settings: dict[str, float] = {}
    """What the optimizers have stepped with."""


class Sums(msgspec.Struct, frozen=True):
    """The weights that a digest was made from."""

    names: list[str]
    sums: list[int]


Note = TypeVar("Note", Check, Sums)


class Exchange:
    """The notes about one model: `ranks/<model>-of-<rank>/<check>.json` and, read only on a difference, `<check>.sums`."""

    def __init__(self, folder: Path, model: int, first: int, attempt: int = 0) -> None:
        again = f"-restart-{attempt}" if attempt else ""
        self._folder = folder / "ranks" / f"{model}-of-{first}{again}"

    def write(self, check: Check, sums: Sums) -> None:
        """Leave a note, whole or not at all; the oldest go."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, value in ((f"{check.number}.sums", sums), (f"{check.number}.json", check)):
            temporary = self._folder / f".{name}"
            temporary.write_bytes(msgspec.json.encode(value))
            temporary.replace(self._folder / name)
        numbers = sorted(int(file.stem) for file in self._folder.glob("[0-9]*.json"))
        for number in numbers[:-KEPT]:
            for name in (f"{number}.json", f"{number}.sums"):
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()

    def check_of(self, number: int) -> Check | None:
        """What the first rank had at a check; None where it has not said so (yet, or any more)."""
        return self._read(self._folder / f"{number}.json", Check)

    def newest(self) -> int:
        """The last check of which the first rank has told; -1 before it has told of any."""
        return max((int(file.stem) for file in self._folder.glob("[0-9]*.json")), default=-1)

    def sums_of(self, number: int) -> Sums | None:
        return self._read(self._folder / f"{number}.sums", Sums)

    @staticmethod
    def _read(file: Path, kind: type[Note]) -> Note | None:
        try:
            return msgspec.json.decode(file.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError):
            return None


def first_here(folder: Path, ranks: Sequence[int]) -> int | None:
    """The first of some ranks that has signed in to this run folder: others may write to another machine's disk."""
    with contextlib.suppress(OSError):
        here = {int(match[1]) for name in os.listdir(folder) if (match := _SIGNED_IN.fullmatch(name))}
        return min(here & set(ranks), default=None)
    return None
