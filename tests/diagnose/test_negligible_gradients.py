"""A classifier that is sure of most samples: gradients next to nothing beside those of the samples it has wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Guard = Callable[..., Any]


def train(wrong: int, weight: float = 1.0, teaching: int = 0) -> None:
    """Four of 64 units are alight for each class; `wrong` of 48 samples have another's label.

    The first `teaching` steps have nothing but wrong labels.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(5.4 * torch.eye(16).repeat(4, 1))
        net[2].weight.copy_(torch.eye(16).repeat(1, 4) + 0.05 * torch.randn(16, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(12):
        classes = torch.randint(0, 16, (48,))
        n = 48 if step < teaching else wrong
        labels = torch.cat([(classes[:n] + 1) % 16, classes[n:]])
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(functional.one_hot(classes, 16).float())
        loss = weight * functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def warnings(watched: Any) -> list[str]:
    return [incident.cause for incident in watched.report.incidents if incident.severity != "info"]


def test_what_is_negligible_beside_the_wrong_samples_is_not_lost(guard: Guard) -> None:
    assert warnings(guard(lambda: train(wrong=1))) == []


def test_nor_is_anything_once_all_is_learnt(guard: Guard) -> None:
    assert warnings(guard(lambda: train(wrong=0, teaching=4))) == []


def test_it_is_where_the_loss_has_always_been_small(guard: Guard) -> None:
    assert warnings(guard(lambda: train(wrong=24, weight=1e-13))) == ["gradient-underflow"]
