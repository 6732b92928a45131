"""Flat buffers, sparse gradients, and optimizers that belong to no model."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from engine_loops import Net, batch
from torch import nn

import ampguard
from ampguard.errors import PatternError, PrecisionError, ProtocolError, SetupError


class Flat:
    """What FastReID's ContiguousParams does: all parameters in one buffer, all gradients in another."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        size = sum(p.numel() for p in self.parameters)
        self.buffer = torch.zeros(size)
        self.buffer.grad = torch.zeros(size)
        at = 0
        for p in self.parameters:
            end = at + p.numel()
            self.buffer[at:end] = p.detach().view(-1)
            p.data = self.buffer[at:end].view(p.shape)
            p.grad = self.buffer.grad[at:end].view(p.shape)
            at = end


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_flat_buffer_trains_as_separate_tensors_do(precision: str) -> None:
    losses: dict[bool, list[float]] = {}
    for is_flat in (False, True):
        torch.manual_seed(0)
        model = Net(dropout=0.0)
        updated = [Flat(model.parameters()).buffer] if is_flat else model.parameters()
        optimizer = torch.optim.AdamW(updated, lr=1e-2)
        amp = ampguard.Amp(model, optimizer, precision, max_grad_norm=1.0, init_scale=1024.0)
        losses[is_flat] = []
        for number in range(8):
            x, y = batch(number)
            with amp.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            amp.backward(loss)
            assert amp.step().stepped
            losses[is_flat].append(loss.item())
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
    assert losses[True][-1] < losses[True][0]


def test_a_flat_buffer_whose_gradients_were_lost_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD([Flat(model.parameters()).buffer], lr=0.1)
    amp = ampguard.Amp(model, optimizer, "fp16", init_scale=1024.0)
    model.zero_grad()
    amp.backward(nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]))
    with pytest.raises(ProtocolError, match="zero_grad\\(set_to_none=False\\)") as caught:
        amp.step()
    assert caught.value.cause == "stale-parameters"


def test_a_flat_buffer_and_a_cast_model_are_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD([Flat(model.parameters()).buffer], lr=0.1)
    with pytest.raises(SetupError, match="`SGD` updates a flat buffer"):
        ampguard.Amp(model, optimizer, "O2")
    assert model.inner.weight.dtype == torch.float32


def test_gradients_that_share_a_buffer_are_cleared_in_place() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", init_scale=64.0)
    for number in range(2):
        x, y = batch(number)
        amp.backward(nn.functional.mse_loss(model(x), y))
        assert flat.abs().sum() > 0
        assert amp.step().stepped
        assert flat.abs().sum() == 0
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("clip", [math.inf, 0.01])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_sparse_gradients(precision: str, clip: float) -> None:
    def run(sparse: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.EmbeddingBag(20, 4, sparse=sparse, mode="sum")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = ampguard.Amp(model, optimizer, precision, max_grad_norm=clip, init_scale=64.0)
        norms = []
        for _ in range(3):
            with amp.autocast():
                loss = model(torch.tensor([[1, 2, 2], [3, 1, 19]])).square().mean()
            amp.backward(loss)
            result = amp.step()
            assert result.stepped
            norms.append(result.grad_norm)
        return [*norms, float(model.weight.detach().abs().sum())]

    assert run(True) == pytest.approx(run(False), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "O2", "O3", "bf16", "bf16-true"])
def test_sparse_gradients_add_up(precision: str) -> None:
    """Over a window, over several passes, and over one that does not reach them."""
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        models = [nn.EmbeddingBag(20, 4, sparse=sparse, mode="sum"), nn.Linear(4, 1)]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        amp = ampguard.Amp(models, optimizer, precision, accumulate=2, max_grad_norm=math.inf, init_scale=64.0)
        for ids in ([[1, 2, 2]], [[3, 1, 19]]):
            for _ in range(2):
                with amp.autocast():
                    loss = models[0](torch.tensor(ids)).square().mean()
                amp.backward(loss)
            with amp.autocast():
                loss = models[1](torch.ones(2, 4)).square().mean()
            amp.backward(loss)
            result = amp.step()
        found.append(result.grad_norm)
    assert found[0] == pytest.approx(found[1], rel=2e-3)


