"""Losses that are computed from derivatives (penalties, score matching): the derivative itself may be bad."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

BAD = 2
POWER_LINE = "return (h.abs().pow(1.5) * self.c).sum(-1)"


class Potential(nn.Module):
    """|w.x|^1.5: its second derivative at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))
        self.c = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.w)
        return (h.abs().pow(1.5) * self.c).sum(-1)


def curvature(potential: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    v = torch.randn_like(x)
    (slope,) = torch.autograd.grad(potential(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad((slope * v).sum(), x, create_graph=True)
    return ((bend * v).sum(-1) + 0.5 * slope.square().sum(-1)).mean()


def match_scores() -> list[float]:
    potential = Potential()
    optimizer = torch.optim.Adam(potential.parameters(), 1e-3)
    losses = []
    for step in range(BAD + 2):
        if step == BAD:
            with torch.no_grad():
                potential.w[3] = 0.0
        loss = curvature(potential, torch.randn(5, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_second_derivative(guard: Callable[..., Watched]) -> None:
    """Double backward makes zeros without memory: reading one while operators are watched ended the process."""
    run = guard(match_scores)
    (incident,) = run.report.incidents
    assert (incident.step, incident.phase, incident.cause) == (BAD, "backward", "singular-gradient")
    assert incident.location is not None
    assert incident.location.code == POWER_LINE
    assert incident.op == "aten.pow.Tensor_Scalar"
    assert {fix.action: fix.verified for fix in incident.fixes} == {"add-epsilon": True, "clamp": True}
    assert "parameters" not in incident.evidence
    assert not run.faults


def root_penalty(x: Tensor, net: nn.Module) -> Tensor:
    """The derivative of a root at 0, of which the loss is made."""
    x = x.requires_grad_()
    distance = net(x).square().sum(-1).sqrt()
    (slope,) = torch.autograd.grad(distance.sum(), x, create_graph=True)
    return slope.square().sum(-1).mean()


def test_first_derivative_and_its_loss(guard: Callable[..., Watched]) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def body() -> None:
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for step in range(BAD + 1):
            x = torch.randn(6, 3)
            if step == BAD:
                with torch.no_grad():
                    net[2].weight.zero_()
                    net[2].bias.zero_()
            loss = root_penalty(x, net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).first
    assert (incident.step, incident.phase, incident.cause) == (BAD, "backward", "singular-gradient")
    assert incident.location is not None
    assert ".sqrt()" in incident.location.code
    assert incident.explanation.startswith("The step computes with a derivative that is not finite: ")
    verified = [fix for fix in incident.fixes if fix.verified]
    assert verified
    for fix in verified:  # the penalty, and not the sum of distances that was differentiated within
        assert math.isclose(float((fix.outcome or "").rpartition("is ")[2]), 0.0, abs_tol=1e-3)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).relu())


@pytest.mark.parametrize("rows", [1, 6])
def test_weight_norm_of_an_empty_row(rows: int, guard: Callable[..., Watched]) -> None:
    model = Normed()

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    model.layers[0].parametrizations.weight.original1[:rows] = 0
            loss = model(torch.randn(5, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).first
    assert (incident.step, incident.cause) == (2, "division-by-zero")
    assert incident.module == "layers.0.parametrizations.weight.0"
    assert incident.evidence["zero_divisors"] == rows
    assert [(fix.action, fix.verified) for fix in incident.fixes] == [("initialise-parameter", True)]


@pytest.mark.parametrize(
    "line", ["r = ((h - h.detach()) ** 2).sum(-1) ** 0.5", "r = (h - h.detach()).pow(2).sum(-1).pow(0.5)"]
)
def test_the_power_that_is_accused(line: str, guard: Callable[..., Watched], tmp_path: Path) -> None:
    """Two powers on one line: to clamp the difference that is squared would cut off its negative half."""
    file = tmp_path / "two_powers.py"
    head = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\nh = nn.Linear(4, 3)(torch.randn(5, 4))\n"
    file.write_text(f"{head}{line}\nr.mean().backward()\n")
    incident = guard(lambda: exec(compile(file.read_text(), str(file), "exec"), {})).first
    assert incident.cause == "singular-gradient"
    clamped = next(fix for fix in incident.fixes if fix.action == "clamp")
    assert clamped.verified
    squared, _, rest = clamped.how.partition(".sum(-1)")
    assert "clamp" not in squared
    assert rest.startswith(".clamp(min=1e-6)")
