"""Weights that are in a low precision already, optimizers that are given twice or grow."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_loops import Net, batch, made, model_of, same, train
from torch import nn

import ampguard
from ampguard.errors import PrecisionError, SetupError


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16"])
def test_float16_weights_under_autocast_are_refused(mode: str) -> None:
    model = nn.Linear(8, 1).half()
    with pytest.raises(
        PrecisionError, match=rf"float16 weights, precision '{mode}' needs float32 ones.*fp16-parameters"
    ):
        ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), mode)


def test_frozen_float16_weights_are_fine() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 1)
    amp = ampguard.Amp([body, head], torch.optim.SGD(head.parameters(), lr=0.1), "fp16", init_scale=64.0)
    with amp.autocast():
        loss = head(body(batch(0)[0])).float().square().mean()
    amp.backward(loss)
    assert amp.step().stepped


def test_bfloat16_weights_under_autocast_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 1).bfloat16()
    ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    assert "precision='bf16-true' does not" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_a_converted_model_belongs_to_its_amp(mode: str) -> None:
    amp = made(mode)
    with pytest.raises(SetupError, match="`Net` was changed by an Amp before"):
        ampguard.Amp(model_of(amp), amp.optimizers["AdamW"], mode)
    train(amp, range(2))
    assert amp.steps == 2


def test_an_amp_may_be_made_anew_over_float32_weights() -> None:
    amp = made("fp16")
    train(amp, range(2))
    amp.backward(amp_loss(amp))
    again = ampguard.Amp(model_of(amp), amp.optimizers["AdamW"], "fp16", init_scale=1024.0)
    again.zero_grad()
    train(again, range(3))
    assert again.steps == 3


def amp_loss(amp: ampguard.Amp) -> torch.Tensor:
    with amp.autocast():
        return model_of(amp)(batch(0)[0]).float().square().mean()


@pytest.mark.parametrize("mode", ["fp16", "O3"])
def test_an_evaluation_that_needs_other_weights_is_refused(mode: str) -> None:
    with pytest.raises(PrecisionError, match=r"eval_precision='O2' needs torch.float16 weights, the training mode"):
        made(mode, eval_precision="O2")


def test_parameters_may_be_added_where_weights_are_float32() -> None:
    torch.manual_seed(0)
    model = Net()
    model.inner.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.head.parameters(), *model.norm.parameters()], lr=1e-2)
    amp = ampguard.Amp(model, optimizer, "fp16", init_scale=1024.0)
    train(amp, range(2))
    model.inner.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.inner.parameters())})
    before = model.inner.weight.detach().clone()
    train(amp, range(2, 4))
    assert not torch.equal(before, model.inner.weight)
    assert amp.steps == 4


def test_parameters_cannot_be_added_to_a_converted_model() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    amp = ampguard.Amp(model, optimizer, "O2", init_scale=1024.0)
    train(amp, range(1))
    optimizer.add_param_group({"params": list(model.inner.parameters())})
    with pytest.raises(SetupError, match="added to `AdamW`, or replaced in it, after Amp was made"):
        train(amp, range(1, 2))


def test_a_loss_that_holds_gradients() -> None:
    """A gradient penalty: differentiated twice."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    amp = ampguard.Amp(critic, torch.optim.Adam(critic.parameters(), lr=1e-2), "fp16", init_scale=256.0)
    penalties = []
    for number in range(20):
        x = batch(number)[0].requires_grad_()
        with amp.autocast():
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = (slope.norm(dim=1) - 1).square().mean()
        amp.backward(loss)
        assert amp.step().stepped
        penalties.append(loss.item())
    assert penalties[-1] < 0.5 * penalties[0]


