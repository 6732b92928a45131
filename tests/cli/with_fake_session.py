"""The command line with a session that prints its options: no torch, and the script's process is a real one."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path

from ampguard.cli import main
from ampguard.run.folder import make_run_folder


@dataclass
class RunOptions:
    out: Path | None
    steps: int | None
    max_incidents: int
    on_nonfinite: str
    script_name: str
    seed: int | None = None
    overrides: object = None


class Session:
    def __init__(self, options: RunOptions) -> None:
        self.options = options

    def start(self) -> None:
        make_run_folder(self.options.out, self.options.script_name)
        print(f"session {self.options}", flush=True)

    def finish(self, error: BaseException | None) -> None:
        print(f"finish {error!r}", flush=True)


fake = types.ModuleType("ampguard.run.session")
fake.__dict__.update(RunOptions=RunOptions, Session=Session)
sys.modules["ampguard.run.session"] = fake

if __name__ == "__main__":
    sys.exit(main())
