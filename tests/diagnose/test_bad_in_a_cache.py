"""What a decoder has cached of a bad encoder's result: it is the encoder's failure, however the script ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

import ampguard
from ampguard.capture.root_calls import pace

Guard = Callable[..., Watched]


class Layer:
    def __init__(self) -> None:
        self.keys: Tensor | None = None


class Cache:
    """Keys of the memory, computed once, by layer."""

    def __init__(self) -> None:
        self.layers = [Layer()]
        self.is_updated: dict[int, bool] = {}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(10, 8)
        self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, tokens: Tensor, memory: Tensor, cache: Cache) -> Tensor:
        if not cache.is_updated.get(0):
            cache.layers[0].keys = self.key(memory)
            cache.is_updated[0] = True
        keys, query = cache.layers[0].keys, self.token(tokens)
        assert keys is not None
        return self.out(query + (query @ keys.mT).softmax(-1) @ keys)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(10, 8)
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = Decoder()


def translate(size: float) -> None:
    seed_everything()
    model = Translator().half().eval()
    with torch.no_grad():
        model.encoder[0].weight.mul_(size)
        model.encoder[2].weight.mul_(size)
    with torch.inference_mode():
        given = {"memory": model.encoder(model.token(torch.randint(0, 10, (2, 5))))}
        tokens, cache = torch.zeros(2, 1, dtype=torch.long), Cache()
        for _ in range(3):
            logits = model.decoder(tokens, given["memory"], cache)[:, -1, :].float()
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)


def test_only_the_encoder_is_to_blame(tmp_path: Path) -> None:
    """The script ends with what the sampler says of the probabilities, with the scores at hand."""
    with pytest.raises(RuntimeError, match="probability"), ampguard.watch(out=tmp_path / "run") as session:
        translate(1e3)
    assert session.report is not None
    (incident,) = session.report.incidents
    assert incident.cause == "fp16-overflow"
    assert incident.location is not None
    assert incident.location.code.startswith('given = {"memory": model.encoder(')


def test_a_healthy_translation(guard: Guard) -> None:
    run = guard(lambda: translate(1.0))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents


class Remembering(nn.Module):
    """Adds its keys to a dictionary of the caller's, and attends to all that are in there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        query = self.first(x)
        key = self.key(query)
        cache["keys"] = key if not cache else torch.cat([cache["keys"], key], 1)
        return query + (query @ cache["keys"].mT).softmax(-1) @ cache["keys"]


def step_by_step(size: float, bad: int | None = None) -> None:
    seed_everything()
    model, cache = Remembering().half().eval(), dict[str, Tensor]()
    x = torch.randn(2, 4, 8).half()
    with torch.no_grad():
        model.first.weight.mul_(size)
        for token in range(4):
            out = model(x, cache)
            x = torch.zeros(2, 1, 8).half()
            if token == bad:
                x[0, 0, 3] = float("nan")
        assert out.isfinite().all() == (size == 1.0 and bad is None)


def test_later_tokens_are_no_news(guard: Guard) -> None:
    run = guard(lambda: step_by_step(1e5))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.module) == ("fp16-overflow", "first")
    assert incident.occurrences == 4


@pytest.mark.parametrize("size", [1.0, 1e5])
def test_a_token_that_is_bad_by_itself_is_told(size: float, guard: Guard) -> None:
    """Where all calls before it have failed, and the cache is bad with it, it is one more of them."""
    causes = {incident.cause for incident in guard(lambda: step_by_step(size, bad=1)).report.incidents}
    assert causes == ({"nonfinite-input"} if size == 1.0 else {"fp16-overflow"})


@pytest.mark.parametrize("loads", [True, False])
def test_a_batch_that_is_bad_all_over_is_told_beside_a_call_that_failed_all_over(loads: bool, guard: Guard) -> None:
    """The same elements of a tensor of the same size are bad: in what the first call made, and in what the second is given."""

    class Widening(nn.Module):
        def forward(self, batch: dict[str, Tensor] | Tensor) -> Tensor:
            x = batch["x"] if isinstance(batch, dict) else batch
            x = (x + 1.0) * 1e3
            return (x - x * 1.0).mean(0)

    def body() -> None:
        model = Widening().eval()
        batches = [torch.full((2, 8), 1e3).half(), torch.full((2, 8), float("nan")).half()]
        data = torch.utils.data.DataLoader([{"x": row} for b in batches for row in b], batch_size=2)
        with torch.no_grad():
            for batch in data if loads else batches:
                model(batch)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert {incident.cause for incident in run.report.incidents} == {"fp16-overflow", "nonfinite-input"}


def test_a_healthy_cache(guard: Guard) -> None:
    assert not guard(lambda: step_by_step(1.0)).report.incidents


class Kept:
    """A cache that is an object."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None


class Growing(nn.Module):
    """Attends to all keys so far, which have to be as many as the mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, cache: list[dict[str, Tensor]] | Kept) -> Tensor:
        query = self.first(x)
        key = self.key(query)
        before = cache.keys if isinstance(cache, Kept) else cache[0].get("keys")
        keys = key if before is None else torch.cat([before, key], 1)
        if isinstance(cache, Kept):
            cache.keys = keys
        else:
            cache[0]["keys"] = keys
        return query + ((query @ keys.mT).masked_fill(~mask[:, None], -1e4)).softmax(-1) @ keys


@pytest.mark.parametrize("is_object", [False, True])
def test_calls_that_are_looked_at_only_behind_them_are_run_again_with_the_cache_as_it_was(
    is_object: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "FREE_SECONDS", 0.0)

    def body() -> None:
        seed_everything()
        model = Growing().half().eval()
        cache: list[dict[str, Tensor]] | Kept = Kept() if is_object else [{}]
        mask = torch.ones(2, 0, dtype=torch.bool)
        with torch.no_grad():
            for token in range(80):
                if token in (60, 70):
                    model.first.weight.mul_(1e5 if token == 60 else 1e-5)
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
                model(torch.randn(2, 1, 8).half(), mask, cache)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert set(run.causes) == {"fp16-overflow"}
    assert all(incident.evidence["rung"] == "replay" for incident in run.report.incidents)
