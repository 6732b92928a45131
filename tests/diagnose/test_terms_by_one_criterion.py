"""One criterion that is called for each term of a loss: the step is judged by their sum, and a sum that is skipped is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
STEPS, BAD, IGNORED = 6, 4, -1


def train(parts: tuple[nn.Module | Callable[[Tensor], Tensor], ...], weights: list[Tensor], skips: bool) -> list[float]:
    """Which sentence comes next, and which word is masked: in one batch no sentence has a label."""
    body, sentence, words = parts
    criterion = nn.NLLLoss(ignore_index=IGNORED)
    optimizer = torch.optim.SGD(weights, lr=1e-2)
    of_words = []
    for step in range(STEPS):
        x, word = torch.randn(4, 8), torch.randint(0, 5, (4,))
        follows = torch.full((4,), IGNORED) if step == BAD else torch.randint(0, 2, (4,))
        hidden = body(x)
        next_loss = criterion(sentence(hidden).log_softmax(1), follows)
        mask_loss = criterion(words(hidden).log_softmax(1), word)
        of_words.append(mask_loss.item())
        loss = next_loss + mask_loss
        if skips and not loss.isfinite():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == BAD:
            break
    return of_words


def of_modules(skips: bool) -> list[float]:
    torch.manual_seed(0)
    parts = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 5)
    return train(parts, [p for part in parts for p in part.parameters()], skips)


def of_plain_weights(skips: bool) -> list[float]:
    """The criterion is the only module then."""
    torch.manual_seed(0)
    weights = [torch.randn(8, n, requires_grad=True) for n in (8, 2, 5)]
    body, sentence, words = (lambda x, w=w: x @ w for w in weights)
    return train((body, sentence, words), weights, skips)


@pytest.mark.parametrize("skips", [False, True])
def test_the_loss_of_the_replay_is_that_of_the_step(skips: bool, guard: Guard) -> None:
    run = guard(lambda: of_modules(skips))
    assert run.causes == ["empty-reduction"]
    assert (run.first.step, run.first.phase) == (BAD, "loss")
    assert run.first.location.code.startswith("next_loss = ")
    (fix,) = run.first.fixes
    assert fix.verified
    assert fix.outcome.endswith(f"the loss is {run.result[BAD]:.4g}")


@pytest.mark.parametrize("skips", [False, True])
def test_of_a_model_without_modules_it_is_told(skips: bool, guard: Guard) -> None:
    run = guard(lambda: of_plain_weights(skips))
    assert run.causes == ["empty-reduction"]
    assert run.first.step == BAD
    assert run.first.location.code.startswith("next_loss = ")
