"""A forward algorithm in which every path of one sample is forbidden: leaving that sample out is a fix that is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
BATCH, LENGTH, TAGS, BAD = 6, 4, 3, 4


class Tagger(nn.Module):
    """A conditional random field on a Linear, in log space."""

    def __init__(self, is_gold_masked: bool) -> None:
        super().__init__()
        self.is_gold_masked = is_gold_masked
        self.scores = nn.Linear(5, TAGS)
        self.transitions = nn.Parameter(torch.zeros(TAGS, TAGS))

    def forward(self, x: Tensor, tags: Tensor, allowed: Tensor) -> Tensor:
        scores = self.scores(x)
        emissions = scores.masked_fill(~allowed, -torch.inf)
        score = emissions[:, 0]
        for t in range(1, LENGTH):
            score = torch.logsumexp(score.unsqueeze(2) + self.transitions, dim=1) + emissions[:, t]
        gold = (emissions if self.is_gold_masked else scores).gather(2, tags.unsqueeze(2)).sum((1, 2))
        return (torch.logsumexp(score, dim=1) - gold).mean()


def batch(is_bad: bool) -> tuple[Tensor, Tensor, Tensor]:
    tags = torch.randint(0, TAGS, (BATCH, LENGTH))
    allowed = (torch.rand(BATCH, LENGTH, TAGS) < 0.5).scatter(2, tags.unsqueeze(2), True)
    if is_bad:
        allowed[BAD, 1] = False
    return torch.randn(BATCH, LENGTH, 5), tags, allowed


def in_a_module() -> Callable[[bool], Tensor]:
    model = Tagger(is_gold_masked=False)
    return lambda is_bad: model(*batch(is_bad))


def its_labels_too() -> Callable[[bool], Tensor]:
    model = Tagger(is_gold_masked=True)
    return lambda is_bad: model(*batch(is_bad))


def by_hand() -> Callable[[bool], Tensor]:
    """The maximum taken out by hand, time first."""
    model = nn.Linear(5, TAGS)

    def total(scores: Tensor) -> Tensor:
        most = scores.max(1, keepdim=True).values
        return (most + (scores - most).exp().sum(1, keepdim=True).log()).squeeze(1)

    def loss(is_bad: bool) -> Tensor:
        x, tags, allowed = batch(is_bad)
        x, tags, allowed = x.transpose(0, 1).contiguous(), tags.T.contiguous(), allowed.transpose(0, 1).contiguous()
        emissions = model(x).masked_fill(~allowed, -torch.inf)
        score = emissions[0]
        for emission in emissions[1:]:
            score = total(score.unsqueeze(2).expand(-1, -1, TAGS)) + emission
        return (total(score) - emissions.gather(2, tags.unsqueeze(2)).sum((0, 2))).mean()

    return loss


def in_probabilities() -> Callable[[bool], Tensor]:
    model = nn.Linear(5, TAGS)

    def loss(is_bad: bool) -> Tensor:
        x, _, allowed = batch(is_bad)
        emissions = model(x).softmax(-1) * allowed
        forward = emissions[:, 0]
        for t in range(1, LENGTH):
            forward = forward @ torch.full((TAGS, TAGS), 1 / TAGS) * emissions[:, t]
        return -torch.log(forward.sum(-1)).mean()

    return loss


def train(kind: Callable[[], Callable[[bool], Tensor]]) -> None:
    torch.manual_seed(1)
    loss_of = kind()
    for step in range(3):
        loss_of(step == 2).backward()


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (in_a_module, "masked-softmax"),
        (its_labels_too, "indeterminate"),
        (by_hand, "indeterminate"),
        (in_probabilities, "domain-error"),
    ],
)
def test_no_path_is_left_for_one_sample(kind: Callable[[], Any], cause: str, guard: Guard) -> None:
    run = guard(lambda: train(kind))
    assert run.faults == 0, run.stderr
    assert run.first.cause == cause, run.stderr
    (fix,) = [f for f in run.first.fixes if f.action == "filter-sample"]
    assert fix.how.startswith("drop sample 4 of the batch of 6 before the loss is computed")
    assert fix.verified, run.stderr


def test_a_row_of_every_sample_is_no_sample_s(guard: Guard) -> None:
    """Where each sample fails, leaving some of them out is no fix."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(5, TAGS)
        scores = model(torch.randn(BATCH, 5)).masked_fill(torch.ones(BATCH, TAGS, dtype=torch.bool), -torch.inf)
        torch.logsumexp(scores, 1).mean().backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.first.fixes
    assert not [f for f in run.first.fixes if f.action == "filter-sample"]
