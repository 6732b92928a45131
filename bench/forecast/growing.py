"""Runs whose activations really leave float16's range, each growing in its own way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

STEPS = 6000


def descend(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> float:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def critic_without_clipping() -> Iterator[float]:
    """WGAN's critic with neither clipping nor penalty: its score is unbounded, every layer grows (Adam: like t^3)."""
    critic = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(STEPS):
        real, fake = torch.randn(32, 16) + 0.5, torch.randn(32, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = critic(fake).float().mean() - critic(real).float().mean()
        yield descend(loss, optimizer, scaler)


class Attention(nn.Module):
    """One head whose logits nothing bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1)
        return self.head(scores.float().softmax(-1).to(x.dtype) @ self.v(x))


def attention_logits() -> Iterator[float]:
    """Attention that is rewarded for being sharp (an entropy bonus with the wrong sign): logits grow like t^2."""
    model = Attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for _ in range(STEPS):
        x = torch.randn(4, 12, 32)
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model.q(x) @ model.k(x).transpose(-2, -1)
            task = F.cross_entropy(model(x).float().flatten(0, 1), torch.randint(8, (48,)))
            loss = task - 1e-3 * scores.float().std()
        yield descend(loss, optimizer, scaler)


class Residual(nn.Module):
    """A pre-norm residual stream; returns the logits and the mean of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(6))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h.float()) * 8
        return self.head(F.layer_norm(h.float(), (32,))), h[:, 0].float().mean()


def residual_stream() -> Iterator[float]:
    """Blocks that all write in one direction: linear growth, hidden by the last norm."""
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for _ in range(STEPS):
        x = torch.randn(32, 16)
        y = x[:, :4].argmax(1)
        with torch.autocast("cpu", dtype=torch.float16):
            logits, pushed = model(x)
            loss = F.cross_entropy(logits.float(), y) - 1e-3 * pushed
        yield descend(loss, optimizer, scaler)


def unstable_rate() -> Iterator[float]:
    """Gradient descent just beyond its stable learning rate: everything grows exponentially, slowly."""
    model = nn.Linear(64, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    x = torch.randn(512, 64)
    values, vectors = torch.linalg.eigh(2 * x.T @ x / 512)
    optimizer.param_groups[0]["lr"] = 2.004 / float(values[-1])
    model.weight.data = vectors[:, -1:].T.clone() * 0.3
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        yield descend((out.float() ** 2).mean(), optimizer, scaler)


def recurrent_state() -> Iterator[float]:
    """A linear recurrence whose gain is learned upwards: growth by a power of the gain."""
    cell = nn.Linear(64, 64, bias=False)
    torch.nn.init.eye_(cell.weight)
    optimizer = torch.optim.SGD(cell.parameters(), lr=6e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(STEPS):
        h = torch.randn(64, 64)
        with torch.autocast("cpu", dtype=torch.float16):
            for _ in range(24):
                h = cell(h)
        yield descend(-(h.float().square().mean() + 1).log(), optimizer, scaler)


def bootstrapped_values() -> Iterator[float]:
    """Q-learning with a discount above 1 by mistake and no target network: values chase themselves upwards,
    and leave float16 first in the target, under no_grad."""
    q = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(q.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(STEPS):
        state, following = torch.randn(32, 16), torch.randn(32, 16) * 1.6
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                target = 1.0 + 1.1 * q(following).float().amax(1)
            loss = F.smooth_l1_loss(q(state).float()[:, 0], target)
        yield descend(loss, optimizer, scaler)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(64, 32), nn.Embedding(64, 32)

    def forward(self, i: Tensor) -> Tensor:
        return self.left(i) @ self.right.weight.T


def embedding_norms() -> Iterator[float]:
    """Dot products of embeddings without normalisation or decay, under a margin that nothing bounds."""
    model = Pairs()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(STEPS):
        i = torch.randint(64, (32,))
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model(i)
            loss = -(scores.float().gather(1, i[:, None]) - scores.float().mean(1, keepdim=True)).mean()
        yield descend(loss, optimizer, scaler)


GROWING = {
    f.__name__: f
    for f in (
        critic_without_clipping,
        attention_logits,
        residual_stream,
        unstable_rate,
        recurrent_state,
        bootstrapped_values,
        embedding_norms,
    )
}