def test_an_embedding_that_is_used_twice_in_float16() -> None:
    model = nn.Embedding(20, 4, sparse=True)
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "O3")
    with amp.autocast():
        loss = (model(torch.tensor([1, 2])) * model(torch.tensor([1, 3]))).sum()
    with pytest.raises(PrecisionError, match=r"adds sparse gradients in float16(.|\n)*force_fp32="):
        amp.backward(loss)
    model = nn.Embedding(20, 4, sparse=True)
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "O3", force_fp32="", init_scale=8.0)
    with amp.autocast():
        loss = (model(torch.tensor([1, 2])) * model(torch.tensor([1, 3]))).sum()
    amp.backward(loss)
    assert amp.step().stepped


def test_a_sparse_gradient_that_is_not_finite() -> None:
    model = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
    amp = ampguard.Amp(model, torch.optim.SparseAdam(model.parameters()), "fp16", init_scale=64.0)
    amp.backward(model(torch.tensor([[1, 2, 2]])).sum() * torch.inf)
    result = amp.step()
    assert result.skipped
    assert result.nonfinite == ("weight",)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(8, 1), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(SetupError, match=r"2 of 4 parameters of `SGD` \(shapes \(1, 8\), \(1,\)\) belong to none"):
        ampguard.Amp(model, optimizer)
    assert ampguard.Amp([model, other], optimizer)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    model = nn.Linear(8, 1)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(SetupError, match="is updated by `a` and by `b`"):
        ampguard.Amp(model, {"a": one, "b": two})


def test_what_is_no_model_or_optimizer_is_named() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SetupError, match="models: a SGD is no Module\n  do    Amp\\(models, optimizers"):
        ampguard.Amp([optimizer], model)
    with pytest.raises(SetupError, match="optimizers: a float is no Optimizer"):
        ampguard.Amp(model, 0.1)
    with pytest.raises(SetupError, match="optimizers: 'o' is a Linear, no Optimizer"):
        ampguard.Amp(model, {"o": model})
    with pytest.raises(SetupError, match="at least one optimizer"):
        ampguard.Amp(model, [])
    for wrong in ({"max_grad_norm": "1"}, {"accumulate": "4"}, {"patience": 2.5}, {"accumulate": True}):
        with pytest.raises(SetupError, match=f"{next(iter(wrong))}="):
            ampguard.Amp(model, optimizer, **wrong)
    with pytest.raises(PatternError, match="not a int"):
        ampguard.Amp(model, optimizer, force_fp32=[3])
    with pytest.raises(SetupError, match="max_grad_norm=0 would stop all learning"):
        ampguard.Amp(model, optimizer, max_grad_norm=0)


@pytest.mark.parametrize(("mode", "options"), [("O3", {}), ("bf16-true", {"rounding": "nearest"})])
def test_state_that_is_older_than_the_cast_of_its_weights(mode: str, options: dict[str, str]) -> None:
    """Adagrad has its sums before it ever steps: in float32, which no fused kernel takes with float16 weights."""
    torch.manual_seed(0)
    model, exact = nn.Linear(8, 1), nn.Linear(8, 1)
    exact.load_state_dict(model.state_dict())
    amp = ampguard.Amp(model, torch.optim.Adagrad(model.parameters(), lr=0.01), mode, init_scale=64.0, **options)
    plain = torch.optim.Adagrad(exact.parameters(), lr=0.01)
    for number in range(5):
        x, y = batch(number)
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        amp.backward(loss)
        assert amp.step().stepped
        plain.zero_grad()
        nn.functional.mse_loss(exact(x), y).backward()
        plain.step()
    torch.testing.assert_close(model.weight.float(), exact.weight, rtol=0.02, atol=0.02)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


@pytest.mark.parametrize("mode", ["fp16", "O2", "O3", "bf16-true"])
def test_an_embedding_in_float32_gives_what_follows_its_type(mode: str) -> None:
    """Its inputs hold no floats, whose type its result could take."""
    torch.manual_seed(0)
    model = Words()
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), mode, force_fp32="words", init_scale=64.0)
    with amp.autocast():
        loss = model(torch.arange(10)).square().mean()
    amp.backward(loss)
    assert amp.step().stepped
    assert model.words.weight.dtype == torch.float32
