"""Processes that the script starts itself (`torch.multiprocessing.spawn`): they train, and no guard is on in them."""

from __future__ import annotations

import re
import sys


def processes_made() -> int:
    """How many processes this one has made by `multiprocessing`."""
    module = sys.modules.get("multiprocessing.process")
    counter = re.fullmatch(r"count\((\d+)\)", repr(getattr(module, "_process_counter", None)))
    return int(counter.group(1)) - 1 if counter is not None else 0


def unwatched(made: int) -> str:
    """What is said at the end of a run that has computed nothing itself."""
    each = f"--nproc-per-node {made} " if made > 1 else ""
    return (
        f"nothing was computed in this process, and the {made} that it started {'were' if made > 1 else 'was'} not watched. "
        f"Let torchrun start the ranks: torchrun {each}-m ampguard run ...; or enter ampguard.watch() in each of them"
    )
