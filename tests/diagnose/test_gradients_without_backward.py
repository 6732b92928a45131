"""Gradients that a script puts in place without any backward pass: per-sample ones from compiled transforms, estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

Guard = Callable[..., Any]
BAD = 6


def private(is_compiled: bool) -> None:
    """Each sample's gradient is brought to one length (DP-SGD): one that has none has a length of 0."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def sample_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        right = functional_call(model, params, (x.unsqueeze(0),)).gather(1, y.reshape(1, 1))
        return (1.0 - right).clamp(min=0.0).sum()

    def gradients(params: dict[str, Tensor], xs: Tensor, ys: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        grads, losses = vmap(grad_and_value(sample_loss), in_dims=(None, 0, 0))(params, xs, ys)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        weights = 1.0 / norms
        return {k: torch.einsum("b,b...->...", weights, g) for k, g in grads.items()}, losses.mean()

    compute = torch.compile(gradients, backend="aot_eager") if is_compiled else gradients
    for it in range(9):
        xs, ys = torch.randn(8, 6), torch.randint(3, (8,))
        if it == BAD:
            with torch.no_grad():
                model[2].bias[ys[0]] += 50.0  # this class is right by far
        found, _ = compute({k: p.detach() for k, p in model.named_parameters()}, xs, ys)
        for name, p in model.named_parameters():
            p.grad = found[name] / len(xs)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_compiled", [True, False])
def test_length_of_a_sample_without_gradient(is_compiled: bool, guard: Guard) -> None:
    run = guard(lambda: private(is_compiled))
    assert (run.faults, run.first.cause, run.first.step) == (0, "division-by-zero", BAD), run.stderr
    assert run.first.location.code == "weights = 1.0 / norms"
    assert any(fix.verified for fix in run.first.fixes)


def test_estimate_from_losses_of_a_module(guard: Guard) -> None:
    """An evolution strategy: the module that gives the losses is looked into."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)

        class Fitness(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.sqrt(4.0 - x.square().mean())

        fitness = Fitness()
        for it in range(9):
            x = torch.randn(8, 4) * (30.0 if it == BAD else 0.5)
            with torch.no_grad():
                noise = torch.randn_like(model.weight)
                model.weight += 0.1 * noise
                value = fitness(model(x))
                model.weight -= 0.1 * noise
                model.weight.grad = noise * value
                model.bias.grad = torch.zeros(1)
            optimizer.step()

    run = guard(body)
    assert (run.faults, run.first.cause, run.first.step) == (0, "domain-error", BAD), run.stderr
    assert "torch.sqrt" in run.first.location.code
