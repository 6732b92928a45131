"""The main function of scripts that hold several short trainings: starting ranks costs seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import ampguard


def each_guarded(trainings: dict[str, Callable[[], None]]) -> None:
    """Run those named on the command line, each under a guard of its own; its run folder has its name."""
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        with ampguard.watch(out=Path(name)):
            trainings[name]()
        dist.barrier()
    dist.destroy_process_group()
