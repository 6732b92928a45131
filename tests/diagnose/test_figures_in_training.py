"""Numbers that a training loop reads between its backward pass and its update, only to log them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched


def train(
    loss_of: Callable[[Tensor], Tensor],
    figure_of: Callable[[Tensor, Tensor], Tensor],
    changed: Callable[[Tensor], Tensor] = torch.clone,
) -> None:
    """The figure is computed from the results that the loss is computed from; both read what is kept of it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(4):
        x, y = 3 * torch.randn(8, 4), torch.randint(0, 3, (8,))
        per_sample = nn.functional.cross_entropy(changed(model(x)), y, reduction="none")
        loss = loss_of(per_sample)
        optimizer.zero_grad()
        (loss / 2).backward()
        figure_of(per_sample, loss).item()
        optimizer.step()


def test_perplexity_that_is_only_logged(guard: Callable[..., Watched]) -> None:
    run = guard(lambda: train(torch.mean, lambda per_sample, _: (per_sample.sum() * 300).exp()))
    assert run.report.incidents == ()


def test_accuracy_of_an_absent_class(guard: Callable[..., Watched]) -> None:
    run = guard(lambda: train(torch.mean, lambda per_sample, _: per_sample[per_sample > 1e6].mean()))
    assert run.report.incidents == ()


def test_loss_whose_nan_was_taken_out(guard: Callable[..., Watched]) -> None:
    """The number shows what the loss hides."""

    def loss_of(per_sample: Tensor) -> Tensor:
        return per_sample.nan_to_num(posinf=0.0).mean()

    run = guard(
        lambda: train(
            loss_of, lambda per_sample, _: per_sample.mean(), lambda out: out.masked_fill(out > 1, -torch.inf)
        )
    )
    assert run.report.incidents


def test_loss_that_was_differentiated(guard: Callable[..., Watched]) -> None:
    run = guard(lambda: train(lambda per_sample: per_sample.mean().sub(1e3).log(), lambda _, loss: loss))
    assert run.report.incidents[0].cause == "domain-error"


class Masked(nn.Module):
    """Returns its scores within an object, as `Categorical(logits=...)` is one; some are banned."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.register_buffer("ban", torch.tensor([False, False, True, False, False]))

    def forward(self, x: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.body(x).masked_fill(self.ban, -torch.inf))


@pytest.mark.parametrize("is_shown_late", [False, True])
def test_range_of_masked_scores(is_shown_late: bool, guard: Callable[..., Watched]) -> None:
    """It is infinite because the mask is: behind an update, and behind calls that collect what comes next."""

    def body() -> None:
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in range(4):
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(2, 4)).sample()
            scores = model(torch.randn(8, 4))
            loss = -scores.log_prob(torch.zeros(8)).mean()
            optimizer.zero_grad()
            loss.backward()
            if is_shown_late:
                optimizer.step()
            (scores.logits.max() - scores.logits.min()).item()
            if not is_shown_late:
                optimizer.step()

    run = guard(body)
    assert run.report.incidents == ()


def test_range_that_is_taken_and_never_read(guard: Callable[..., Watched]) -> None:
    """It wants a gradient and has none coming; the calls behind it make no loss of it."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 5)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        kept = []
        for _ in range(4):
            scores = model(torch.randn(8, 4)).masked_fill(torch.arange(5) == 2, -torch.inf)
            loss = nn.functional.cross_entropy(scores, torch.zeros(8).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(scores.max() - scores.min())
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(2, 4)).mean()

    run = guard(body)
    assert run.report.incidents == ()
