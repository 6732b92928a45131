"""A loss that is summed and divided by the number of targets, in a batch that has none: said as that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

Guard = Callable[..., Watched]
BAD = 2


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers does with `num_items_in_batch`."""
    loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    return loss / (labels != -100).sum()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.mean() * 0) / (labels != -100).sum()


@pytest.mark.parametrize("loss", [summed, weighted])
def test_a_batch_without_any_target(loss: Callable[[Tensor, Tensor], Tensor], guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(BAD + 1):
            labels = torch.full((6,), -100) if step == BAD else torch.randint(0, 3, (6,))
            optimizer.zero_grad()
            loss(model(torch.randn(6, 4)), labels).backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.first
    assert (incident.cause, incident.step) == ("division-by-zero", BAD)
    assert ("all 6 are ignored" in incident.explanation) is (loss is summed)
    assert ("filter-sample" in [fix.action for fix in incident.fixes]) is (loss is summed)
    assert incident.fixes[0].verified


def test_a_module_of_which_every_target_is_ignored_is_asked_first(guard: Guard) -> None:
    """The printed line can stand where the script's does."""

    def body() -> None:
        torch.manual_seed(0)
        net, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss(ignore_index=-1)
        out, y = net(torch.randn(5, 4)), torch.full((5,), -1)
        loss = criterion(out, y)
        loss.backward()

    incident = guard(body).first
    assert incident.cause == "empty-reduction"
    fix = incident.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert fix.how.endswith(
        "let it be 0: loss = (criterion(out, y) if (y != criterion.ignore_index).any() else out.sum() * 0)"
    )


def test_targets_of_classes_without_weight_are_not_called_ignored(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0]))
        loss = criterion(net(torch.randn(5, 4)), torch.zeros(5).long())
        loss.backward()

    incident = guard(body).first
    assert incident.cause == "empty-reduction"
    assert "the weights of their classes are all 0" in incident.explanation
