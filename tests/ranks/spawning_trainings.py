"""A script that starts its ranks itself: `START:RANKS:BAD...`, one training after another.

START: spawn and fork are torch.multiprocessing's, Process and Class the standard library's.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info


def is_spawned() -> bool:
    """Whether this process is no copy of another."""
    return "Spawn" in type(mp.current_process()).__name__


class Data(Dataset):
    """Says what a loader's worker has imported."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert not is_spawned() or get_worker_info() is None or "ampguard" not in sys.modules
        return torch.full((4,), i / 24.0), torch.tensor([i % 3 / 3.0])


def train(rank: int, ranks: int, port: int, bad: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    has_worker = rank == 0 and bad == "none"
    loader = DataLoader(
        Data(), 6, num_workers=int(has_worker), multiprocessing_context="spawn" if has_worker and is_spawned() else None
    )
    for step, (x, y) in enumerate(loader):
        out = net(x)
        if bad == "raise" and step == 2:
            if rank == 1:
                raise ValueError("the script's own")
            time.sleep(60.0)  # until it is terminated: an error of its own, of the lost connection, might be told first
        loss = ((out - y) ** 2).mean()
        if bad == "log" and rank == 1 and step == 3:
            loss = loss + torch.log(out - 9.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    if rank == 0:
        print(hashlib.sha1(bits).hexdigest(), flush=True)
    del net, optimizer, out, loss  # DDP must not go last: it would wait for gloo's thread, which waits for the GIL
    dist.destroy_process_group()


class Rank(mp.get_context("fork").Process):  # type: ignore[name-defined,misc]
    def __init__(self, *args: object) -> None:
        super().__init__()
        self.given = args

    def run(self) -> None:
        train(*self.given)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(start: str, ranks: int, bad: str) -> None:
    args = ranks, free_port(), bad
    if start in ("spawn", "fork"):
        mp.start_processes(train, args=args, nprocs=ranks, start_method=start)
        return
    make = Rank if start == "Class" else lambda *args: mp.get_context("fork").Process(target=train, args=args)
    processes = [make(rank, *args) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])


if __name__ == "__main__":
    for each in sys.argv[1:]:
        start, ranks, bad = each.split(":")
        main(start, int(ranks), bad)
