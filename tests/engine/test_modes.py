from __future__ import annotations

import pytest
import torch
from engine_loops import MODES, Net, batch, loss_of, made, model_of, train
from torch import nn

import ampguard
from ampguard.errors import PrecisionError, ProtocolError, SetupError


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns(mode: str) -> None:
    amp = made(mode, max_grad_norm=1.0)
    losses = train(amp, range(60))
    assert losses[-1] < 0.3 * losses[0]
    assert amp.steps >= 58


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_stays_near_float32(mode: str) -> None:
    plain = train(made("fp32", lr=2e-3), range(30))
    there = train(made(mode, lr=2e-3), range(30))
    assert there[-1] == pytest.approx(plain[-1], rel=0.05)


def test_float32_is_bit_for_bit_a_plain_loop() -> None:
    amp = made("fp32", max_grad_norm=0.5)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    theirs = []
    for number in range(10):
        x, y = batch(number)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        theirs.append(loss.item())
    torch.manual_seed(1)
    assert train(amp, range(10)) == pytest.approx(theirs, rel=1e-6)


def test_float16_is_a_grad_scaler_loop() -> None:
    amp = made("fp16", max_grad_norm=0.5, init_scale=2.0**20)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    torch.manual_seed(1)
    theirs, norms, scales = [], [], []
    for number in range(12):
        x, y = batch(number)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        theirs.append(loss.item())
    torch.manual_seed(1)
    for number in range(12):
        loss = loss_of(amp, number)
        amp.backward(loss)
        result = amp.step()
        assert result.loss_scale == result.scale == scales[number]
        assert result.skipped is not bool(torch.isfinite(torch.tensor(norms[number])))
        if not result.skipped:
            assert result.grad_norm == pytest.approx(norms[number], rel=1e-4)
        assert loss.item() == pytest.approx(theirs[number], rel=1e-4)
    assert amp.get_scale() == scaler.get_scale() < 2.0**20


def test_o2_keeps_norms_and_masters_in_float32() -> None:
    amp = made("O2")
    model = model_of(amp)
    assert model.inner.weight.dtype == torch.float16
    assert model.norm.weight.dtype == model.statistics.running_mean.dtype == torch.float32
    masters = amp.optimizers["AdamW"].param_groups[0]["params"]
    assert {m.dtype for m in masters} == {torch.float32}
    train(amp, range(3))
    assert torch.equal(model.inner.weight, masters[0].half())
    assert not torch.equal(model.inner.weight.float(), masters[0])


