"""Several short trainings in the same two processes, each under a guard of its own: starting ranks costs seconds.

Prints one line of JSON: the name of each training, and what stands for the weights with which it ended.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train import parse, train

import ampguard
from ampguard.diagnose.budget import Budget

NO_LIMIT = Budget(math.inf)
"""The machine may be busy: what an investigation finds is not to depend on it."""


def joined() -> str:
    """Rank 1 has more batches; after that another round, in which the step numbers of the ranks no longer agree."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Join([model]):
            for _ in range(6 + 3 * dist.get_rank()):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
    return "joined"


def independent() -> str:
    """Each rank trains a model of its own."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return "independent"


def buffers() -> str:
    """Statistics that DDP is told to leave alone differ from rank to rank."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return "buffers"


def empty_shards() -> str:
    """An optimizer whose only parameter has one element: rank 1 owns nothing of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fully_shard(model)
    body, last = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD([model[1].bias], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        scaler.scale(loss).backward()
        for optimizer in (body, last):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return "empty_shards"


def by_name(name: str) -> str:
    for made in (joined, independent, buffers, empty_shards):
        if made.__name__ == name:
            return made()
    return train(parse(name.split()))


def main() -> None:
    dist.init_process_group("gloo")
    Budget.for_step = staticmethod(lambda *_: NO_LIMIT)  # type: ignore[method-assign]
    ends = {}
    for number, asked in enumerate(sys.argv[1:]):
        policy, _, name = asked.rpartition(":")
        is_guarded = policy != "plain" and (policy != "first" or dist.get_rank() == 0)
        action: Any = policy if policy in ("skip", "heal") else "observe"
        guard = ampguard.watch(out=Path(f"out-{number}"), on_nonfinite=action)
        with guard if is_guarded else nullcontext():
            ends[asked] = by_name(name)
        dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
