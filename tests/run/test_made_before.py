"""Optimizers and scalers from before `ampguard.watch()`: a notebook's, or a script's that guards its loop only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard


def test_scale_that_settles_is_a_note(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    with ampguard.watch(out=tmp_path / "run") as session:
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(torch.randn(2, 4))
            scaler.scale(out.float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert session.report is not None
    assert [(i.cause, i.severity, i.step) for i in session.report.incidents] == [("loss-scale-overflow", "info", 0)]
    assert session.report.steps == 20


@pytest.mark.parametrize("leftovers", [0, 1, 3])
def test_older_optimizers_that_never_step(leftovers: int, tmp_path: Path) -> None:
    """An older cell's of a notebook: iterations of the one that does are counted from the first on."""
    torch.manual_seed(0)
    left = [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(leftovers)]
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ampguard.watch(out=tmp_path / "run") as session:
        for step in range(12):
            optimizer.zero_grad()
            x = torch.rand(8, 4) if step != 7 else torch.full((8, 4), -1.0)
            (model(x).square() + x[:, :1].sqrt()).mean().backward()
            optimizer.step()
    assert session.report is not None
    found = [(i.cause, i.step) for i in session.report.incidents if i.severity == "error"]
    assert found[0] == ("domain-error", 7)
    assert len(left) == leftovers


def test_updates_by_hand_beside_an_older_optimizer(tmp_path: Path) -> None:
    """Each backward pass is an iteration, as without it: no gradient has reached that one's parameters."""
    left = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    model = nn.Linear(4, 1)
    with ampguard.watch(out=tmp_path / "run") as session:
        for _ in range(30):
            model(torch.rand(8, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    assert session.report is not None
    assert not session.report.incidents
    assert session.report.steps == 30
    del left


def test_frozen_by_mistake(tmp_path: Path) -> None:
    """The scaler steps an optimizer from before that has no gradient at all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with ampguard.watch(out=tmp_path / "run") as session:
        x = torch.rand(8, 4, requires_grad=True)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        scaler.scale(out.float().square().mean()).backward()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
    assert session.report is not None
    assert [(i.cause, i.step) for i in session.report.incidents] == [("no-gradients", 0)]


def test_needless_scaler_is_named_where_it_is_used(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=8.0)
    with ampguard.watch(out=tmp_path / "run") as session:
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(model(torch.rand(8, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert session.report is not None
    (incident,) = session.report.incidents
    assert (incident.cause, incident.severity) == ("needless-scaler", "warning")
    assert incident.location is not None
    assert incident.location.code.startswith("scaler.scale(")


def test_derivatives_by_positions_before_the_first_step(tmp_path: Path) -> None:
    """A sampler moves by `torch.autograd.grad` before the optimizer from before the guard steps: that is no iteration."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampguard.watch(out=tmp_path / "run") as session:
        for _ in range(5):
            z = torch.randn(8, 4)
            for length in (1.0, 1e3, 0.1):
                z.requires_grad_(True)
                energy = (model(z * length).square()).exp().sum()
                (force,) = torch.autograd.grad(energy, z)
                moved = z.detach() - 0.01 * force
                z = torch.where(torch.isfinite(moved), moved, z.detach())
            optimizer.zero_grad()
            model(z).square().mean().backward()
            optimizer.step()
    assert session.report is not None
    assert session.report.steps == 5
    assert [i for i in session.report.incidents if i.severity != "info"] == []
