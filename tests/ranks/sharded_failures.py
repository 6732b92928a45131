"""One batch of rank 1 makes a logarithm inside a model of `fully_shard` NaN, in several ways of sharding.

Prints as JSON, for each way: whether the weights at the end are those of the same training without a guard.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ampguard
from ampguard.diagnose.budget import Budget

NO_LIMIT = Budget(math.inf)
GRADIENTS = ("scaled", "scaled float16", "held off", "unscaled")
"""The ways in which the loss is finite and its gradients are not."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) + 0.1 * (50.0 - x.abs().amax(1, keepdim=True)).log()


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(32, 4)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        h = self.drop(self.stem(x))
        for number, block in enumerate(self.blocks):
            h = h + 1000.0 * marked if number == 1 else h
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return self.head(h)


def sharded(way: str) -> nn.Module:
    net = Net(way == "checkpointed")
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(way.removeprefix("scaled "))
    policy = MixedPrecisionPolicy(param_dtype=low)
    options: dict[str, Any] = {"mp_policy": policy, **({"reshard_after_forward": False} if way == "kept" else {})}
    if way == "frozen":  # its outputs want no gradient, so the backward pass does not gather it
        net.stem.requires_grad_(False)
        fully_shard(net.stem)
    if way == "together":
        fully_shard([net.blocks[0], net.blocks[1]])
    for block in list(net.blocks)[2 if way == "together" else 0 :]:
        fully_shard(block, **options)
    fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=low, output_dtype=torch.float32 if low else None))
    return net


def train(way: str, leaves_out: bool = False) -> bytes:
    """`leaves_out`: whether the script itself leaves out the bad step, where the guard is to do that."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = sharded(way)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=way.startswith("scaled"))
    torch.manual_seed(rank)
    for step in range(7):
        if way.startswith("evaluated") and step in (3, 4):
            net.eval()
            for batch in range(3):
                is_bad = (rank, step) == (1, 4) and batch in ((1, 2) if way == "evaluated twice" else (1,))
                with torch.no_grad():
                    net(torch.randn(8, 16), marks(is_bad)).sum().item()
            net.train()
        optimizer.zero_grad()
        for micro in range(2 if way == "accumulated" else 1):
            is_bad = not way.startswith("evaluated") and (rank, step, micro) == (1, 4, 0)
            targets = torch.randint(0, 4, (8,))
            if way in GRADIENTS:  # the loss leaves the bad sample out, its derivative does not
                targets[3] = -100
            loss = nn.functional.cross_entropy(net(torch.randn(8, 16), marks(is_bad)), targets)
            scaler.scale(loss).backward()
        if way == "held off" and leaves_out and step == 4:
            continue
        scaler.step(optimizer)
        scaler.update()
    return b"".join(p.to_local().detach().numpy().tobytes() for p in net.parameters())


def marks(is_bad: bool) -> Tensor:
    """One number for each sample: where it is 1, the logarithm's operand becomes negative."""
    marked = torch.zeros(8, 1)
    marked[3] = float(is_bad)
    return marked


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    Budget.for_step = staticmethod(lambda *_: NO_LIMIT)  # type: ignore[method-assign]
    same = {}
    for way in sys.argv[1:]:
        plain = train(way, leaves_out=True)
        with ampguard.watch(out=Path(way), on_nonfinite="skip" if way == "held off" else "observe"):
            guarded = train(way)
        same[way] = plain == guarded
        dist.barrier()
    print(json.dumps(same))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
