"""What follows from a failure in the very step in which it was told is no second incident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

import ampguard
from ampguard.report.store import read_report

Guard = Callable[..., Watched]
LINE = "return x / x.norm(dim=1, keepdim=True)"


def normalised(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_everything()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(is_blank: bool) -> tuple[Tensor, Tensor]:
    x = torch.rand(4, 6) + 0.1
    if is_blank:
        x[2] = 0
    return x, torch.randint(3, (4,))


@pytest.mark.parametrize("blank", [0, 5])
def test_weights_that_an_ascent_along_bad_gradients_has_spoiled(blank: int, guard: Guard) -> None:
    def body() -> None:
        model, optimizer = made()
        for step in range(8):
            x, y = batch(step == blank)
            x = normalised(x)
            F.cross_entropy(model(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            ascents = []
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    ascents.append(p.grad * 0.05 / (norm + 1e-12))
                    p.add_(ascents[-1])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, ascent in zip(model.parameters(), ascents, strict=True):
                    p.sub_(ascent)
            optimizer.step()
            optimizer.zero_grad()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert len(run.causes) == 1
    incident = run.first
    assert (incident.cause, incident.step) == ("division-by-zero", blank)
    assert incident.location is not None
    assert incident.location.code == LINE


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("blank", [0, 5])
def test_an_error_about_the_norm_of_its_gradients(blank: int, by_hand: bool, tmp_path: Path) -> None:
    def train() -> None:
        model, optimizer = from_before_the_guard if blank else made()
        for step in range(8):
            x, y = batch(step == blank)
            x = normalised(x)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if by_hand:
                norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
                if not torch.isfinite(norm):
                    raise RuntimeError(f"norm {norm}")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()

    from_before_the_guard = made()
    with pytest.raises(RuntimeError, match="norm"), ampguard.watch(out=tmp_path / "run"):
        train()
    (incident,) = read_report(tmp_path / "run").incidents
    assert (incident.cause, incident.mode, incident.step) == ("division-by-zero", "train", blank)
