"""`update_bn` of an averaged model meets a bad image; the evaluation after it is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

Guard = Callable[..., Any]


def test_what_poisoned_its_statistics_is_named_without_the_wrapper(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        averaged = AveragedModel(net)
        images = torch.randn(8, 1, 5, 5)
        images[5] = float("inf")
        update_bn(images.split(4), averaged)
        averaged.eval()
        with torch.no_grad():
            averaged(torch.randn(2, 1, 5, 5))

    run = guard(body)
    assert run.faults == 0, run.stderr
    first, second = run.report.incidents
    assert (first.cause, first.evidence["name"]) == ("nonfinite-input", "input")
    assert first.evidence["poisoned_buffers"] == ["1.running_mean", "1.running_var"]
    assert (second.cause, second.evidence["name"]) == ("nonfinite-parameter", "1.running_mean")
    assert "It was poisoned in step 0 by convolution" in second.explanation
