"""What the drop-ins cannot be given: an error of our own says what it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ampguard
from ampguard.errors import CheckpointError, LossError, PrecisionError, ProtocolError, SetupError
from ampguard.integrations.d2 import AMPTrainer
from ampguard.integrations.hf import prepare
from ampguard.integrations.timm import NativeScaler, NativeScalerWithGradNormCount


@pytest.mark.parametrize("scaler_class", [NativeScaler, NativeScalerWithGradNormCount])
def test_native_scalers(scaler_class: type) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 4)).mean()
    scaler = scaler_class()
    with pytest.raises(LossError, match="needs no gradient"):
        scaler(loss.detach(), optimizer)
    with pytest.raises(LossError, match=r"the scaler takes a loss tensor, not a float\n.*loss\.item"):
        scaler(loss.item(), optimizer)
    with pytest.raises(SetupError, match="a NoneType is no optimizer"):
        scaler(loss, None)
    assert scaler(loss, optimizer) > 0


def test_an_optimizer_that_computes_its_losses_itself() -> None:
    """No call of these takes a closure: the way out is another."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(
        SetupError, match=r"(?s)`LBFGS` computes the loss several times.*amp\.step\(optimizer, closure\)"
    ):
        NativeScaler(precision="bf16")(model(torch.ones(2, 4)).mean(), optimizer)
    assert model.weight.grad is None
    with pytest.raises(SetupError, match="AMPTrainer is given one loss a step"):
        AMPTrainer(model, [], optimizer)