def test_many_parameters_of_which_few_are_reached() -> None:
    """More tensors than are glanced at, of which the loss reaches one that is not."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(200)])
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.5), "fp16", init_scale=64.0)
    for index in (1, 2, 197):
        amp.backward(model[index].sum())
        assert amp.step().stepped
        assert model[index].item() == 0.5


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_an_evaluation_in_float32_leaves_the_parameters_nodes_alone(mode: str) -> None:
    """DistributedDataParallel hangs on them: with new ones, ranks would go on without averaging their gradients."""
    amp = made(mode, eval_precision="fp32")
    parameters = list(model_of(amp).parameters())
    nodes = [gradient_node(p) for p in parameters]
    model_of(amp).eval()
    for _ in range(2):
        with torch.no_grad(), amp.autocast():
            assert {p.dtype for p in model_of(amp).parameters()} == {torch.float32}
            model_of(amp)(batch(0)[0])
    assert all(gradient_node(p) is node for p, node in zip(parameters, nodes, strict=True))
    assert all(mine is p for mine, p in zip(model_of(amp).parameters(), parameters, strict=True))


def gradient_node(parameter: torch.Tensor) -> object:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_training_a_model_in_evaluation_mode_reaches_its_weights(mode: str) -> None:
    """Statistics that are frozen by `model.eval()`, with an evaluation precision: its loss trains all the same."""
    amp = made(mode, eval_precision="fp32")
    model_of(amp).eval()
    before = [p.detach().clone() for p in model_of(amp).parameters()]
    train(amp, range(3))
    assert amp.steps == 3
    assert not same(before, [p.detach() for p in model_of(amp).parameters()])


def test_an_evaluation_in_float32_of_a_recurrent_and_a_scripted_model() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.LSTM(8, 8), "head": torch.jit.script(nn.Linear(8, 1))})
    model.forward = lambda x: model["head"](model["rnn"](x)[0])  # type: ignore[method-assign]
    x = batch(0)[0]
    expected = model(x)
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", eval_precision="fp32")
    model.eval()
    with torch.no_grad(), amp.autocast():
        found = model(x)
    torch.testing.assert_close(found[..., 0], expected.detach()[..., 0], rtol=1e-3, atol=1e-3)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_float64_weights_are_not_given_low_inputs(mode: str) -> None:
    model = nn.Linear(8, 1).double()
    with pytest.raises(PrecisionError, match=r"those of `Linear` are torch\.float64"):
        ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), mode)


@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp32"])
def test_float64_weights_under_autocast_are_warned_of(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 1).double()
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), mode)
    with amp.autocast():
        output = model(batch(0)[0].double())
    assert output.dtype == torch.float64
    warned = ["all weights of `Linear` are float64" in line for line in caplog.messages]
    assert warned == ([] if mode == "fp32" else [True])


def o2_of(model: nn.Module, **options: object) -> tuple[ampguard.Amp, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ampguard.Amp(model, optimizer, "O2", init_scale=64.0, **options), optimizer


def step_on(amp: ampguard.Amp, model: nn.Module, number: int) -> None:
    x, y = batch(number)
    with amp.autocast():
        loss = nn.functional.mse_loss(model(x), y)
    amp.backward(loss)
    assert amp.step().stepped


def test_weights_that_are_loaded_or_clipped_in_o2_are_those_that_train_on() -> None:
    """As in float32: what was written to the model is not undone by the next step."""
    torch.manual_seed(0)
    model, exact, other = nn.Linear(8, 1), nn.Linear(8, 1), nn.Linear(8, 1)
    amp, optimizer = o2_of(model)
    plain = torch.optim.SGD(exact.parameters(), lr=0.1)
    for one in (model, exact):
        one.load_state_dict(other.state_dict())
    for number in range(5):
        step_on(amp, model, number)
        x, y = batch(number)
        plain.zero_grad()
        nn.functional.mse_loss(exact(x), y).backward()
        plain.step()
        with torch.no_grad():
            for one in (model, exact):
                one.weight.clamp_(-0.2, 0.2)
    torch.testing.assert_close(model.weight.float(), exact.weight, rtol=2e-3, atol=1e-3)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    torch.testing.assert_close(held[1], exact.bias, rtol=2e-3, atol=1e-3)


def test_weights_that_are_put_aside_and_back_in_o2_lose_nothing() -> None:
    """An average in the model's place for an evaluation: the masters keep what float16 does not hold."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    amp, optimizer = o2_of(model)
    step_on(amp, model, 0)
    masters = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    aside = [p.detach().clone() for p in model.parameters()]
    model.eval()
    with torch.no_grad(), amp.autocast():
        for p in model.parameters():
            p.mul_(0.5)
        model(batch(0)[0])
        for p, old in zip(model.parameters(), aside, strict=True):
            p.copy_(old)
    model.train()
    with amp.autocast():
        model(batch(1)[0])
    assert same(masters, [p for group in optimizer.param_groups for p in group["params"]])


def test_a_step_up_the_masters_in_o2_is_seen_by_the_model() -> None:
    """Sharpness-aware minimisation perturbs what the optimizer holds, and computes the loss there."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    amp, optimizer = o2_of(model)
    step_on(amp, model, 0)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.add_(1.0)
    before = model.weight.detach().clone()
    with amp.autocast():
        model(batch(1)[0])
    torch.testing.assert_close(model.weight, before + 1, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["fp32", "fp16", "O2", "bf16-true"])
def test_parameters_that_are_frozen_at_first_learn_later(mode: str) -> None:
    """And others are frozen instead: the loss reaches only what was not among those that learnt."""
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = ampguard.Amp(model, optimizer, mode, init_scale=64.0)
    for number in range(4):
        if number == 2:
            body.requires_grad_(True)
            head.requires_grad_(False)
        before = [body.weight.detach().clone(), head.weight.detach().clone()]
        step_on(amp, model, number)
        assert [torch.equal(b.weight, w) for b, w in zip((body, head), before, strict=True)] == [
            number < 2,
            number >= 2,
        ]
