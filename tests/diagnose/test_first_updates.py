"""Learning rates that are far too large from the first step on: the fixes are tried on the run's own beginning."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

from ampguard.capture.sampling import keeper

Guard = Callable[..., Watched]
Make = Callable[[Any], torch.optim.Optimizer]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def regression(make: Make, low: bool, steps: int = 30) -> None:
    seed_everything()
    model = net()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=low)
    for _ in range(steps):
        x = torch.rand(32, 16)
        with torch.autocast("cpu", dtype=torch.float16, enabled=low):
            loss = F.mse_loss(model(x).float(), F.one_hot((4 * x[:, 0]).long(), 4).float())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not loss.isfinite():
            return


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=100.0, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=3e8)],
    ids=["SGD", "AdamW"],
)
def test_a_smaller_rate_is_tried_from_the_first_step_on(make: Make, low: bool, guard: Guard) -> None:
    first = guard(partial(regression, make, low)).first
    assert first.cause == "divergence"
    lower = next(fix for fix in first.fixes if fix.action == "lower-learning-rate")
    assert lower.verified
    assert lower.outcome is not None
    assert lower.outcome.startswith("steps 0 to ")


def test_two_optimizers_of_one_iteration(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        one, other = net(), net()
        first, second = torch.optim.SGD(one.parameters(), lr=200.0), torch.optim.SGD(other.parameters(), lr=200.0)
        for _ in range(30):
            x = torch.rand(32, 16)
            for model, optimizer in ((one, first), (other, second)):
                loss = F.mse_loss(model(x), x[:, :4])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not loss.isfinite():
                    return

    first = guard(body).first
    assert first.cause == "divergence"
    assert any(fix.verified for fix in first.fixes), [fix.outcome for fix in first.fixes]


def test_large_first_updates_that_do_no_harm(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    raise_alarm = keeper.StretchKeeper._raise_alarm
    monkeypatch.setattr(
        keeper.StretchKeeper, "_raise_alarm", lambda self, wanted: (kept.append(self), raise_alarm(self, wanted))[1]
    )
    watched = guard(partial(regression, lambda p: torch.optim.AdamW(p, lr=0.03), low=False, steps=20))
    assert not watched.report.incidents
    assert len(kept) == 1
    assert kept[0].stretch is None, "what was kept of the beginning is given back when it has passed"


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=1e-3)], ids=["SGD", "AdamW"]
)
def test_ordinary_first_updates_are_not_kept(make: Make, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper.StretchKeeper, "_raise_alarm", lambda *_: pytest.fail("nothing was unusual"))
    assert not guard(partial(regression, make, low=True)).report.incidents


def test_a_first_loss_near_zero_is_no_measure_of_the_next_batch(guard: Guard) -> None:
    """A policy's loss begins near 0 by chance; the next batch, fifteen times as large, is one like the others."""

    def body() -> None:
        seed_everything()
        mean, log_std = nn.Linear(4, 1), nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.Adam([*mean.parameters(), log_std], lr=300.0)
        for size in (0.5, 3.0, 1.0, 1.0):
            x, action = torch.randn(8, 4), torch.randn(8, 1)
            std = torch.exp(log_std)
            loss = (0.5 * ((action - mean(x)) / std).square() - torch.log(std) + size * std).mean() - 1.7
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("divergence", 1)
    lower = next(fix for fix in first.fixes if fix.action == "lower-learning-rate")
    assert lower.verified, lower.outcome


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_var = self.encoder(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
        return torch.sigmoid(self.decoder(z)), mean, log_var


def test_a_step_that_raised_over_its_output_is_tried_as_well(guard: Guard, tmp_path: Path) -> None:
    """PyTorch refuses a reconstruction that is NaN, and no loss is made: the fixes are tried up to the output."""

    def body() -> None:
        seed_everything()
        model = Autoencoder()
        optimizer = torch.optim.Adam(model.parameters(), lr=100.0)
        for _ in range(4):
            x = torch.rand(32, 16)
            made, mean, log_var = model(x)
            loss = F.binary_cross_entropy(made, x) + (mean.square() + log_var.exp() - log_var - 1.0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="between 0 and 1"):
        guard(body)
    first = json.loads((tmp_path / "run" / "report.json").read_text())["incidents"][0]
    assert (first["cause"], first["phase"]) == ("divergence", "forward")
    lower = next(fix for fix in first["fixes"] if fix["action"] == "lower-learning-rate")
    assert lower["verified"], lower["outcome"]


class Careful(Autoencoder):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made, mean, log_var = super().forward(x)
        assert not made.isnan().any()
        return made, mean, log_var


def test_a_step_in_which_the_model_raised_is_tried_as_well(guard: Guard, tmp_path: Path) -> None:
    def body() -> None:
        seed_everything()
        model = Careful()
        optimizer = torch.optim.Adam(model.parameters(), lr=100.0)
        for _ in range(4):
            x = torch.rand(32, 16)
            made, mean, log_var = model(x)
            loss = F.mse_loss(made, x) + (mean.square() + log_var.exp() - log_var - 1.0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with pytest.raises(AssertionError):
        guard(body)
    first = json.loads((tmp_path / "run" / "report.json").read_text())["incidents"][0]
    assert (first["cause"], first["phase"]) == ("divergence", "forward")
    lower = next(fix for fix in first["fixes"] if fix["action"] == "lower-learning-rate")
    assert lower["verified"], lower["outcome"]


def test_weights_whose_norm_has_left_float32(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e25)
        for _ in range(4):
            loss = (model(torch.rand(32, 16)) - 1.0).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("divergence", 1)
    assert first.evidence["weights_moved_by"] > 1e15


class Checked(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x)
        assert made.isfinite().all()
        return made


def test_a_rate_is_no_cure_that_merely_leaves_finite_weights(guard: Guard, tmp_path: Path) -> None:
    """The step that failed has no loss: an earlier batch's, on the weights that the smaller update led to, is asked for."""

    def train(rate: float, steps: int = 3) -> list[float]:
        seed_everything()
        model = Checked(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        losses = []
        for _ in range(steps):
            loss = (model(torch.rand(32, 16)) - 1.0).abs().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    start, after, *_ = train(1e11)
    assert after > 1e30, "a tenth of the rate leaves all numbers finite"
    with pytest.raises(AssertionError):
        guard(partial(train, 1e12))
    first = json.loads((tmp_path / "run" / "report.json").read_text())["incidents"][0]
    assert first["cause"] == "divergence"
    lower = next(fix for fix in first["fixes"] if fix["action"] == "lower-learning-rate")
    assert lower["verified"], lower["outcome"]
    assert "that of step 0, once more" in lower["outcome"]
    factor = float(lower["how"].split("by a factor of ")[1].split(",")[0])
    assert max(train(1e12 / factor)) < 3 * start
