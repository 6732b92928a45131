"""Short trainings on two ranks whose losses need both: each under a guard of its own.

Takes their names; the run folder of each is named after it. Rank 1 has a batch that is too large in step 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from each_guarded import each_guarded
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def gathered(x: Tensor) -> Tensor:
    """The rows of all ranks; gradients flow through those of this one."""
    rows = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    rows[dist.get_rank()] = x
    return torch.cat(rows)


class Gather(torch.autograd.Function):
    """The rows of all ranks; gradients flow through all, and are summed up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Centered(nn.Module):
    """A loss that follows the mean of all ranks, as DINO's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, width))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        teacher = teacher.detach()
        target = functional.softmax((teacher - self.center) / 0.1, dim=1)
        loss = -(target * torch.log(functional.softmax(student / 0.1, dim=1))).sum(1).mean()  # BAD centered
        total = teacher.sum(0, keepdim=True)
        dist.all_reduce(total)
        total /= len(teacher) * dist.get_world_size()
        self.center = self.center * 0.9 + total * 0.1
        return loss


def train(loss_of: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None = None, growth: float = 1.0) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(8):
        x = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            a, b = model(x), model(x + 0.1)
            if dist.get_rank() == 1 and step == 5:
                a, b = a * growth, b * growth
            loss = loss_of(a, b)
        loss.backward()
        optimizer.step()


def contrast(a: Tensor, b: Tensor) -> Tensor:
    logits = 10 * gathered(a) @ gathered(b).t()  # BAD contrastive
    return functional.cross_entropy(logits.float(), torch.arange(len(logits)))


def contrast_by_function(a: Tensor, b: Tensor) -> Tensor:
    logits = Gather.apply(a) @ Gather.apply(b).t()
    return torch.log(torch.exp(logits).sum(1)).mean() - logits.diagonal().mean()  # BAD by_function


def balanced(a: Tensor, b: Tensor) -> Tensor:
    """Codes that are equally frequent over all ranks (Sinkhorn-Knopp)."""
    with torch.no_grad():
        codes = torch.exp(b / 0.5)  # BAD balanced
        total = codes.sum(0)
        dist.all_reduce(total)
        codes = codes / total
        codes = codes / codes.sum(1, keepdim=True)
    return -(codes * functional.log_softmax(a, dim=1)).sum(1).mean()


class Exchanged(nn.Module):
    """Scores against what the other rank holds, which comes by send and recv."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        rank, other = dist.get_rank(), torch.empty_like(b)
        for turn in (rank, 1 - rank):
            if turn == 0:
                dist.send(b.detach().contiguous(), 1 - rank)
            else:
                dist.recv(other, 1 - rank)
        return torch.log(torch.exp(a @ other.t()).sum(1)).mean()  # BAD exchanged


class Ring(nn.Module):
    """The same, by transfers that are posted and waited for: those of ring attention."""

    def __init__(self, in_a_batch: bool) -> None:
        super().__init__()
        self.in_a_batch = in_a_batch

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        peer, other, mine = 1 - dist.get_rank(), torch.empty_like(b), b.detach().contiguous()
        if self.in_a_batch:
            posted = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, mine, peer), dist.P2POp(op=dist.irecv, tensor=other, peer=peer)]
            )
        else:
            posted = [dist.isend(mine, peer), dist.irecv(other, src=peer)]
        for handle in posted:
            handle.wait()
        return torch.log(torch.exp(a @ other.t()).sum(1)).mean()  # BAD ring


class Lengths(nn.Module):
    """The temperature of all ranks follows what they say of their batches, in objects of any kind."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, {"rows": len(a), "largest": b.detach().abs().max()})
        first = [{"temperature": 0.5} if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(first, src=0)
        scale = max(one["largest"] for one in said) / sum(one["rows"] for one in said)
        return torch.log(torch.exp(a * scale / first[0]["temperature"]).sum(1)).mean()  # BAD lengths


def ring() -> None:
    train(Ring(in_a_batch=True), growth=1e3)


def ring_posted() -> None:
    train(Ring(in_a_batch=False), growth=1e3)


def lengths() -> None:
    train(Lengths(), growth=1e3)


def healthy_ring() -> None:
    train(Ring(in_a_batch=True))
    train(Ring(in_a_batch=False))
    train(Lengths())


class Scaled(nn.Module):
    """The first stage of a pipeline: each row by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x / x.norm(dim=1, keepdim=True)))  # BAD pipeline


def pipeline() -> None:
    """Two stages by hand. What the first one sends, and what it is sent back, is bad from its own failure on."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    stage = Scaled() if rank == 0 else nn.Sequential(nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for step in range(8):
        optimizer.zero_grad()
        if rank == 0:
            out = stage(torch.randn(4, 6) * (step != 5))
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            x = torch.empty(4, 8)
            dist.irecv(x, 0).wait()
            stage(x.requires_grad_()).square().mean().backward()
            dist.send(x.grad, 0)
        optimizer.step()


def contrastive() -> None:
    train(contrast, torch.float16, growth=1e3)


def by_function() -> None:
    train(contrast_by_function, growth=100.0)


def centered() -> None:
    train(Centered(8), growth=1e3)


def balanced_codes() -> None:
    train(balanced, growth=1e3)


def evaluated() -> None:
    """One rank's validation batch is empty of signal; the mean over both ranks is what each of them logs."""
    train(balanced)
    share = nn.Linear(6, 8)
    x = torch.randn(4, 6) * (1 - dist.get_rank())
    with torch.no_grad():
        total = (share(x) / x.abs().sum()).sum()  # BAD evaluated
        dist.all_reduce(total)
        print(f"rank {dist.get_rank()}: {total.item() / 2}")


def exchanged() -> None:
    train(Exchanged(), growth=1e3)


def settling() -> None:
    """What ranks send each other in the backward pass is multiplied by the loss scale, which is too high at first."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(14):
        x = torch.randn(4, 6, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            features = model(x)
        features = functional.normalize(Gather.apply(features.float()))
        logits = features @ features.t() * 5
        scaler.scale(functional.cross_entropy(logits, torch.arange(8).roll(1))).backward()
        scaler.step(optimizer)
        scaler.update()


def healthy_exchanged() -> None:
    train(Exchanged())


def healthy_contrastive() -> None:
    train(contrast, torch.float16)


def healthy_by_function() -> None:
    train(contrast_by_function)


def healthy_centered() -> None:
    train(Centered(8))


def healthy_balanced() -> None:
    train(balanced)


if __name__ == "__main__":
    each_guarded(globals())
