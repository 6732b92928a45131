"""While a CUDA graph is captured the guard stays out, and what its replays do is neither a fault nor a breach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulated_graphs import device_graphs as device_graphs  # noqa: PLC0414
from graph_loops import by_hand, forward_and_backward, graphed_callables, whole_step
from watching import bits, watched

LOOPS = {
    "scaler outside": (forward_and_backward, 3 + 24),
    "no steps in the warm-up": (lambda: forward_and_backward(warm_up_steps=False), 24),
    "whole step": (whole_step, 4 + 24),
    "callables": (graphed_callables, 24),
    "by hand": (by_hand, 2 + 24),
}


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("name", LOOPS)
def test_loop_is_as_if_unwatched(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop, steps = LOOPS[name]
    plain, plain_losses, plain_scale = loop()
    run = watched(loop, tmp_path / "run", capsys)
    model, losses, scale = run.result
    assert run.faults == 0
    assert bits(dict(model.state_dict())) == bits(dict(plain.state_dict()))
    assert (bits(losses), scale) == (bits(plain_losses), plain_scale)
    assert all(loss == loss for loss in losses)
    assert run.causes == []
    assert run.report.steps == steps
