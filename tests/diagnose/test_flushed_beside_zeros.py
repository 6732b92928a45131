"""log of probabilities some of which only the low precision flushes to 0, beside others that are 0 in float32 too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from watching import seed_everything


@pytest.mark.parametrize(
    ("gaps", "cause"),
    [
        ([20.0, 95.5, 200.0], "domain-error"),  # 0 in bfloat16 by a hair, and 0 in any precision
        ([2.0, 25.0, 30.0], "fp16-underflow"),
        ([1.0, 2.0, 3.0], None),
    ],
)
def test_a_step_that_fails_in_float32_as_well(guard: Callable[..., Any], gaps: list[float], cause: str | None) -> None:
    low = torch.float16 if cause == "fp16-underflow" else torch.bfloat16

    def loop() -> None:
        seed_everything()
        net = nn.Linear(1, 2)
        with torch.no_grad():
            net.weight.copy_(torch.tensor([[1.0], [0.0]]))
            net.bias.zero_()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for step in range(4):
            x = torch.tensor(gaps)[:, None] if step == 3 else torch.ones(3, 1)
            with torch.autocast("cpu", dtype=low):
                p = net(x).softmax(1)
                loss = -p[:, 1].log().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(loop)
    errors = [i for i in run.report.incidents if i.severity == "error"]
    if cause is None:
        assert not errors, run.stderr
        return
    assert (errors[0].cause, errors[0].step) == (cause, 3)
    cures = {fix.action for fix in errors[0].fixes if fix.verified}
    assert cures & (
        {"disable-amp", "force-fp32"} if cause == "fp16-underflow" else {"clamp", "stable-form", "add-epsilon"}
    )