def test_o2_loses_no_small_update() -> None:
    """A step of 1e-5 on a weight of 1.0 is below float16's spacing of 1e-3; a hundred of them are not."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    amp = ampguard.Amp(model, optimizer, "O2", init_scale=128.0)
    for _ in range(200):
        with amp.autocast():
            loss = model(torch.ones(1, 1)).sum()
        amp.backward(loss)
        amp.step()
    assert model.weight.item() == pytest.approx(1 - 200e-5, abs=6e-4)


def test_zero_grad_of_the_optimizer_clears_o2s_gradients() -> None:
    amp = made("O2")
    amp.backward(loss_of(amp, 0))
    assert model_of(amp).inner.weight.grad is None
    optimizer = amp.optimizers["AdamW"]
    assert optimizer.param_groups[0]["params"][0].grad.dtype == torch.float32
    optimizer.zero_grad()
    train(amp, range(2))
    assert amp.steps == 2


def test_o3_updates_by_small_gradients_as_float32_does() -> None:
    """Their squares, and an eps of 1e-8, are 0 in float16."""
    moved = {}
    for mode in ("fp32", "O3"):
        model = nn.Linear(64, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        amp = ampguard.Amp(model, optimizer, mode, init_scale=1024.0)
        for _ in range(10):
            with amp.autocast():
                loss = model(torch.ones(1, 64)).sum() * 1e-5
            amp.backward(loss)
            assert amp.step().stepped
        moved[mode] = model.weight.detach().float()
        assert optimizer.state[model.weight]["exp_avg_sq"].dtype == torch.float32
        assert optimizer.param_groups[0]["eps"] == 1e-8
    torch.testing.assert_close(moved["O3"], moved["fp32"], rtol=5e-3, atol=0.0)


def test_the_optimizers_own_step_is_refused_in_o3() -> None:
    amp = made("O3")
    amp.backward(loss_of(amp, 0))
    with pytest.raises(ProtocolError, match=r"would compute in float16") as caught:
        amp.optimizers["AdamW"].step()
    assert caught.value.cause == "optimizer-underflow"
    assert amp.step().stepped


@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "nearest"])
def test_bf16_true_keeps_small_updates_unless_rounded_to_nearest(rounding: str) -> None:
    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=1e-3), "bf16-true", rounding=rounding)
    for _ in range(100):
        with amp.autocast():
            loss = model(torch.ones(1, 64)).sum()
        amp.backward(loss)
        amp.step()
    moved = 1.0 - model.weight.float().mean().item()
    assert moved == (0.0 if rounding == "nearest" else pytest.approx(0.1, rel=0.1))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_in_float32(mode: str) -> None:
    amp = made(mode, eval_precision="fp32")
    train(amp, range(5))
    before = {name: value.clone() for name, value in model_of(amp).state_dict().items()}
    model_of(amp).eval()
    x, _ = batch(0)
    with torch.no_grad(), amp.autocast():
        assert model_of(amp).inner(x).dtype == torch.float32
        output = model_of(amp)(x)
    assert output.dtype == torch.float32
    after = model_of(amp).state_dict()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    model_of(amp).train()
    train(amp, range(5, 8))
    assert amp.steps == 8


def test_evaluation_of_o2_uses_the_masters() -> None:
    amp = made("O2", eval_precision="fp32")
    train(amp, range(3))
    model_of(amp).eval()
    master = amp.optimizers["AdamW"].param_groups[0]["params"][0]
    with amp.autocast():
        assert torch.equal(model_of(amp).inner.weight, master)


def test_outputs_of_low_precision_models_are_float32() -> None:
    for mode in ("O2", "O3", "bf16-true"):
        amp = made(mode)
        with amp.autocast():
            assert model_of(amp)(batch(0)[0]).dtype == torch.float32


def test_tf32_puts_its_setting_back(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_float32_matmul_precision()
    amp = made("tf32")
    assert "no TensorFloat-32" in caplog.text
    train(amp, range(2))
    assert torch.get_float32_matmul_precision() == before


def test_float8_is_refused_with_the_reason() -> None:
    model = nn.Linear(16, 16)
    before = type(model)
    with pytest.raises(PrecisionError, match=r"float8 cannot be used here: it needs an NVIDIA GPU.*\n.*use bf16"):
        ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "float8")
    assert type(model) is before


def test_an_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(PrecisionError, match=r"unknown precision 'bf16-ture'; nearest: .*'bf16-true'"):
        made("bf16-ture")


def test_an_option_of_another_mode_is_refused() -> None:
    with pytest.raises(SetupError, match="precision 'fp16' takes no option rounding="):
        made("fp16", rounding="kahan")
    with pytest.raises(SetupError, match="unknown rounding='up'"):
        made("bf16-true", rounding="up")


def test_a_surrounding_autocast_is_left_in_float32() -> None:
    amp = made("fp32")
    with torch.autocast("cpu", dtype=torch.bfloat16), amp.autocast():
        assert model_of(amp).inner(batch(0)[0]).dtype == torch.float32


def test_modes_have_their_usual_names() -> None:
    for alias, name in {"O0": "fp32", "O1": "fp16", "16-mixed": "fp16", "bf16-mixed": "bf16", "o2": "O2"}.items():
        assert made(alias).mode.name == name
