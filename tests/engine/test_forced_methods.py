"""`@force_fp32` on a method, a module class and a function that is given a module, where the weights are low."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_loops import batch
from torch import Tensor, nn

import ampguard


def is_wide(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    return x


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    @ampguard.force_fp32
    def core(self, x: Tensor) -> Tensor:
        return self.inner(is_wide(x)) * 1e5 * 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x))


@ampguard.force_fp32
class Inner(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(is_wide(x)) * 1e5 * 1e-5


class WithClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@ampguard.force_fp32
def applied(x: Tensor, *, layer: nn.Module) -> Tensor:
    return layer(is_wide(x)) * 1e5 * 1e-5


class WithFunction(WithMethod):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(applied(x, layer=self.inner))


@pytest.mark.parametrize("mode", ["fp16", "O2", "O3", "bf16", "bf16-true"])
@pytest.mark.parametrize("kind", [WithMethod, WithClass, WithFunction])
def test_it_learns_and_is_the_same_in_evaluation(kind: Callable[[], nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model = kind()
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), mode, init_scale=256.0)
    losses = []
    for _ in range(8):
        x, y = batch(0)
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x).float(), y)
        amp.backward(loss)
        assert amp.step().stepped
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with amp.autocast(), torch.no_grad():
        trained, evaluated = model(x), model.eval()(x)
    assert torch.equal(trained, evaluated)
