"""`@force_fp32` on a method, a module class and a function that is given a module, where the weights are low."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from engine_loops import batch
from torch import Tensor, nn

import ampguard
from ampguard.errors import SetupError


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


class WithEveryKind:
    @ampguard.force_fp32
    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        assert cls is WithEveryKind
        return is_wide(x) @ x

    @ampguard.force_fp32(cast_back=False)
    @staticmethod
    def of_none(x: Tensor) -> Tensor:
        return is_wide(x) @ x

    @ampguard.force_fp32
    @property
    def value(self) -> Tensor:
        """A product."""
        return is_wide(torch.full((2, 2), 300.0) @ torch.full((2, 2), 300.0))


def test_methods_of_classes_static_ones_and_properties() -> None:
    x = torch.full((2, 2), 2.0, dtype=torch.float16)
    one = WithEveryKind()
    with torch.autocast("cpu", dtype=torch.float16):
        for owner in (one, WithEveryKind):
            assert owner.of_class(x).dtype == torch.float16
            assert owner.of_none(x).dtype == torch.float32
        assert torch.equal(one.value, torch.full((2, 2), 180000.0))
    assert WithEveryKind.value.__doc__ == "A product."
    with pytest.raises(AttributeError):
        one.value = x


def test_what_cannot_be_decorated_and_what_holds_no_tensor() -> None:
    for given in (functools.cached_property(is_wide), functools.partialmethod(is_wide), property(None, is_wide)):
        for decorate in (ampguard.force_fp32, ampguard.force_fp32(cast_back=False)):
            with pytest.raises(SetupError, match=f"a {type(given).__name__}: it decorates functions(.|\n)*below other"):
                decorate(given)

    class Square(torch.autograd.Function):
        pass

    with pytest.raises(SetupError, match=r"`Square`, a class that is no module: (.|\n)*the function that calls it"):
        ampguard.force_fp32(Square)
    with pytest.raises(SetupError, match=r"force_fp32\(3, 0.5\): there is no tensor to cast"):
        ampguard.force_fp32(3, 0.5)
