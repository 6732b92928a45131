"""`python guarded.py SCRIPT|-m MODULE [ARGS...]`: the runner with a session that only writes down what it is told.

SESSION_FAULT=start|finish|leave|usage makes it fail there. No torch: a process starts in a tenth of a second.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ampguard.errors import UsageError
from ampguard.run.script import ScriptTarget, execute


class LoggingSession:
    def __init__(self) -> None:
        self._fault = os.environ.get("SESSION_FAULT")
        self._log = Path(os.environ["SESSION_LOG"])

    def start(self) -> None:
        if self._fault == "usage":
            raise UsageError("the folder is taken")
        if self._fault == "start":
            raise ZeroDivisionError("a bug in start")
        self._say("start")

    def finish(self, error: BaseException | None) -> None:
        if self._fault == "finish":
            raise ZeroDivisionError("a bug in finish")
        self._say(f"finish {error!r}")

    def leave(self) -> None:
        if self._fault == "leave":
            time.sleep(60)
        self._say("leave")

    def _say(self, what: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{what}\n")


def main(words: list[str]) -> int:
    if words[0] == "-m":
        return execute(ScriptTarget(words[1], tuple(words[2:]), is_module=True), LoggingSession())
    return execute(ScriptTarget(words[0], tuple(words[1:])), LoggingSession())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
