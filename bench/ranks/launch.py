"""Start a few ranks on this machine, as torchrun does, and give up on them after a stated time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How one rank ended. `status` is None where it had to be killed: it hung."""

    status: int | None
    out: str
    err: str


def launch(
    ranks: int,
    command: Sequence[str],
    folder: Path,
    within_s: float,
    start: Callable[..., Any] = subprocess.Popen,
    **environ: str,
) -> list[Ended]:
    """Run `python <command>` as each of `ranks` ranks in `folder`; those that have not ended `within_s` are killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        **environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    deadline = time.monotonic() + within_s
    running = []
    for rank in range(ranks):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        out, err = (folder / f"rank-{rank}.{name}" for name in ("out", "err"))
        with out.open("w") as out_file, err.open("w") as err_file:
            process = start([sys.executable, *command], cwd=folder, env=own, stdout=out_file, stderr=err_file)
        running.append((process, out, err))
    ended = []
    for process, out, err in running:
        status: int | None
        try:
            status = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
        ended.append(Ended(status, out.read_text(), err.read_text()))
    return ended
