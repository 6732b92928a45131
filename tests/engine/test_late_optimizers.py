"""An optimizer made over a model that O2 has cast holds weights that get no gradient: an error of our own, with what to do."""

from __future__ import annotations

import pickle

import pytest
import torch
from engine_loops import Net, batch
from torch import nn

import ampguard
from ampguard.errors import SetupError
from ampguard.integrations.timm import NativeScaler


def cast() -> tuple[Net, torch.optim.Optimizer, ampguard.engine.own_loop.LoopPrecision]:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    chosen = ampguard.precision("O2", "cpu")
    chosen.prepare(model, optimizer)
    chosen.scaler.load_state_dict({**chosen.scaler.state_dict(), "scale": 1024.0})
    return model, optimizer, chosen


def loss_of(model: Net, chosen: ampguard.engine.own_loop.LoopPrecision) -> torch.Tensor:
    x, y = batch(0)
    with chosen.autocast():
        return nn.functional.mse_loss(model(x), y)


def test_the_scaler_refuses_it_before_anything_has_changed() -> None:
    """PyTorch's words were "No inf checks were recorded for this optimizer"."""
    model, optimizer, chosen = cast()
    late = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    chosen.scaler.scale(loss_of(model, chosen)).backward()
    with pytest.raises(SetupError, match="make every optimizer from the float32 model"):
        chosen.scaler.step(late)
    assert all(map(torch.equal, before, model.parameters()))
    chosen.scaler.step(optimizer)
    chosen.scaler.update()
    assert not all(map(torch.equal, before, model.parameters()))


def test_its_own_step_refuses() -> None:
    """It would change nothing, silently."""
    model, _, _ = cast()
    late = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(SetupError, match="O2 has cast"):
        late.step()


def test_beside_an_amp() -> None:
    model = Net(dropout=0.0)
    ampguard.Amp(model, torch.optim.AdamW(model.parameters(), 1e-2), precision="O2")
    with pytest.raises(SetupError, match="O2 has cast"):
        torch.optim.SGD(model.parameters(), 0.1).step()


def test_the_drop_in_scaler_refuses_it_before_the_backward_pass() -> None:
    model, optimizer, chosen = cast()
    scaler = NativeScaler(precision=chosen)
    with pytest.raises(SetupError, match="O2 has cast"):
        scaler(loss_of(model, chosen), torch.optim.SGD(model.parameters(), 0.1))
    assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
    scaler(loss_of(model, chosen), optimizer)


def test_weights_added_to_the_optimizer_later() -> None:
    model, optimizer, _ = cast()
    optimizer.step()
    optimizer.add_param_group({"params": [next(p for p in model.parameters() if p.dtype == torch.float16)]})
    with pytest.raises(SetupError, match="1 of the"):
        optimizer.step()


def test_what_it_may_hold() -> None:
    """Another model's weights, averages of the model's, and norms, which O2 leaves in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    chosen = ampguard.precision("O2", "cpu")
    chosen.prepare(model, torch.optim.SGD(model[0].parameters(), 0.1))
    average = torch.optim.swa_utils.AveragedModel(model)
    for module in (Net(), average, model[1]):
        torch.optim.SGD(module.parameters(), 0.1).step()


def test_the_scaler_is_a_grad_scaler_that_can_be_pickled() -> None:
    _, _, chosen = cast()
    assert isinstance(pickle.loads(pickle.dumps(chosen.scaler)), torch.amp.GradScaler)
