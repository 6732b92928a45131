"""The optimizer's parameters change under way: parts are added, replaced, taken out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_loops import batch
from torch import nn

import ampguard
from ampguard.errors import ProtocolError, SetupError

Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def model_and_optimizer() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def new_head(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model[2] = nn.Linear(16, 1)
    optimizer.param_groups[1]["params"] = list(model[2].parameters())


def one_weight(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    weight = nn.Parameter(model[2].weight.detach().clone() / 2)
    model[2].weight = optimizer.param_groups[1]["params"][0] = weight


def freeze_trunk(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(False)
    optimizer.param_groups.pop(0)


def grow(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(2)
    model.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": model[3].parameters()})


def amp_steps(amp: ampguard.Amp, model: nn.Module, numbers: range) -> None:
    for number in numbers:
        x, y = batch(number)
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x).float(), y)
        amp.backward(loss)
        amp.step()


def trained(mode: str, change: Change) -> nn.Module:
    model, optimizer = model_and_optimizer()
    amp = ampguard.Amp(model, optimizer, mode, init_scale=256.0)
    amp_steps(amp, model, range(3))
    change(model, optimizer)
    amp_steps(amp, model, range(3, 6))
    return model


def trained_plainly(change: Change) -> nn.Module:
    model, optimizer = model_and_optimizer()
    for number in range(6):
        if number == 3:
            change(model, optimizer)
        x, y = batch(number)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("change", [new_head, one_weight, freeze_trunk, grow])
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_other_parameters_learn_as_in_a_plain_loop(mode: str, change: Change) -> None:
    ours, plain = trained(mode, change).state_dict(), trained_plainly(change).state_dict()
    tolerance = 1e-6 if mode == "fp32" else 2e-2
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
@pytest.mark.parametrize("change", [new_head, one_weight, grow])
def test_cast_models_get_no_new_parameters(mode: str, change: Change) -> None:
    with pytest.raises(SetupError, match=r"parameters were added to `SGD`, or replaced in it, after Amp was made"):
        trained(mode, change)


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_parameters_may_be_taken_out_of_a_cast_model(mode: str) -> None:
    ours, plain = trained(mode, freeze_trunk).state_dict(), trained_plainly(freeze_trunk).state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name].float(), value, rtol=5e-2, atol=2e-2)


def test_parameters_of_no_model_cannot_be_added() -> None:
    def add_stranger(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    with pytest.raises(SetupError, match=r"1 of 5 parameters of `SGD` \(shapes \(3,\)\) belong to none of the models"):
        trained("fp16", add_stranger)


@pytest.mark.parametrize("mode", ["fp32", "fp16", "O2", "bf16-true"])
def test_a_model_whose_parameters_the_optimizer_does_not_have_any_more(mode: str) -> None:
    """PyTorch alone would say nothing, and train nothing."""

    def assign(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True)

    with pytest.raises(SetupError, match="belong to none of the models"):
        trained(mode, assign)


def test_what_was_added_is_named() -> None:
    model, optimizer = model_and_optimizer()
    amp = ampguard.Amp(model, optimizer, "fp32")
    amp_steps(amp, model, range(1))
    grow(model, optimizer)
    amp_steps(amp, model, range(1, 2))
    assert amp.name_of(model[3].weight) == "3.weight"


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_a_resumed_run_may_add_parameters_before_it_loads(mode: str) -> None:
    model, optimizer = model_and_optimizer()
    amp = ampguard.Amp(model, optimizer, mode, init_scale=256.0)
    amp_steps(amp, model, range(3))
    grow(model, optimizer)
    amp_steps(amp, model, range(3, 4))
    state = amp.state_dict()

    other, its_optimizer = model_and_optimizer()
    resumed = ampguard.Amp(other, its_optimizer, mode, init_scale=256.0)
    grow(other, its_optimizer)
    resumed.load_state_dict(state)
    amp_steps(amp, model, range(4, 6))
    amp_steps(resumed, other, range(4, 6))
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def head_of_another(model: nn.Sequential) -> None:
    torch.manual_seed(1)
    model[2] = nn.Linear(16, 1)


def test_a_layer_that_is_replaced_and_in_no_optimizer_is_refused() -> None:
    """It would get gradients in every step, and never move."""
    model, optimizer = model_and_optimizer()
    amp = ampguard.Amp(model, optimizer, init_scale=256.0)
    amp_steps(amp, model, range(3))
    head_of_another(model)
    before = model[0].weight.detach().clone()
    with pytest.raises(ProtocolError, match=r"`2\.weight`, `2\.bias` .* no optimizer holds them") as caught:
        amp_steps(amp, model, range(3, 4))
    assert caught.value.cause == "stale-parameters"
    assert torch.equal(model[0].weight, before)


def test_without_a_loss_scale_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer of the loop's own may update it."""
    model, optimizer = model_and_optimizer()
    amp = ampguard.Amp(model, optimizer, "bf16")
    amp_steps(amp, model, range(3))
    head_of_another(model)
    amp_steps(amp, model, range(3, 8))
    assert caplog.text.count("no optimizer holds") == 1