def test_a_step_of_the_optimizer_itself_inside_a_window() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = NativeScaler()
    scaler(model(torch.ones(2, 4)).mean() / 2, optimizer, need_update=False)
    before = model.weight.detach().clone()
    with pytest.raises(ProtocolError, match=r"`SGD` with gradients that are 65536 times too large") as caught:
        optimizer.step()
    assert caught.value.cause == "bypassed-scaler"
    assert torch.equal(model.weight, before)
    scaler(model(torch.ones(2, 4)).mean() / 2, optimizer)  # the window goes on
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_of_the_optimizer_itself_on_gradients_of_its_own(in_place: bool) -> None:
    """The window was given up, or is over: these carry no scale."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = NativeScaler()
    for ends in (False, True):
        scaler(model(torch.ones(2, 4)).mean() / 2, optimizer, need_update=ends)
        optimizer.zero_grad(set_to_none=not in_place)
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_prepare_of_a_model() -> None:
    with pytest.raises(SetupError, match="takes an Accelerator or a transformers Trainer, not a Linear"):
        prepare(nn.Linear(4, 1))


def test_a_device_that_is_none() -> None:
    pytest.importorskip("lightning")
    from ampguard.integrations.lightning import GuardedPrecision

    with pytest.raises(PrecisionError, match="'gpu' is no device"):
        GuardedPrecision("16-mixed", "gpu")


@pytest.mark.parametrize("limit", [-1.0, float("nan"), "5"])
def test_a_limit_that_is_none(limit: object) -> None:
    """A negative one would turn every gradient round."""
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    with pytest.raises(SetupError, match=r"clip_grad=.*: a number above 0"):
        NativeScaler()(model(torch.ones(2, 4)).mean(), torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=limit)
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [(nn.Linear(2, 2).parameters(), r"`SGD` updates none of the 2 given"), ([], "parameters= is empty")],
)
def test_parameters_that_the_optimizer_does_not_update(parameters: object, says: str) -> None:
    """Clipping all that it does update instead would be a guess."""
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    with pytest.raises(SetupError, match=says):
        NativeScaler()(
            model(torch.ones(2, 4)).mean(), torch.optim.SGD(model.parameters(), lr=0.1), 1.0, "norm", parameters
        )
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("patience", [0, -1, 2.5])
def test_a_patience_that_is_none(patience: float) -> None:
    with pytest.raises(SetupError, match="a whole number of skipped steps in a row, at least 1; None: never"):
        NativeScaler(patience=patience)


def test_float16_weights_are_refused_as_by_pytorch() -> None:
    model = nn.Linear(4, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PrecisionError, match=r"\[fp16-parameters\]"):
        NativeScaler()(model(torch.ones(2, 4).half()).float().mean(), optimizer)
    amp = ampguard.precision("O3", "cpu")  # whose weights they are meant to be
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.prepare(model, optimizer)
    with amp.autocast():
        loss = model(torch.ones(2, 4)).mean()
    assert NativeScaler(precision=amp)(loss, optimizer) > 0


class Losses(nn.Module):
    """Returns what it is given to return."""

    def __init__(self, returned: object = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.returned = returned

    def forward(self, data: object) -> object:
        return self.layer(torch.ones(3, 2)) if self.returned is None else self.returned


def trainer_of(model: nn.Module) -> AMPTrainer:
    return AMPTrainer(model, iter([1, 2]), torch.optim.SGD(model.parameters(), lr=0.1))


def test_trainers_say_what_they_take() -> None:
    model = Losses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SetupError, match="optimizer: a type is none"):
        AMPTrainer(model, [], torch.optim.SGD)
    with pytest.raises(SetupError, match="model: a NoneType is none"):
        AMPTrainer(None, [], optimizer)
    with pytest.raises(SetupError, match="the config says nothing of mixed precision"):
        AMPTrainer.from_config({"SOLVER": {}}, model, [], optimizer)
    with pytest.raises(CheckpointError, match="it holds no 'optimizer'"):
        trainer_of(model).load_state_dict({"iteration": 3})
    trainer = trainer_of(model)
    model.eval()
    with pytest.raises(SetupError, match=r"model\.train\(\) after the evaluation"):
        trainer.run_step()


@pytest.mark.parametrize(
    ("returned", "says"),
    [(None, r"shape \(3, 2\)"), ([1.0], "a loss or a dictionary of losses"), ({}, "a loss or a dictionary of losses")],
)
def test_trainers_take_a_loss(returned: object, says: str) -> None:
    with pytest.raises(LossError, match=says):
        trainer_of(Losses(returned)).run_step()


@pytest.mark.parametrize("state", [None, {"a": 1}, {"scale": -1.0}, {"scale": float("nan")}, {"scale": 1e39}])
def test_a_state_that_is_none(state: object) -> None:
    scaler = NativeScaler()
    before = scaler.state_dict()
    with pytest.raises(CheckpointError, match="the loss scale was not loaded"):
        scaler.load_state_dict({**before, **state} if state and "scale" in state else state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("scale", [0, -1.0, 1e39, float("nan"), "x"])
def test_an_initial_scale_that_is_none(scale: object) -> None:
    with pytest.raises(SetupError, match="init_scale="):
        NativeScaler(init_scale=scale)


def test_a_scaler_that_is_none() -> None:
    pytest.importorskip("lightning")
    from ampguard.integrations.lightning import GuardedPrecision

    with pytest.raises(SetupError, match="a str is no GradScaler"):
        GuardedPrecision("16-mixed", "cpu", scaler="x")


def test_a_device_of_a_native_scaler_that_is_none() -> None:
    with pytest.raises(PrecisionError, match="'zz' is no device"):
        NativeScaler("zz")


def test_a_config_that_says_false_in_quotes() -> None:
    config = SimpleNamespace(SOLVER=SimpleNamespace(AMP=SimpleNamespace(ENABLED="False")))
    model = Losses()
    with pytest.raises(SetupError, match="the text 'False'"):
        AMPTrainer.from_config(config, model, [], torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_precision_that_only_amp_has_is_not_to_be_prepared() -> None:
    with pytest.raises(PrecisionError, match=r"'bf16-true'.*\n  do    use ampguard\.Amp\(.*precision='bf16-true'\)$"):
        NativeScaler(precision="bf16-true")
    with pytest.raises(PrecisionError, match=r"ampguard\.precision\('O2'\); p\.prepare"):
        NativeScaler(precision="O2")
