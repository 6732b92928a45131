"""Short float32 trainings whose gradients DDP sends through a communication hook, each under a guard of its own.

Takes their names; the run folder of each is named after it. In step 4 one rank's batch (or both) is far off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ampguard

calls: list[int] = []
LARGE, LARGER = 4e4, 4e5


def halved(state, bucket):
    """Sums first and divides later: two gradients of 4e4 leave float16 in the sum."""
    calls.append(bucket.index())
    state["calls"] += 1
    sent = bucket.buffer().half()
    done = dist.all_reduce(sent, async_op=True).get_future()
    return done.then(lambda f: f.value()[0].float() / dist.get_world_size())


def train(hook: Callable[..., Any] | str | None, peaks: tuple[float, float], state: Any = None) -> None:
    """`peaks`: of the gradients of each rank, in step 4."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    if hook == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook is not None:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(8):
        x = torch.ones(2, 4)
        factor = peaks[dist.get_rank()] if step == 4 else 1.0
        optimizer.zero_grad()
        (model(x).mean() * factor).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def own_hook() -> None:
    state = {"calls": 0}
    train(halved, (LARGE, LARGE), state)
    assert (len(calls), state["calls"]) == (8, 8)  # the script's own calls, and nobody else's


def power_sgd() -> None:
    """It sends other numbers than gradients, in float32."""
    train(powerSGD_hook.powerSGD_hook, (1.0, LARGER), powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2))


CASES: dict[str, Callable[[], None]] = {
    "fp16": lambda: train(default_hooks.fp16_compress_hook, (1.0, LARGER)),
    "builtin": lambda: train("builtin", (LARGER, 1.0)),
    "wrapped": lambda: train(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), (1.0, LARGER)),
    "own_hook": own_hook,
    "power_sgd": power_sgd,
    "none": lambda: train(None, (1.0, LARGER)),
    "nan": lambda: train(default_hooks.fp16_compress_hook, (1.0, float("nan"))),
    "fits": lambda: train(default_hooks.fp16_compress_hook, (LARGE, LARGE)),
}


def main() -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        with ampguard.watch(out=Path(name)):
            CASES[name]()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
