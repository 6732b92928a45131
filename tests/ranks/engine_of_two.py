"""The engine on two ranks, and the same steps in one process; prints what every step came to, as JSON."""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import ampguard
from ampguard import compat


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def made(kind: str, precision: str) -> tuple[nn.Module, torch.optim.Optimizer, ampguard.Amp]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model[2])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, ampguard.Amp(model, optimizer, precision=precision, max_grad_norm=0.5, init_scale=256.0)


def go_on(kind: str, model: nn.Module, amp: ampguard.Amp, steps: range, bad: int = -1) -> list[tuple[Any, ...]]:
    """(skipped, norm, scale, collectives) of each step; in step `bad` one element overflows, on one rank's shard."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    seen = []
    for step in steps:
        ranks = (0, 1) if kind == "one" else (rank,)
        with amp.autocast():
            losses = [nn.functional.cross_entropy(model(x).float(), y) for x, y in (batch(step, r) for r in ranks)]
        amp.backward(torch.stack(losses).mean())
        if step == bad and (kind != "fsdp" or rank == 1):
            gradient = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.dim() == 2)
            getattr(gradient, "_local_tensor", gradient)[0, 0] = float("inf")
        with CommDebugMode() as sent:
            result = amp.step()
        seen.append((bool(result.skipped), round(float(result.grad_norm), 4), amp.get_scale(), sent.get_total_counts()))
    return seen


def partly_sharded() -> list[bool]:
    """Which steps are skipped where a layer is no shard, and its gradient is bad on rank 1 alone."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    fully_shard(model[0])
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.01), precision="fp16", init_scale=256.0)
    skipped = []
    for step in range(3):
        x, y = batch(step, dist.get_rank())
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        amp.backward(loss)
        if step == 1 and dist.get_rank() == 1:
            model[2].weight.grad[0, 0] = float("inf")
        skipped.append(bool(amp.step().skipped))
    return skipped


def weights(model: nn.Module) -> float:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return sum(float(p.double().abs().sum()) for p in whole)


def main() -> None:
    several = sys.argv[1] == "several"
    if several:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=50))
    found: dict[str, Any] = {"timeout": compat.collective_timeout()}
    for kind in ("ddp", "fsdp") if several else ("one",):
        for precision in ("fp32", "fp16"):
            model, _, amp = made(kind, precision)
            seen = go_on(kind, model, amp, range(6), bad=3)
            amp.save_sharded(f"{kind}-{precision}")
            found[f"{kind} {precision}"] = [*seen, *go_on(kind, model, amp, range(6, 9)), weights(model)]
            again, _, amp = made(kind, precision)
            amp.load_sharded(f"{kind}-{precision}")
            found[f"{kind} {precision} resumed"] = [*go_on(kind, again, amp, range(6, 9)), weights(again)]
            if not several:
                for other in ("ddp", "fsdp"):  # from two ranks to one
                    again, _, amp = made(kind, precision)
                    amp.load_sharded(f"{other}-{precision}")
                    found[f"{other} {precision} on one rank"] = [*go_on(kind, again, amp, range(6, 9)), weights(again)]
    if several:
        found["partly sharded"] = partly_sharded()
    print(json.dumps(found))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
