"""Numbers that a training loop reads between its backward pass and its update, only to log them."""

from __future__ import annotations

from collections.abc import Callable

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
