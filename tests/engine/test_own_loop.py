"""`ampguard.precision`: autocast and scaler that belong together."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from engine_loops import Net, batch
from torch import nn

import ampguard
import ampguard.engine.own_loop
from ampguard.errors import CheckpointError, PrecisionError, ProtocolError


@pytest.mark.parametrize("name", ["O0", "fp32", "O1", "fp16", "O2", "O3", "bf16", "tf32"])
def test_one_loop_serves_every_precision(name: str) -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen = ampguard.precision(name, "cpu")
    chosen.prepare(model, optimizer)
    autocast, scaler = chosen
    losses = []
    for number in range(40):
        x, y = batch(number)
        optimizer.zero_grad()
        with autocast():
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("name", "scales", "dtype"),
    [("O0", False, torch.float32), ("O1", True, torch.float16), ("bf16", False, torch.bfloat16)],
)
def test_autocast_and_scaler_agree(name: str, scales: bool, dtype: torch.dtype) -> None:
    chosen = ampguard.precision(name, "cpu")
    assert isinstance(chosen.scaler, torch.amp.GradScaler)
    assert chosen.scaler.is_enabled() is scales
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_o2_without_its_model_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"prepare\(model, optimizer\)"), ampguard.precision("O2", "cpu").autocast():
        pass


@pytest.mark.parametrize("name", ["bf16-true", "float8"])
def test_what_only_amp_can_do_is_refused(name: str) -> None:
    with pytest.raises(PrecisionError, match=f"ampguard.Amp\\(model, optimizer, precision='{name}'\\)"):
        ampguard.precision(name)


def test_unknown() -> None:
    with pytest.raises(PrecisionError, match="unknown precision 'O4'"):
        ampguard.precision("O4")


def test_importing_ampguard_stays_quick() -> None:
    code = "import sys, ampguard; assert 'torch' not in sys.modules; ampguard.Amp; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3", "bf16"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str) -> None:
    def begun() -> tuple[ampguard.engine.own_loop.LoopPrecision, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        chosen = ampguard.precision(name, "cpu")
        chosen.prepare(model, optimizer)
        return chosen, model, optimizer

    def train(stop: int) -> list[torch.Tensor]:
        chosen, model, optimizer = begun()
        for number in range(8):
            if number == stop:
                state = copy.deepcopy(
                    [model.state_dict(), optimizer.state_dict(), chosen.scaler.state_dict(), chosen.state_dict()]
                )
                chosen, model, optimizer = begun()
                for part, saved in zip((model, optimizer, chosen.scaler, chosen), state, strict=True):
                    part.load_state_dict(saved)  # type: ignore[attr-defined]
            x, y = batch(number)
            optimizer.zero_grad()
            with chosen.autocast():
                loss = nn.functional.mse_loss(model(x), y)
            chosen.scaler.scale(loss).backward()
            chosen.scaler.step(optimizer)
            chosen.scaler.update()
        return [p.detach() for group in optimizer.param_groups for p in group["params"]]

    assert all(map(torch.equal, train(-1), train(4)))


def test_master_weights_of_another_model_are_refused() -> None:
    chosen = ampguard.precision("O2", "cpu")
    model = nn.Linear(4, 1)
    chosen.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CheckpointError, match="master weights are missing or others"):
        chosen.load_state_dict({"masters": [torch.zeros(3)]})
