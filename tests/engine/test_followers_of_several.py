"""Averages and schedulers beside several models and optimizers: each follows its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampguard
from ampguard.errors import SetupError


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def gan(critic_first: bool, ema: str) -> tuple[AveragedModel, AveragedModel]:
    """A critic that steps three times for each step of the generator, one of which is not finite; the generator is averaged."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 4)
    opt_g, opt_d = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    average, expected = average_of(generator), average_of(generator)
    models, optimizers = {"G": generator, "D": critic}, {"g": opt_g, "d": opt_d}
    if critic_first:
        models, optimizers = dict(reversed(models.items())), dict(reversed(optimizers.items()))
    given = {"alone": average, "pair": (average, generator), "pairs": [(average, generator)]}[ema]
    amp = ampguard.Amp(models, optimizers, "fp32", ema=given)
    for step in range(6):
        for _ in range(3):
            amp.backward(critic(generator(torch.randn(8, 4)).detach()).square().mean(), "d")
            amp.step("d")
        loss = critic(generator(torch.randn(8, 4))).mean()
        amp.backward(loss * float("nan") if step == 3 else loss, "g")
        if amp.step("g").stepped:
            expected.update_parameters(generator)
    return average, expected


@pytest.mark.parametrize("ema", ["alone", "pair", "pairs"])
@pytest.mark.parametrize("critic_first", [False, True])
def test_an_average_follows_the_optimizer_of_its_model(critic_first: bool, ema: str) -> None:
    average, expected = gan(critic_first, ema)
    assert int(average.n_averaged) == int(expected.n_averaged) == 5
    for mine, theirs in zip(average.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_average_of_one_model_with_two_optimizers_is_updated_once_a_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in range(2)]
    average = average_of(model)
    amp = ampguard.Amp(model, optimizers, "fp32", ema=average)
    for _ in range(4):
        amp.backward(model(torch.randn(8, 4)).square().mean())
        amp.step()
    assert int(average.n_averaged) == 4


def test_schedulers_may_have_names() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    amp = ampguard.Amp(model, optimizer, "fp32", schedulers={"warm-up": scheduler})
    amp.backward(model(torch.randn(8, 4)).square().mean())
    amp.step()
    assert scheduler.get_last_lr() == [0.05]


class ByEpoch:
    """As timm's: its step wants to know the epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None = None) -> None: ...


class ByUpdate:
    """As Swin's: it has no step, but a call of another name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step_update(self, updates: int) -> None: ...


@pytest.mark.parametrize(
    ("kind", "says"), [(ByEpoch, "missing a required argument: 'epoch'"), (ByUpdate, r"it has no step\(\)")]
)
def test_schedulers_that_want_to_know_more_are_refused(kind: type, says: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SetupError, match=f"{says}\n.*if result.stepped:"):
        ampguard.Amp(model, optimizer, "fp32", schedulers=kind(optimizer))
