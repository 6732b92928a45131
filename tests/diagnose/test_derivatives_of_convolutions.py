"""Gradients of each sample by `torch.func`: the derivative of a convolution returns None for an input that needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Guard = Callable[..., Any]


def test_a_sample_without_a_gradient_is_divided_by_its_norm(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def hinge(params: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
            out = functional_call(model, params, (image.unsqueeze(0),)).squeeze(0)
            return ((1 - target) * out.sum()).clamp_min(0)

        gradients = vmap(grad(hinge), in_dims=(None, 0, 0))
        for step in range(40):
            images, targets = torch.rand(8, 1, 6, 6), torch.full((8,), -20.0)
            images[0], targets[0] = images[0], (1.0 if step == 35 else -20.0)
            params = {name: p.detach() for name, p in model.named_parameters()}
            of_each = gradients(params, images, targets)
            squares = torch.stack([g.flatten(1).square().sum(1) for g in of_each.values()]).sum(0)
            factor = 1.0 / squares.sqrt().clamp(min=1e-3 if step != 35 else 0.0)
            for name, p in model.named_parameters():
                p.grad = torch.einsum("b,b...->...", factor, of_each[name])
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("division-by-zero", 35)
    assert run.first.fixes[0].verified
