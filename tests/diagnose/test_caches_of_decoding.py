"""A cache of keys and values that a module is handed and appends to: a failure while decoding is run again from the first
token, with the cache as it was then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
WIDTH, VOCABULARY = 16, 12


class Listed:
    """Lists that are there from the beginning, of None."""

    def __init__(self) -> None:
        self.keys: list[Any] = [None]
        self.values: list[Any] = [None]
        self.length = 0

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys[0] is not None:
            k, v = torch.cat([self.keys[0], k], 1), torch.cat([self.values[0], v], 1)
        self.keys[0], self.values[0] = k, v
        self.length = k.shape[1]
        return k, v


class Filled:
    """A dictionary that is filled, of pairs."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if 0 in self.layers:
            k, v = (torch.cat([old, new], 1) for old, new in zip(self.layers[0], (k, v), strict=True))
        self.layers[0] = k, v
        return k, v


class Appended:
    """A list of the parts, which is joined for each use."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        return len(self.parts)

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.parts.append((k, v))
        return torch.cat([k for k, _ in self.parts], 1), torch.cat([v for _, v in self.parts], 1)


class Bare:
    """Attributes that are not there before the first token."""

    @property
    def length(self) -> int:
        return self.k.shape[1] if hasattr(self, "k") else 0

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if hasattr(self, "k"):
            k, v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        self.k, self.v = k, v
        return k, v


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            k, v = cache.extended(k, v)
        weights = (q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1)
        logits: Tensor = self.head(x + weights @ v)
        if cache is None:
            return logits
        length = torch.full_like(logits[..., :1], float(cache.length))
        return torch.cat([logits[..., :-1], length], -1)


@torch.inference_mode()
def decoded(model: nn.Module, cache: Any, generator: torch.Generator, cut_at: float) -> Tensor:
    tokens, logps = torch.zeros(8, 1, dtype=torch.long), []
    for _ in range(6):
        logits = model(tokens, cache)[:, -1]
        cut = logits.masked_fill(logits[:, -1:] == cut_at, float("-inf"))
        p = torch.softmax(cut, -1)
        race = torch.empty_like(p).exponential_(1, generator=generator)
        tokens = (p / race).argmax(-1, keepdim=True)
        logps.append(p.gather(-1, tokens).log())
    return torch.cat(logps, 1).mean()


@pytest.mark.parametrize("length", [1.0, 5.0])
@pytest.mark.parametrize("cache", [Listed, Filled, Appended, Bare])
def test_it_is_run_again_from_the_first_token(guard: Guard, cache: type[Any], length: float) -> None:
    def body() -> list[float]:
        torch.manual_seed(0)
        model = Decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(40):
            if step in (0, 12, 36):
                model.eval()
                generator = torch.Generator().manual_seed(step)
                found.append(decoded(model, cache(), generator, cut_at=length if step == 12 else 0.0).item())
                model.train()
            tokens = torch.randint(0, VOCABULARY, (8, 5))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return found

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result[0] == plain[0]
    assert run.result[2] == plain[2]
    first = run.first
    assert (first.cause, first.step, first.mode) == ("masked-softmax", 12, "eval")
    assert first.location.code == "p = torch.softmax(cut, -1)"
    assert first.evidence["rung"] == "replay"
    assert first.fixes[0].verified
