"""An ordinary training under several ranks, into which one fault can be thrown.

Run by every rank, with torchrun's variables in its environment. `--fault KIND --on RANK --at STEP`:

none        nothing
nan-batch   the batch of one rank holds a NaN
log         one rank's loss takes the logarithm of a negative number
inside      one rank's batch makes a logarithm inside the model NaN
overflow    the activations of one rank leave float16 (needs `--amp`)
raise       one rank raises
kill        one rank is killed
log-kill    as log, and three steps later the rank is killed
slow        one rank sleeps for two seconds
die-late    one rank raises, or (kill-late) is killed, when its failing step is run again to be investigated
drift       one rank's weights are written to
scale       one rank's loss scale is halved (needs `--amp`)
rate        one rank's learning rate is halved from there on
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """A small network with a buffer that training changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(width, 4)
        self.drop = nn.Dropout(0.1)
        self.calls_of_bad_batches = 0
        self.dies: str | None = None
        self.has_log = False

    def forward(self, x: Tensor) -> Tensor:
        if self.dies is not None and not torch.isfinite(x).all():
            self.calls_of_bad_batches += 1
            if self.calls_of_bad_batches > 1:
                die(self.dies)
        h = self.norm(self.stem(x))
        if self.has_log:
            h = h + 0.01 * (100.0 - x.abs().amax(1, keepdim=True)).log()
        return self.head(self.drop(self.blocks(h)))


def die(how: str) -> None:
    if how.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("this rank raises, as asked for")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("ddp", "fsdp", "none"), default="ddp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--fault", default="none")
    parser.add_argument("--on", type=int, default=1)
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--times", type=int, default=1, help="steps in which it happens")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a collective may take")
    return parser.parse_args(arguments)


def batches(rank: int, step: int, asked: argparse.Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=generator)
    y = torch.randint(0, 4, (8,), generator=generator)
    if is_now(asked, rank, step) and asked.fault in ("nan-batch", "die-late", "kill-late"):
        x[3, 5] = float("nan")
    if is_now(asked, rank, step) and asked.fault == "overflow":
        x *= 1e6
    if is_now(asked, rank, step) and asked.fault == "inside":
        x[6, 2] = 500.0
    return x, y


def is_now(asked: argparse.Namespace, rank: int, step: int) -> bool:
    return rank == asked.on and asked.at <= step < asked.at + asked.times


def wrapped(net: Net, engine: str) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(net)
    if engine == "fsdp":
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    return net


def misfortune(asked: argparse.Namespace, rank: int, step: int, net: Net, scaler: torch.amp.GradScaler) -> None:
    if asked.fault == "log-kill" and (rank, step) == (asked.on, asked.at + 3):
        die("kill")
    if not is_now(asked, rank, step):
        return
    if asked.fault in ("raise", "kill"):
        die(asked.fault)
    if asked.fault == "slow":
        time.sleep(2.0)
    if asked.fault == "drift":
        with torch.no_grad():
            net.blocks[1][0].weight[0, 0] += 0.5
    if asked.fault == "scale":
        scaler.update(scaler.get_scale() / 2)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, is_bad: bool) -> Tensor:
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    if is_bad:
        loss = loss + 0.1 * (logits.float().min() - 100.0).log()
    return loss


def train(asked: argparse.Namespace) -> str:
    """Train, and return what stands for every bit of the weights that this rank holds."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = Net(asked.width)
    torch.manual_seed(7)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    torch.manual_seed(rank)
    net.has_log = asked.fault == "inside"
    net.dies = {"die-late": "raise", "kill-late": "kill"}.get(asked.fault)
    model = wrapped(net, asked.engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=asked.amp)
    for step in range(asked.steps):
        misfortune(asked, rank, step, net, scaler)
        if asked.fault == "rate" and is_now(asked, rank, step):
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.zero_grad()
        for micro in range(asked.accumulate):
            x, y = batches(rank, step, asked)
            is_last = micro == asked.accumulate - 1
            waits = model.no_sync() if asked.engine == "ddp" and not is_last else contextlib.nullcontext()
            with waits:
                with torch.autocast("cpu", dtype=torch.float16, enabled=asked.amp):
                    loss = loss_of(model, x, y, asked.fault in ("log", "log-kill") and is_now(asked, rank, step))
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    weights = hashlib.blake2b(
        b"".join(local(p).numpy().tobytes() for p in model.parameters()), digest_size=8
    ).hexdigest()
    print(f"rank {rank}: {asked.steps} steps, weights {weights}", flush=True)
    return weights


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local().detach() if hasattr(parameter, "to_local") else parameter.detach()


def main() -> None:
    asked = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=asked.timeout))
    train(asked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
