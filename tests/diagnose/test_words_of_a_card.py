"""What a card says besides its cause: every sentence must be true of the script that it is printed for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


def with_action(run: Watched, action: str) -> str:
    return next(fix.how for fix in run.first.fixes if fix.action == action)


class Loudness(nn.Module):
    """Enters autocast by itself, which the call of the model does not tell."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.conv = nn.Linear(6, 6)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        if self.casts:
            return self._power(self.conv(x).half()).float()
        with torch.autocast("cpu", dtype=torch.float16):
            return self._power(self.conv(x)).float()

    def _power(self, x: Tensor) -> Tensor:
        return x.square().mean(-1).log()


@pytest.mark.parametrize(("casts", "words"), [(False, "torch.autocast("), (True, "casts to float16")])
def test_where_the_low_precision_comes_from(casts: bool, words: str, guard: Guard) -> None:
    model = Loudness(casts)
    run = guard(lambda: model(torch.randn(4, 6) * 3000).mean().backward())
    assert run.first.cause == "fp16-overflow"
    assert words in with_action(run, "use-bf16")
    assert words in with_action(run, "disable-amp")


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom:UserWarning")
def test_spread_of_one_element(guard: Guard) -> None:
    """`max(count, 1)` is advice for a mean."""
    net = nn.Linear(3, 2)
    run = guard(lambda: net(torch.randn(1, 3)).std(0).sum().backward())
    assert run.first.cause == "empty-reduction"
    assert "correction=0" in with_action(run, "guard-empty")
    assert "max(count, 1)" not in with_action(run, "guard-empty")


def test_number_of_an_evaluation_is_no_loss(guard: Guard) -> None:
    net = nn.Linear(3, 2)

    def body() -> None:
        with torch.no_grad():
            (net(torch.ones(2, 3)) - 9.0).log().mean().item()

    run = guard(body)
    assert run.first.mode == "eval"
    outcomes = [fix.outcome or "" for fix in run.first.fixes if fix.verified]
    assert outcomes
    assert not any("loss" in outcome for outcome in outcomes)
    assert any("; the result is " in outcome for outcome in outcomes)


def test_cast_that_overflows(guard: Guard) -> None:
    net = nn.Linear(3, 2)
    run = guard(lambda: (net(torch.ones(2, 3)) * 1e6).half().float().mean().backward())
    assert run.first.op == "aten._to_copy.default"
    assert "the cast" in run.first.explanation
    assert "to_copy" not in run.first.explanation


class Spiking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)  # type: ignore[attr-defined]
        return (v > 0).float()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return g / (1 + 10 * v.abs()) ** 2


def test_hidden_value_that_is_read_and_not_multiplied(guard: Guard) -> None:
    """A NaN that a comparison hides; its derivative is a function of the script's own."""
    time = nn.Parameter(torch.tensor([0.5, -0.5]))

    def body() -> None:
        net = nn.Linear(2, 2)
        spikes = Spiking.apply(net(torch.ones(3, 2)) * time.sqrt())
        (spikes.sum() + net.bias.sum()).backward()

    text = guard(body).first.explanation
    assert "compared" in text
    assert "multiplies it by 0" not in text


def test_scale_of_a_loss_within_the_step(guard: Guard) -> None:
    """Meta-learning: gradients of a scaled loss go into the next one. That loss is float32, and is not to blame."""
    net = nn.Linear(2, 1)

    def body() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        x = torch.randn(8, 2) * 20
        with torch.autocast("cpu", dtype=torch.float16):
            inner = nn.functional.mse_loss(net(x), torch.zeros(8, 1))
        slopes = torch.autograd.grad(scaler.scale(inner), list(net.parameters()), create_graph=True)
        fast = [p - 0.01 * slope / scaler.get_scale() for p, slope in zip(net.parameters(), slopes, strict=True)]
        loss = nn.functional.linear(x, *fast).square().mean()
        scaler.scale(loss).backward()

    incident = guard(body).first
    assert (incident.cause, incident.severity) == ("loss-scale-overflow", "info")
    assert "The loss itself" not in incident.explanation
