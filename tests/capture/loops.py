"""Kinds of training loops in which a step fails and the training goes on. Each returns the fingerprint of its end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import fingerprint, seed_everything

STEPS = 9
BAD_STEPS = (3, 6)


class Attention(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1)
        return self.drop(scores.softmax(dim=-1)) @ v


class Net(nn.Module):
    """Attention, BatchNorm, dropout, and paths dropped by Python's and numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            if random.random() < 0.9:
                h = h + block(h) * float(np.random.uniform(0.5, 1.5))
        return self.head(self.norm(h.mean(1)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A batch whose values leave float16 inside the attention in the bad steps."""
    x, y = torch.randn(5, 6, 4), torch.randint(0, 3, (5,))
    return (x * 3000 if step in BAD_STEPS else x), y


def with_scaler() -> dict[str, Any]:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return fingerprint(model, optimizer, scaler, losses)


def without_scaler() -> dict[str, Any]:
    """A loss that is NaN is skipped by the script itself; the bad value comes from a log outside the model."""
    seed_everything()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(5, 6, 4), torch.randint(0, 3, (5,))
        p = model(x).softmax(-1)
        weight = p.detach().max() * (0.0 if step in BAD_STEPS else 1.0)
        loss = F.nll_loss(p.log(), y) - 0.1 * torch.log(weight) * 0.0
        losses.append(loss.detach())
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fingerprint(model, optimizer, losses)


def poisoned() -> dict[str, Any]:
    """Float32 without any care: the update of the bad step makes every weight NaN, and the script trains on."""
    seed_everything()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.randn(STEPS, 5, 6, 4)
    data[BAD_STEPS[0], 2, 1] = float("inf")
    for x in data:
        loss = F.mse_loss(model(x), torch.randn(5, 3))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    return fingerprint(model, optimizer)


def in_bfloat16() -> dict[str, Any]:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(5, 6, 4), torch.randint(0, 3, (5,))
        chosen = torch.arange(5) < (0 if step in BAD_STEPS else 4)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x)[chosen], y[chosen])
        losses.append(loss.detach())
        if loss.isnan():
            optimizer.zero_grad()
            continue
        loss.backward()
        optimizer.step()
    return fingerprint(model, optimizer, losses)


def accumulating() -> dict[str, Any]:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for step in range(STEPS):
        for part in range(3):
            x, y = batch(step if part == 1 else 0)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y) / 3
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return fingerprint(model, optimizer, scaler)


def gan() -> dict[str, Any]:
    """Two networks, two optimizers, one scaler; the critic is given a sample beyond float16."""
    seed_everything()
    maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(8, 1))
    opt_m = torch.optim.Adam(maker.parameters(), lr=1e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        real, noise = torch.randn(6, 4), torch.randn(6, 3)
        real *= 3e5 if step in BAD_STEPS else 1.0
        with torch.autocast("cpu", dtype=torch.float16):
            fake = maker(noise)
            loss_c = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        opt_c.zero_grad()
        scaler.scale(loss_c).backward()
        scaler.step(opt_c)
        with torch.autocast("cpu", dtype=torch.float16):
            loss_m = F.softplus(-critic(fake)).mean()
        opt_m.zero_grad()
        scaler.scale(loss_m).backward()
        scaler.step(opt_m)
        scaler.update()
    return fingerprint(maker, critic, opt_m, opt_c, scaler)


def with_evaluation() -> dict[str, Any]:
    """Training in float32 and evaluation in float16, where the longer inputs overflow."""
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(STEPS):
        model.train()
        x, y = torch.randn(5, 6, 4), torch.randint(0, 3, (5,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            model.eval()
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
                seen.append(model(batch(step)[0]).clone())
    return fingerprint(model, optimizer, seen)


LOOPS: dict[str, Callable[[], dict[str, Any]]] = {
    loop.__name__: loop
    for loop in (with_scaler, without_scaler, poisoned, in_bfloat16, accumulating, gan, with_evaluation)
}
