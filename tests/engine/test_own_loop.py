"""`ampguard.precision`: autocast and scaler that belong together."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
from engine_loops import Net, batch
from torch import nn

import ampguard
import ampguard.engine.own_loop
from ampguard.engine.setup import parameters_of
from ampguard.errors import CheckpointError, PrecisionError, ProtocolError, SetupError


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


def test_steps_of_a_loop_of_ones_own_in_o3_compute_in_float32() -> None:
    """In float16 AdamW's eps is 0 and so are the squares of these gradients: its updates were seven times too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    exact = copy.deepcopy(model).double()
    start = torch.cat([p.detach().flatten() for p in exact.parameters()])
    optimizer, its = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, exact))
    chosen = ampguard.precision("O3", "cpu")
    chosen.prepare(model, optimizer)
    for number in range(20):
        x, y = batch(number)
        with chosen.autocast():
            loss = nn.functional.mse_loss(model(x), y) * 1e-3
        loss.backward()
        chosen.scaler.step(optimizer)
        optimizer.zero_grad()
        (nn.functional.mse_loss(exact(x.double()), y.double()) * 1e-3).backward()
        its.step()
        its.zero_grad()
    found, true = (torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (model, exact))
    assert float((found - true).norm() / (true - start).norm()) < 0.1
    assert optimizer.param_groups[0]["eps"] == 1e-8
    assert [p.dtype for p in optimizer.param_groups[0]["params"]] == [torch.float16] * 4
    assert {t.dtype for t in optimizer.state[model[0].weight].values()} == {torch.float32}


def test_a_step_that_fails_in_o3_leaves_the_parameters_as_they_were() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if self.fails:
                raise KeyError("once")
            super().step()

    model = nn.Linear(2, 1)
    optimizer = Failing(model.parameters(), 0.5)
    chosen = ampguard.precision("O3", "cpu")
    chosen.prepare(model, optimizer)
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(KeyError):
        optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.fails = False
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5)
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_a_step_inside_a_step_in_o3() -> None:
    """What the subclass does before it calls the step that it extends counts, in float32 too."""

    class Decaying(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - 2**-13)  # 1 - 2**-13 is 1 in float16
                    p.add_(2**-13)
            super().step()

    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # whose class has hooks of its own from now on
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = Decaying(model.parameters(), 0.5)
    chosen = ampguard.precision("O3", "cpu")
    chosen.prepare(model, optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.equal(model.weight, torch.full((1, 2), 2**-13 - 0.5).half())


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


@pytest.mark.parametrize("side", [None, "model", "optimizer"])
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3", "bf16"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str, side: str | None) -> None:
    """Also where weights were clipped just before it was saved: the model's, or what the optimizer holds."""

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
            if number == 4 and side is not None:
                clip(model.parameters() if side == "model" else parameters_of(optimizer))
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
        return [p.detach() for p in parameters_of(optimizer)]

    assert all(map(torch.equal, train(-1), train(4)))


@torch.no_grad()
def clip(parameters: Iterable[torch.Tensor]) -> None:
    for p in parameters:
        p.clamp_(-0.05, 0.05)


def test_master_weights_of_another_model_are_refused() -> None:
    chosen = ampguard.precision("O2", "cpu")
    model = nn.Linear(4, 1)
    chosen.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CheckpointError, match="master weights are missing or others"):
        chosen.load_state_dict({"masters": [torch.zeros(3)]})


@pytest.mark.parametrize("state", [None, [], {"masters": None}, {"masters": [1]}, {}])
def test_what_is_no_state_of_a_precision(state: object) -> None:
    chosen = ampguard.precision("O2", "cpu")
    model = nn.Linear(2, 2)
    chosen.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CheckpointError, match="the checkpoint was not loaded"):
        chosen.load_state_dict(state)


def test_prepare_in_the_wrong_order_is_told_of_prepare() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SetupError, match=r"a SGD is no Module\n  do    p\.prepare\(models, optimizers\)"):
        ampguard.precision("O2", "cpu").prepare(torch.optim.SGD(model.parameters(), 0.1), model)
