"""Scripts are run in processes of their own, plain and guarded, and asked what they saw."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
GUARDED = Path(__file__).with_name("guarded.py")


@dataclass(frozen=True)
class Outcome:
    """What a shell sees of a process."""

    status: int
    stdout: str
    stderr: str


class Workbench:
    """A folder with scripts, and two ways of running them: Python's own, and ours with a session that only logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "session.log"

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def command(self, *words: str, guarded: bool) -> list[str]:
        return [sys.executable, *([str(GUARDED)] if guarded else []), *words]

    def environment(self, **extra: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(SOURCES), "SESSION_LOG": str(self.log), **extra}

    def plain(self, *words: str, **extra: str) -> Outcome:
        return self._run(self.command(*words, guarded=False), extra)

    def guarded(self, *words: str, **extra: str) -> Outcome:
        return self._run(self.command(*words, guarded=True), extra)

    def session_saw(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def _run(self, command: list[str], extra: dict[str, str]) -> Outcome:
        self.log.unlink(missing_ok=True)
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(**extra), capture_output=True, text=True, timeout=60
        )
        return Outcome(done.returncode, done.stdout, done.stderr)
