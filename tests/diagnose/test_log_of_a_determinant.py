"""log(det(x)) of a matrix whose determinant is out of float32's range: the stable form is tried, and told first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
ROWS = 12


class Covariance(nn.Module):
    def __init__(self, log_det: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.log_noise = nn.Parameter(torch.zeros(ROWS))
        self.log_det = log_det

    def forward(self, scale: float) -> Tensor:
        return self.log_det(scale * torch.diag(self.log_noise.exp()))


def logarithm(x: Tensor) -> Tensor:
    return torch.log(torch.det(x))


def used_twice(x: Tensor) -> Tensor:
    determinant = torch.det(x)
    return torch.log(determinant) + determinant


LOG_DET = "torch.logdet(x)"
CASES: dict[str, tuple[Callable[[Tensor], Tensor], float, str, str, float]] = {
    "it is 0": (lambda x: torch.log(torch.det(x)), 1e-5, "domain-error", LOG_DET, -138.2),
    "it is infinite": (logarithm, 1e5, "overflow", "return torch.logdet(x)", 138.2),
    "its reciprocal overflows": (lambda x: torch.log(torch.det(x)), 6e-4, "gradient-overflow", LOG_DET, -89.02),
    "its size": (
        lambda x: torch.log(torch.abs(torch.det(x))),
        -1e-5,
        "domain-error",
        "torch.linalg.slogdet(x)[1]",
        -138.2,
    ),
    "it is used beside the form": (
        used_twice,
        1e-5,
        "domain-error",
        "return torch.logdet(x) + determinant",
        -138.2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_stable_form(name: str, guard: Guard) -> None:
    log_det, scale, cause, how, loss = CASES[name]

    def body() -> None:
        model = Covariance(log_det)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        for step in range(3):
            loss = model(1.0 if step < 2 else scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == (cause, 2)
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("stable-form", True), fix
    assert fix.how == how
    assert f"the loss is {loss:.4g}" in str(fix.outcome)


def test_no_determinant_that_has_no_logarithm(guard: Guard) -> None:
    def body() -> None:
        model = Covariance(lambda x: torch.log(torch.det(x[: ROWS - 1, : ROWS - 1])))
        model(-1e-5).backward()

    assert "stable-form" not in [fix.action for fix in guard(body).first.fixes]
