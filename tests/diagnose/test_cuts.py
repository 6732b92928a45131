"""A loss that cannot reach the parameters: the card names the call that cut it off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]


class Nets:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 3)


def without_grad(nets: Nets, x: Tensor) -> Tensor:
    with torch.no_grad():
        features = nets.encoder(x)  # cut
    return nets.head(features.relu())  # type: ignore[no-any-return]


def detached(nets: Nets, x: Tensor) -> Tensor:
    features = nets.encoder(x).relu()
    features = features.detach()  # cut
    return nets.head(features)  # type: ignore[no-any-return]


def glue_without_grad(nets: Nets, x: Tensor) -> Tensor:
    features = nets.encoder(x)
    with torch.no_grad():
        features = features * 2.0  # cut
    return nets.head(features + 1.0)  # type: ignore[no-any-return]


def rounded(nets: Nets, x: Tensor) -> Tensor:
    chosen = nets.encoder(x).argmax(-1)  # cut
    return nets.head(F.one_hot(chosen, 8).float())  # type: ignore[no-any-return]


CUTS = [without_grad, detached, glue_without_grad, rounded]
WORDS = {without_grad: "no_grad", detached: "detach", glue_without_grad: "no_grad", rounded: "no derivative"}


def training(
    forward: Callable[[Nets, Tensor], Tensor], has_scaler: bool, trains_head: bool = False
) -> Callable[[], None]:
    def body() -> None:
        nets = Nets()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
        opt_encoder = torch.optim.SGD(nets.encoder.parameters(), lr=0.1)
        opt_head = torch.optim.SGD(nets.head.parameters(), lr=0.1) if trains_head else None
        for _ in range(6):
            opt_encoder.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(forward(nets, torch.randn(5, 4)), torch.randint(0, 3, (5,)))
            scaler.scale(loss).backward()
            if opt_head is not None:
                scaler.step(opt_head)
                opt_head.zero_grad()
            try:
                scaler.step(opt_encoder)
            except AssertionError:
                return
            scaler.update()
        with torch.no_grad():
            nets.head(nets.encoder(torch.randn(5, 4)))

    return body


@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize("trains_head", [True, False])
@pytest.mark.parametrize("forward", CUTS, ids=lambda f: f.__name__)
def test_call_that_cuts(
    forward: Callable[[Nets, Tensor], Tensor], trains_head: bool, has_scaler: bool, guard: Guard
) -> None:
    run = guard(training(forward, has_scaler, trains_head))
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.cause == "no-gradients"]
    assert "# cut`" in incident.explanation, incident.explanation
    assert WORDS[forward] in incident.explanation
    assert "opt_encoder" in incident.explanation
    assert ("opt_head" in incident.explanation) is trains_head


def test_loss_that_does_not_use_the_parameters(guard: Guard) -> None:
    run = guard(training(lambda nets, x: nets.head(F.pad(x, (0, 4))), True))
    (incident,) = [i for i in run.report.incidents if i.cause == "no-gradients"]
    assert "does not depend on them" in incident.explanation
