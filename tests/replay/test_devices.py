"""On which kind of device an operator of a replay computed."""

from __future__ import annotations

import pytest
import torch

from ampguard.replay.trace import TracedOp, TracedTensor


@pytest.mark.parametrize(
    ("inputs", "outputs", "device"),
    [
        ([], [], "cpu"),
        (["cpu", "cpu"], ["cpu"], "cpu"),
        (["cpu", "cuda"], ["cuda"], "cuda"),  # a number in front
        ([], ["cuda"], "cuda"),
        (["cuda"], ["cpu"], "cuda"),  # brought to the CPU
    ],
)
def test_the_device_of_an_operator(inputs: list[str], outputs: list[str], device: str) -> None:
    op = TracedOp(0, 0, torch.ops.aten.add.Tensor, "add", None, None, None)
    op.inputs = [TracedTensor((), torch.float32, 0, device=kind) for kind in inputs]
    op.outputs = [TracedTensor((), torch.float32, 0, device=kind) for kind in outputs]
    assert op.device == device