def test_what_is_taken_out_of_the_model_is_let_be(caplog: pytest.LogCaptureFixture) -> None:
    """An auxiliary head that is dropped half-way gets no gradient, and nothing has come in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 1))
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), 0.05), init_scale=256.0)
    amp_steps(amp, model, range(2))
    del model[1]
    amp_steps(amp, model, range(2, 5))
    assert not caplog.text


def test_the_last_of_many_layers_is_glanced_at() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Linear(8, 8, bias=False) for _ in range(150)), nn.Linear(8, 1))
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), 1e-6), init_scale=1.0)
    amp_steps(amp, model, range(1))
    model[151] = nn.Linear(8, 1, bias=False)
    with pytest.raises(ProtocolError, match=r"`151\.weight`"):
        amp_steps(amp, model, range(1, 2))


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_a_layer_that_came_after_the_cast_is_named(mode: str) -> None:
    model, optimizer = model_and_optimizer()
    amp = ampguard.Amp(model, optimizer, mode)
    x, _ = batch(0)
    with pytest.raises(RuntimeError, match="shape"), amp.autocast():  # other errors stay as they are
        model(x[:, :3])
    model[2] = nn.Linear(16, 1)
    said = r"(?s)`2\.weight`, `2\.bias`: in the model since Amp.*same dtype.*before"
    with pytest.raises(SetupError, match=said), amp.autocast():
        model(x)


@pytest.mark.parametrize("clears", ["amp", "optimizer"])
def test_a_layer_that_is_added_with_gradients(clears: str) -> None:
    """It was unfrozen, and reached by a loss, before the optimizer was given it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    amp = ampguard.Amp(model, optimizer, init_scale=256.0)

    def step() -> ampguard.StepResult:
        with amp.autocast():
            loss = model(torch.randn(4, 6)).square().mean()
        amp.backward(loss)
        return amp.step()

    step()
    model[0].requires_grad_(True)
    step()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(ProtocolError, match=r"given parameters that hold gradients already(.|\n)*amp\.zero_grad\(\)"):
        step()
    (amp if clears == "amp" else optimizer).zero_grad()
    before = model[0].weight.detach().clone()
    assert step().stepped
    assert not torch.equal(before, model[0].weight)
    model(torch.randn(4, 6)).square().mean().backward()  # and this is another error
    with pytest.raises(ProtocolError, match=r"which amp\.backward\(\) did not make"):
        step()


def test_what_was_added_is_cleared_with_the_rest() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    amp = ampguard.Amp(model, optimizer, "fp32")
    amp.backward(model(torch.randn(4, 6)).square().mean())
    optimizer.add_param_group({"params": list(model[0].parameters())})
    amp.zero_grad()
    assert all(p.grad is None for p in model.parameters())
