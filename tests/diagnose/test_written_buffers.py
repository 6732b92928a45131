"""Statistics that the script computes by itself and writes to buffers: what made them bad is told, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]
EPOCHS, BATCHES = 3, 4


@torch.no_grad()
def recalibrate(net: nn.Module, norm: nn.BatchNorm1d, data: list[Tensor], skipped: int) -> None:
    net.train()
    mean, count = torch.zeros(4), torch.zeros(())
    for number, x in enumerate(torch.utils.data.DataLoader(data, batch_size=None)):  # type: ignore[arg-type]
        if number < skipped:
            continue
        net(x)
        mean += norm.running_mean if norm.running_mean is not None else 0.0
        count += 1
    assert norm.running_mean is not None
    norm.running_mean.copy_(mean / count)


def trained(bad_epoch: int | None) -> dict[str, Any]:
    seed_everything()
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = [torch.randn(6, 3) for _ in range(BATCHES)]
    for epoch in range(EPOCHS):
        net.train()
        for x in data:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        recalibrate(net, norm, data, BATCHES if epoch == bad_epoch else 1)
        net.eval()
        with torch.no_grad():
            for x in data:
                net(x).square().mean().item()
    return fingerprint(net, optimizer)


@pytest.mark.parametrize("bad_epoch", [None, EPOCHS - 1])
def test_the_line_that_computes_them_is_told(guard: Guard, bad_epoch: int | None) -> None:
    plain = trained(bad_epoch)
    run = guard(lambda: trained(bad_epoch))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    if bad_epoch is None:
        assert not run.report.incidents
        return
    assert run.causes == ["division-by-zero"]
    assert (run.first.step, run.first.mode) == (BATCHES * EPOCHS, "eval")
    assert run.first.location is not None
    assert run.first.location.code == "norm.running_mean.copy_(mean / count)"
    assert run.first.fixes[0].verified
