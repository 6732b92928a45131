"""A step that the engine leaves out where there is no loss scale: the guard counts it, and explains its gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_loops import same
from torch import Tensor, nn

import ampguard
from ampguard.integrations.timm import NativeScaler

BAD = 4
Step = Callable[[Tensor], None]


class Rooted(nn.Module):
    """Its loss is finite where all inputs are alike, and its derivative is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).float()
        spread = (hidden - hidden.mean(0)).pow(2).mean(0).sqrt()
        return (spread - 0.5).square().mean()


def loop(model: nn.Module, step: Step, autocast: Callable[[], torch.autocast]) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(8):
        x = torch.randn(8, 4, generator=generator)
        if number == BAD:
            x[:] = x[0]
        with autocast():
            loss = model(x)
        step(loss)


def by_amp(precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = Rooted()
    amp = ampguard.Amp(model, torch.optim.AdamW(model.parameters(), 1e-2), precision)

    def step(loss: Tensor) -> None:
        amp.backward(loss)
        amp.step()

    loop(model, step, amp.autocast)
    assert amp.steps == 7
    return model


def by_native_scaler(precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = NativeScaler(precision=precision)

    def step(loss: Tensor) -> None:
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()

    loop(model, step, lambda: torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"))
    return model


@pytest.mark.parametrize(
    ("train", "precision"),
    [(by_amp, "fp32"), (by_amp, "bf16"), (by_amp, "bf16-true"), (by_native_scaler, "bf16"), (by_native_scaler, "fp32")],
)
def test_gradients_of_a_skipped_step_are_explained(
    train: Callable[[str], nn.Module], precision: str, tmp_path: Path
) -> None:
    alone = train(precision)
    with ampguard.watch(out=tmp_path / "run") as session:
        watched = train(precision)
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step, incident.module) == ("singular-gradient", BAD, "")
    assert incident.location is not None
    assert incident.location.code.startswith("spread = ")
    assert incident.fixes[0].verified
    assert session.report.steps == 8
    assert same(list(alone.parameters()), list(watched.parameters()))


def test_an_optimizer_that_is_held_off_with_another_is_not_accused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bad, good = Rooted(), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2) for model in (good, bad)]
    with ampguard.watch(out=tmp_path / "run") as session:
        amp = ampguard.Amp([bad, good], optimizers, "bf16")
        for number in range(8):
            x = torch.randn(8, 4)
            if number == BAD:
                x[:] = x[0]
            with amp.autocast():
                loss = bad(x) + good(x).square().mean()
            amp.backward(loss)
            amp.step()
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step) == ("singular-gradient", BAD)
    assert session.report.steps == 8
