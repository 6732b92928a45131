"""Weights that are written to by others than the optimizer: loaded, clipped, begun anew, on either side of O2's masters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_loops import batch, loss_of, made, model_of, same, train
from torch import Tensor, nn

import ampguard

Write = Callable[[ampguard.Amp], None]


def masters(amp: ampguard.Amp) -> list[Tensor]:
    return [p for group in amp.optimizers["AdamW"].param_groups for p in group["params"]]


@torch.no_grad()
def clip_model(amp: ampguard.Amp) -> None:
    for p in model_of(amp).parameters():
        p.clamp_(-0.05, 0.05)


@torch.no_grad()
def clip_masters(amp: ampguard.Amp) -> None:
    for p in masters(amp):
        p.clamp_(-0.05, 0.05)


def begin_anew(amp: ampguard.Amp) -> None:
    nn.init.constant_(model_of(amp).inner.weight, 0.01)


def load_others(amp: ampguard.Amp) -> None:
    model_of(amp).load_state_dict(model_of(made("fp32", seed=7)).state_dict())


WRITES = [clip_model, clip_masters, begin_anew, load_others]


def in_float32(amp: ampguard.Amp) -> nn.Module:
    """What the model is by its own weights."""
    exact = model_of(made("fp32"))
    exact.load_state_dict(model_of(amp).state_dict())
    return exact.eval()


def evaluated(amp: ampguard.Amp, region: contextlib.AbstractContextManager[None] | None = None) -> Tensor:
    model_of(amp).eval()
    with region or torch.no_grad(), amp.autocast():
        output = model_of(amp)(batch(99)[0])
    model_of(amp).train()
    return output


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("eval_precision", [None, "fp32"])
@pytest.mark.parametrize("write", WRITES)
def test_an_evaluation_in_o2_is_of_the_weights_that_were_written(
    write: Write, eval_precision: str | None, region: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """Early stopping: the best weights are loaded and evaluated, and no training step comes between."""
    amp = made("O2", eval_precision=eval_precision)
    train(amp, range(5))
    write(amp)
    found = evaluated(amp, region())
    if write is clip_masters:
        assert all(m.abs().max() <= 0.05 for m in model_of(amp).parameters())
    exact = in_float32(amp)(batch(99)[0])
    torch.testing.assert_close(found.detach(), exact.detach(), rtol=5e-3, atol=5e-3)
    assert torch.equal(found, evaluated(amp))


def test_an_average_that_is_evaluated_in_float32_in_o2_costs_the_masters_nothing() -> None:
    """It stands in the model for the evaluation only."""
    amp = made("O2", eval_precision="fp32")
    train(amp, range(3))
    before, aside = [p.detach().clone() for p in masters(amp)], copy.deepcopy(model_of(amp).state_dict())
    own = evaluated(amp)
    load_others(amp)
    expected = in_float32(amp)(batch(99)[0])
    torch.testing.assert_close(evaluated(amp), expected.detach(), rtol=1e-5, atol=1e-5)
    model_of(amp).load_state_dict(aside)
    assert torch.equal(evaluated(amp), own)
    with amp.autocast():
        model_of(amp)(batch(3)[0])
    assert same(before, [p.detach() for p in masters(amp)])


def test_each_side_of_o2_follows_what_was_written_to_the_other() -> None:
    """One weight is written to in the model, and another by its master."""
    amp = made("O2")
    train(amp, range(2))
    model = model_of(amp)
    held = dict(zip((name for name, _ in model.named_parameters()), masters(amp), strict=True))
    with torch.no_grad():
        model.inner.weight.fill_(0.25)
        held["head.weight"].fill_(0.5)
    with amp.autocast():
        model(batch(0)[0])
    assert set(held["inner.weight"].flatten().tolist()) == {0.25}
    assert set(model.head.weight.flatten().tolist()) == {0.5}


def test_training_in_evaluation_mode_goes_on_from_weights_that_were_written() -> None:
    """In float32, with gradients for the masters of what was written and of what was not."""
    amp = made("O2", eval_precision="fp32")
    train(amp, range(2))
    begin_anew(amp)
    model_of(amp).eval()
    before = [p.detach().clone() for p in masters(amp)]
    train(amp, range(2, 3))
    after = [p.detach() for p in masters(amp)]
    assert all(not torch.equal(b, a) for b, a in zip(before, after, strict=True))
    assert (after[0] - 0.01).abs().max() < 0.02


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_checkpoint_of_o2_holds_what_was_written_to_the_weights(write: Write, accumulate: int) -> None:
    """As a Wasserstein critic does it: clip after the step, then save."""
    whole = made("O2", accumulate=accumulate)
    train(whole, range(3))
    write(whole)
    state = copy.deepcopy(whole.state_dict())
    weights, held = state["models"]["Net"].values(), state["mode"]["masters"]
    if write in (clip_model, clip_masters):
        assert all(t.abs().max() <= 0.05 for t in held)
        assert max(t.abs().max() for t in weights if t.dtype == torch.float16 and t.isfinite().all()) <= 0.05
    losses = train(whole, range(3, 7))
    resumed = made("O2", seed=3, accumulate=accumulate)
    train(resumed, range(1))
    resumed.load_state_dict(state)
    assert train(resumed, range(3, 7)) == losses
    assert same(masters(whole), masters(resumed))


def test_saving_while_an_average_stands_in_the_model_costs_o2s_masters_nothing() -> None:
    amp = made("O2")
    train(amp, range(3))
    before, aside = [p.detach().clone() for p in masters(amp)], copy.deepcopy(model_of(amp).state_dict())
    load_others(amp)
    saved = copy.deepcopy(amp.state_dict())
    model_of(amp).load_state_dict(aside)
    with amp.autocast():
        model_of(amp)(batch(3)[0])
    assert same(before, [p.detach() for p in masters(amp)])
    again = made("O2")
    again.load_state_dict(saved)
    others = model_of(made("fp32", seed=7)).inner.weight
    assert torch.equal(model_of(again).inner.weight, others.half())


@pytest.mark.parametrize("spoil", [None, float("nan")])
@pytest.mark.parametrize("mode", ["fp16", "O2", "O3", "bf16-true"])
def test_a_write_between_backward_and_step_is_what_the_step_begins_from(mode: str, spoil: float | None) -> None:
    amp = made(mode)
    train(amp, range(2))
    amp.backward(loss_of(amp, 2, spoil))
    weight = model_of(amp).inner.weight
    with torch.no_grad():
        weight.fill_(0.5)
    result = amp.step()
    assert result.skipped == (spoil is not None)
    assert torch.equal(weight, torch.full_like(weight, 0.5)) == result.skipped
    torch.testing.assert_close(weight, torch.full_like(weight, 0.5), rtol=0, atol=0.02)
    torch.testing.assert_close(masters(amp)[0].float(), weight.float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("spoil", [None, float("nan")])
def test_a_write_between_backward_and_step_of_a_loop_of_ones_own_in_o2(spoil: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    chosen = ampguard.precision("O2", "cpu")
    chosen.prepare(model, optimizer)
    x, y = batch(0)
    with chosen.autocast():
        loss = nn.functional.mse_loss(model(x), y) * (spoil or 1e-3)  # so small that the first loss scale fits
    chosen.scaler.scale(loss).backward()
    with torch.no_grad():
        model.weight.fill_(0.5)
    chosen.scaler.step(optimizer)
    chosen.scaler.update()
    assert torch.equal(model.weight, torch.full_like(model.weight, 0.5)) == (spoil is not None)
    torch.testing.assert_close(model.weight, torch.full_like(model.weight, 0.5), rtol=0, atol=0.1)


@pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")
@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_a_checkpoint_inside_an_evaluation_in_float32_is_of_the_weights_that_train(
    mode: str, region: Callable[[], contextlib.AbstractContextManager[None]], tmp_path: Path
) -> None:
    """`if accuracy > best: amp.save(path)`, one indentation too deep. The evaluation goes on as it began."""
    amp = made(mode, eval_precision="fp32")
    train(amp, range(3))
    seal = amp.state_dict()["seal"]
    model_of(amp).eval()
    with region(), amp.autocast():
        before = model_of(amp)(batch(99)[0])
        amp.save(tmp_path / "best.pt")
        amp.save_sharded(tmp_path / "sharded")
        assert amp.state_dict()["seal"] == seal
        assert {p.dtype for p in model_of(amp).parameters()} == {torch.float32}
        assert torch.equal(model_of(amp)(batch(99)[0]), before)
    assert model_of(amp).inner.weight.dtype == amp.mode.weights_dtype
    assert amp.state_dict()["seal"] == seal
    for load in ("load", "load_sharded"):
        again = made(mode, seed=3, eval_precision="fp32")
        getattr(again, load)(tmp_path / ("best.pt" if load == "load" else "sharded"))
        assert torch.equal(evaluated(again), before)


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_what_is_loaded_inside_an_evaluation_in_float32_is_evaluated(mode: str) -> None:
    amp, other = made(mode, eval_precision="fp32"), made(mode, seed=3, eval_precision="fp32")
    train(other, range(2))
    expected, state = evaluated(other), copy.deepcopy(other.state_dict())
    model_of(amp).eval()
    with torch.no_grad(), amp.autocast():
        assert not torch.equal(model_of(amp)(batch(99)[0]), expected)
        amp.load_state_dict(state)
        assert torch.equal(model_of(amp)(batch(99)[0]), expected)
    assert amp.state_dict()["seal"] == state["seal"]


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_an_evaluation_inside_an_evaluation_in_float32(mode: str) -> None:
    amp = made(mode, eval_precision="fp32")
    parameters = list(model_of(amp).parameters())
    model_of(amp).eval()
    with torch.no_grad(), amp.autocast():
        before = model_of(amp)(batch(99)[0])
        with amp.autocast():
            assert {p.dtype for p in parameters if p.dtype != torch.float32} == {amp.mode.weights_dtype}
            assert torch.equal(model_of(amp)(batch(99)[0]), before)
        assert torch.equal(model_of(amp)(batch(99)[0]), before)
    assert all(a is b for a, b in zip(model_of(amp).parameters(), parameters, strict=True))


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["fp16", "O2", "O3", "bf16-true"])
def test_what_is_written_inside_an_evaluation_in_float32_stays(
    mode: str, region: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    amp = made(mode, eval_precision="fp32")
    train(amp, range(2))
    others = model_of(made("fp32", seed=7))
    model_of(amp).eval()
    with region(), amp.autocast():
        model_of(amp).load_state_dict(others.state_dict())
        expected = model_of(amp)(batch(99)[0])
    written = {name: value.clone() for name, value in model_of(amp).state_dict().items()}
    for name, value in others.state_dict().items():
        assert torch.equal(written[name], value.to(written[name].dtype)), name
    torch.testing.assert_close(evaluated(amp), expected, rtol=2e-2, atol=2e-2)
    saved = copy.deepcopy(amp.state_dict())
    train(amp, range(2, 3))
    assert (masters(amp)[0] - others.inner.weight).abs().max() < 0.03
    again = made(mode, eval_precision="fp32")
    again.load_state_dict(saved)
    train(again, range(2, 3))
    assert same(masters(amp), masters(again))


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_a_parameter_assigned_inside_an_evaluation_in_float32_is_a_value_of_the_models_own(mode: str) -> None:
    amp = made(mode, eval_precision="fp32")
    parameters = list(model_of(amp).parameters())
    others = model_of(made("fp32", seed=7))
    model_of(amp).eval()
    with torch.no_grad(), amp.autocast():
        model_of(amp).inner.weight = nn.Parameter(others.inner.weight.detach().clone())
    assert model_of(amp).inner.weight is parameters[0]
    assert torch.equal(parameters[0], others.inner.weight.to(parameters[0].dtype))


@pytest.mark.parametrize("mode", ["O2", "O3"])
def test_a_weight_beyond_float16_that_is_written_inside_an_evaluation_is_the_models_own(mode: str) -> None:
    amp = made(mode, eval_precision="fp32")
    weight = model_of(amp).inner.weight
    model_of(amp).eval()
    with torch.no_grad(), amp.autocast():
        model_of(amp).inner.weight.fill_(1e5)
    assert model_of(amp).inner.weight is weight
    assert weight.isinf().all()


def test_an_average_that_stands_in_the_model_inside_an_evaluation_in_float32_costs_nothing() -> None:
    """Put in its place and taken out of it again inside the block."""
    amp = made("O2", eval_precision="fp32")
    train(amp, range(3))
    before = [p.detach().clone() for p in masters(amp)]
    model_of(amp).eval()
    with torch.no_grad(), amp.autocast():
        aside = [p.clone() for p in model_of(amp).parameters()]
        clip_model(amp)
        model_of(amp)(batch(99)[0])
        for p, old in zip(model_of(amp).parameters(), aside, strict=True):
            p.copy_(old)
    with amp.autocast(training=True):
        model_of(amp)(batch(3)[0])
    assert same(before, [p.detach() for p in masters(amp)])


@pytest.mark.parametrize("mode", ["O2", "O3"])
def test_what_is_written_to_a_scripted_module_inside_an_evaluation_in_float32_stays(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = ampguard.Amp(model, optimizer, mode, eval_precision="fp32", init_scale=64.0)
    model.eval()
    with torch.no_grad(), amp.autocast():
        model[0].weight.fill_(0.3)
        inside = model(batch(0)[0])
    assert torch.equal(model[0].weight, torch.full((1, 8), 0.3, dtype=torch.float16))
    with torch.no_grad(), amp.autocast():
        torch.testing.assert_close(model(batch(0)[0]), inside, rtol=1e-3, atol=1e-3)
    assert amp.state_dict()["models"]["Sequential"]["0.weight"].dtype == torch.float16
