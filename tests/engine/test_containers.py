"""Modules that have no forward pass of their own: lists and dictionaries of modules, as models and in patterns."""

from __future__ import annotations

import pytest
import torch
from engine_loops import MODES, batch
from torch import Tensor, nn

import ampguard
from ampguard.engine.patterns import called_in
from ampguard.errors import PatternError


class Attention(nn.Module):
    """Notes what its own operators compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.computed_in: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ x.transpose(-2, -1)
        self.computed_in.append(scores.dtype)
        return scores.softmax(-1) @ x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": Attention(), "mlp": nn.Linear(8, 8)}) for _ in range(2)])
        self.scales = nn.ParameterList([torch.ones(8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["mlp"](x + block["attn"](x))
        return x * self.scales[0]


@pytest.mark.parametrize("mode", ["fp16", "bf16", "O2", "O3", "bf16-true"])
@pytest.mark.parametrize("pattern", ["blocks", "blocks.*", "blocks.0", "*"])
def test_a_pattern_that_names_a_container_means_what_it_holds(mode: str, pattern: str) -> None:
    torch.manual_seed(0)
    model = Blocks()
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=1e-3), mode, force_fp32=pattern, init_scale=64.0)
    with amp.autocast():
        loss = model(batch(0)[0]).float().square().mean()
    amp.backward(loss)
    assert amp.step().stepped
    assert model.blocks[0]["attn"].computed_in == [torch.float32]
    second = torch.float32 if pattern != "blocks.0" else amp.mode.autocast_dtype or amp.mode.weights_dtype
    assert model.blocks[1]["attn"].computed_in == [second]


def test_a_pattern_that_names_nothing_that_is_called_is_refused() -> None:
    model = Blocks()
    with pytest.raises(PatternError, match=r"'scales' matches `scales \(ParameterList\)` only: without a forward pass"):
        ampguard.force_fp32(model, "scales")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_a_container_may_be_the_model(mode: str, kind: type[nn.Module]) -> None:
    """Its parts are what the loop calls."""
    torch.manual_seed(0)
    parts = {"trunk": nn.Linear(8, 16), "heads": nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])}
    model = kind(parts if kind is nn.ModuleDict else list(parts.values()))
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=1e-2), mode, init_scale=64.0)
    x, y = batch(0)
    with amp.autocast():
        hidden = parts["trunk"](x).relu()
        outputs = [head(hidden) for head in parts["heads"]]
        loss = sum(nn.functional.mse_loss(out.float(), y) for out in outputs)
    amp.backward(loss)
    assert amp.step().stepped
    assert outputs[0].dtype == (amp.mode.autocast_dtype or torch.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torchscript_has_made_is_taken_as_it_is() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        @torch.jit.export
        def encode(self, x: Tensor) -> Tensor:
            return self.inner(x)

    scripted = torch.jit.script(Encoder())
    parts = nn.ModuleList([scripted, nn.Linear(8, 8)])
    assert called_in({"parts": parts}) == {"parts.0": scripted, "parts.1": parts[1]}
