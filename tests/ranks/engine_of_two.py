"""The engine on two ranks, and the same steps in one process; prints what every step came to, as JSON."""

from __future__ import annotations

import datetime
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import ampguard
from ampguard import compat
from ampguard.engine.policies import Rollback
from ampguard.errors import CheckpointError, NonfiniteError, ProtocolError, SetupError


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
            held = [p for o in amp.optimizers.values() for group in o.param_groups for p in group["params"]]
            gradient = next(p.grad for p in held if p.grad is not None and p.grad.dim() == 2)
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


def lowered(precision: str, options: dict[str, Any], kind: str, norm: bool = True) -> tuple[nn.Module, ampguard.Amp]:
    """A model whose weights are cast, wrapped after that; SGD, so that steps can be compared.

    Ranks begin with weights of their own: DDP gives all of them those of the first one.
    """
    torch.manual_seed(dist.get_rank() if kind == "ddp" else 0)
    model: nn.Module = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32) if norm else nn.Tanh(), nn.GELU(), nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = ampguard.Amp(model, optimizer, precision, max_grad_norm=0.5, init_scale=256.0, **options)
    return DistributedDataParallel(model) if kind == "ddp" else model, amp


def with_low_weights(several: bool) -> dict[str, Any]:
    """O2 and bf16-true: steps, a checkpoint of two ranks, and steps from it."""
    found: dict[str, Any] = {}
    kind = "ddp" if several else "one"
    for precision, options in (("O2", {}), ("bf16-true", {"rounding": "kahan"})):
        model, amp = lowered(precision, options, kind)
        seen = go_on(kind, model, amp, range(4), bad=2)
        if several:
            amp.save_sharded(f"low-{precision}")
        found[precision] = [*seen, *go_on(kind, model, amp, range(4, 7))]
        found[f"{precision} weights"] = weights(model)
        model, amp = lowered(precision, options, kind)
        with torch.no_grad():
            next(model.parameters()).zero_()  # it has to come from the checkpoint
        amp.load_sharded(f"low-{precision}")
        found[f"{precision} resumed"] = go_on(kind, model, amp, range(4, 7))
    return found


def accumulated_in_o2(several: bool) -> list[float]:
    """The norms of steps of two batches each, of which DDP averages the gradients once; every weight has a master."""
    model, amp = lowered("O2", {"accumulate": 2}, "ddp" if several else "one", norm=False)
    norms = []
    for step in range(4):
        for micro in range(2):
            waits = model.no_sync() if isinstance(model, DistributedDataParallel) and micro == 0 else nullcontext()
            with waits:
                ranks = (dist.get_rank(),) if several else (0, 1)
                batches = [batch(2 * step + micro, rank) for rank in ranks]
                with amp.autocast():
                    losses = [nn.functional.cross_entropy(model(x).float(), y) for x, y in batches]
                amp.backward(torch.stack(losses).mean())
            result = amp.step()
        norms.append(round(float(result.grad_norm), 4))
    if isinstance(model, DistributedDataParallel):
        never_averaged(model, amp)
    return norms


def never_averaged(model: DistributedDataParallel, amp: ampguard.Amp) -> None:
    """A window whose backward passes were all inside `no_sync()` is refused, on all ranks."""
    said = ""
    with model.no_sync():
        for _ in range(2):
            x, y = batch(0, dist.get_rank())
            with amp.autocast():
                loss = nn.functional.cross_entropy(model(x).float(), y)
            amp.backward(loss)
            try:
                amp.step()
            except ProtocolError as error:
                said = str(error)
    if "inside no_sync()" not in said:
        raise AssertionError(said or "gradients of this rank alone were used")


def refused() -> list[str]:
    """What is said where weights that ranks exchange already are to be cast."""
    said = []
    for precision in ("O2", "O3", "bf16-true"):
        for wrap in (DistributedDataParallel, fully_shard):
            model = nn.Sequential(nn.Linear(16, 4))
            wrapped = wrap(model)
            try:
                ampguard.Amp(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), precision)
            except SetupError as error:
                said.append(str(error))
    return said


def with_policy(kind: str, on_nonfinite: Any, is_inner: bool = False) -> list[Any]:
    """Steps of which one has a NaN in the batch of rank 1 alone: (skipped, steps made, weights) of each."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    inner = model
    if kind == "ddp" and not is_inner:
        model = inner = DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model[3])
        fully_shard(model)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    amp = ampguard.Amp(inner, optimizer, "fp16", on_nonfinite=on_nonfinite, init_scale=256.0)
    if is_inner:
        model = DistributedDataParallel(inner)
    seen = []
    for step in range(6):
        x, y = batch(step, dist.get_rank())
        if (step, dist.get_rank()) == (4, 1):
            x[0, 0] = float("nan")
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        amp.backward(loss)
        try:
            skipped = bool(amp.step().skipped)
        except NonfiniteError:
            return [*seen, "raised"]
        seen.append((skipped, amp.steps, weights(model)))
    return seen


def weights(model: nn.Module) -> float:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return sum(float(p.detach().double().abs().sum()) for p in whole)


def altered(kind: str) -> str:
    """What is said where one rank's file has another bit in a weight."""
    model, _, amp = made(kind, "fp32")
    amp.save_sharded(f"{kind}-altered")
    if dist.get_rank() == 0:
        weight = next(model.parameters()).detach()
        part = getattr(weight, "_local_tensor", weight).numpy().tobytes()
        for file in Path(f"{kind}-altered").glob("*.distcp"):
            file.write_bytes(file.read_bytes().replace(part, bytes([part[0] ^ 1]) + part[1:]))
    dist.barrier()
    try:
        amp.load_sharded(f"{kind}-altered")
    except CheckpointError as error:
        return str(error)
    return "loaded"


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
    found |= with_low_weights(several)
    found["O2 accumulated"] = accumulated_in_o2(several)
    if several:
        found["partly sharded"] = partly_sharded()
        found["refused"] = refused()
        found["altered"] = [altered("ddp"), altered("fsdp")]
        for kind in ("ddp", "fsdp"):
            found[f"{kind} rollback"] = with_policy(kind, Rollback(every=3))
            found[f"{kind} raise"] = with_policy(kind, "raise")
        found["wrapped later"] = with_policy("ddp", Rollback(every=3, folder="kept"), is_inner=True)
    print(json.dumps(found))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
