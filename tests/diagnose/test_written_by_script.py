"""Weights that the script itself has made NaN within a step: no optimizer is accused of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def sharpness_aware(eps: float, are_gradients_reused: bool = False) -> None:
    """SAM by hand; one batch is masked altogether, so that its gradients are 0."""
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(8):
        x, y = torch.randn(16, 8), torch.randint(3, (16,))
        weights = torch.zeros(16) if step == 5 else torch.ones(16)
        (weights * F.cross_entropy(model(x), y, reduction="none")).mean().backward()
        with torch.no_grad():
            gradients = [p.grad for p in parameters if p.grad is not None]
            scale = 0.05 / (torch.stack([g.norm() for g in gradients]).norm() + eps)
            before = [p.clone() for p in parameters]
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(g * scale)
        if are_gradients_reused:
            for g in gradients:
                g.numpy()[...] = 1.0
        optimizer.zero_grad()
        loss = (weights * F.cross_entropy(model(x), y, reduction="none")).mean()
        loss.backward()
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
        if not loss.isfinite():
            return


def test_ascent_whose_gradients_are_gone(guard: Guard) -> None:
    """Their memory was written to since: what the weights were given cannot be computed once more."""
    run = guard(lambda: sharpness_aware(eps=0.0, are_gradients_reused=True))
    assert (run.first.cause, run.first.step) == ("nonfinite-parameter", 5)
    assert run.first.evidence["written_by_script"] is True
    assert "no optimizer has stepped since: the script itself has written these values" in run.first.explanation


def test_ascent_with_an_epsilon_is_silent(guard: Guard) -> None:
    assert guard(lambda: sharpness_aware(eps=1e-12)).report.incidents == ()


@pytest.mark.parametrize("kind", ["closure", "step"])
def test_what_an_optimizer_has_done_is_not_the_scripts_doing(guard: Guard, kind: str) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 2)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "closure":
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            return loss

        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["lr"] = float("nan")
            if not optimizer.step(closure).isfinite():
                return

    run = guard(body)
    assert "no optimizer has stepped" not in run.first.explanation
