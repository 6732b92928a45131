"""A precision from outside does not end a script over a layer that the device cannot compute in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.run.overrides import refused


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.rnn = kind(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])


def raises(kind: type[nn.RNNBase], dtype: torch.dtype) -> bool:
    """Whether this processor cannot train such a layer under autocast."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            kind(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train(overridden: Callable[..., Any], kind: type[nn.RNNBase], precision: str) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    seen: set[torch.dtype] = set()
    with overridden(precision) as session:
        net = Tagger(kind)
        net.embed.register_forward_hook(lambda _module, _args, output: seen.add(output.dtype))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            loss = nn.functional.cross_entropy(net(torch.randn(4, 5, 8)), torch.tensor([0, 1, 2, 3]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert torch.isfinite(loss)
    assert seen == {dtype}  # the rest of the model is in what was asked for
    is_refused = raises(kind, dtype)
    assert session.report.run["in_float32"] == (["rnn"] if is_refused else [])
    assert any("rnn in float32: nn." in did for did in session.report.run["did"]) is is_refused
    assert session.report.run["could_not"] == []


def test_any_layer_that_raises_is_put_in_float32(
    overridden: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused, "refuses", lambda *_: True)
    with overridden("fp16") as session:
        output = Tagger(nn.GRU)(torch.randn(2, 5, 8))
    assert torch.isfinite(output).all()
    assert len(session.report.run["in_float32"]) == 1
