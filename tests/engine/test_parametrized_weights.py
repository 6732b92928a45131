"""Weights that are computed from others (`torch.nn.utils.parametrizations`), in modes that cast weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_loops import batch, same, weights
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import ampguard

PARAMETRIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "matrix_exp": lambda module: orthogonal(module, orthogonal_map="matrix_exp"),
    "cayley": lambda module: orthogonal(module, orthogonal_map="cayley"),
    "householder": lambda module: orthogonal(module, orthogonal_map="householder"),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
}


def made(mode: str, kind: str = "matrix_exp", **options: Any) -> ampguard.Amp:
    torch.manual_seed(0)
    parametrized = PARAMETRIZATIONS[kind](nn.Linear(8, 8))
    model = nn.Sequential(parametrized, nn.Tanh(), nn.Linear(8, 1))
    return ampguard.Amp(model, torch.optim.AdamW(model.parameters(), 3e-2), mode, init_scale=64.0, **options)


def loss_of(amp: ampguard.Amp, number: int) -> Tensor:
    x, y = batch(number)
    with amp.autocast():
        return nn.functional.mse_loss(amp.models["Sequential"](x), y)


def train(amp: ampguard.Amp, steps: range) -> float:
    for number in steps:
        loss = loss_of(amp, number)
        amp.backward(loss)
        assert amp.step().stepped
    return loss.item()


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_weights_are_made_in_float32_and_used_in_the_low_precision(kind: str, mode: str) -> None:
    amp = made(mode, kind)
    model = amp.models["Sequential"]
    assert next(model[0].parametrizations.parameters()).dtype == torch.float32
    assert model[0].weight.dtype == model[2].weight.dtype == amp.mode.weights_dtype
    assert train(amp, range(40)) == pytest.approx(train(made("fp32", kind), range(40)), rel=0.1, abs=0.02)


@pytest.mark.parametrize("mode", ["O2", "bf16-true"])
def test_an_evaluation_in_float32(mode: str) -> None:
    amp = made(mode, eval_precision="fp32")
    train(amp, range(3))
    model = amp.models["Sequential"].eval()
    with torch.no_grad(), amp.autocast():
        assert model[0].weight.dtype == torch.float32
        model(batch(0)[0])
    assert model[0].weight.dtype == amp.mode.weights_dtype


def test_inside_a_region_in_float32() -> None:
    amp = made("O2", force_fp32=["0"])
    train(amp, range(3))
    assert amp.models["Sequential"][0].weight.dtype == torch.float32


@pytest.mark.parametrize("mode", ["O2", "bf16-true"])
def test_saved_and_resumed(mode: str, tmp_path: Path) -> None:
    amp = made(mode)
    train(amp, range(3))
    amp.save(tmp_path / "state.pt")
    train(amp, range(3, 6))
    again = made(mode)
    again.load(tmp_path / "state.pt")
    train(again, range(3, 6))
    assert same(weights(amp), weights(again))


def test_a_copy_makes_its_own_weights() -> None:
    amp = made("O2")
    model = amp.models["Sequential"]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].parametrizations.weight.original.normal_()
    assert copied[0].weight.dtype == torch.float16
    assert not torch.equal(copied[0].weight, model[0].weight)
