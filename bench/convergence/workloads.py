"""What is trained: a small ViT on scikit-learn's digits, and a character language model on its data sets' descriptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
CONTEXT = 32


@dataclass(frozen=True)
class Workload:
    """A model, its loss, a batch for each step (by a generator), and what is evaluated in the end."""

    steps: int
    lr: float
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[torch.Generator], Batch]
    held_out: Batch


class Block(nn.Module):
    """A pre-norm transformer block. Attention by hand, so that every precision runs the same operators."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.proj(mixed)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """4 patches of 4 x 4 pixels."""

    def __init__(self, dim: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, dim, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 4, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, 4, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


class CharacterModel(nn.Module):
    """The next of `letters` characters, from those before it."""

    def __init__(self, letters: int, dim: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, dim)
        self.position = nn.Parameter(torch.randn(1, CONTEXT, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, 4, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, letters)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(characters) + self.position)))


def digits() -> Workload:
    """1,797 images of 8 x 8 pixels; a fifth is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held, train = order[: len(order) // 5], order[len(order) // 5 :]

    def batch(generator: torch.Generator) -> Batch:
        rows = train[torch.randint(len(train), (64,), generator=generator)]
        return images[rows], labels[rows]

    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    return Workload(300, 4e-3, ViT, smoothed, batch, (images[held], labels[held]))


def text() -> Workload:
    """The descriptions of scikit-learn's data sets, in lower case; the last tenth is held out."""
    folder = resources.files("sklearn.datasets").joinpath("descr")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".rst")), key=lambda f: f.name)
    content = "".join(f.read_text(encoding="utf-8") for f in files).lower()
    letters = sorted(set(content))
    numbers = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([numbers[letter] for letter in content])
    cut = len(data) * 9 // 10

    def windows(starts: Tensor) -> Batch:
        rows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]

    def batch(generator: torch.Generator) -> Batch:
        return windows(torch.randint(cut - CONTEXT - 1, (8,), generator=generator))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    held = windows(torch.arange(cut, len(data) - CONTEXT - 1, CONTEXT))
    return Workload(150, 4e-3, lambda: CharacterModel(len(letters)), loss, batch, held)


WORKLOADS = {"ViT on digits": digits, "characters": text}
