"""Optimizers that compute the loss themselves."""

from __future__ import annotations

import pytest
import torch
from engine_loops import Net, batch
from torch import Tensor, nn

import ampguard
from ampguard.errors import LossError, ProtocolError, SetupError


def lbfgs(precision: str, **options: object) -> tuple[ampguard.Amp, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    return ampguard.Amp(model, optimizer, precision, **options), model, optimizer


def closure_of(amp: ampguard.Amp, model: nn.Module, optimizer: torch.optim.Optimizer, spoil: float | None = None):
    x, y = batch(0)
    if spoil is not None:
        x[0, 0] = spoil

    def closure() -> Tensor:
        optimizer.zero_grad()
        with amp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        amp.backward(loss)
        return loss

    return closure


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lbfgs_learns(precision: str) -> None:
    amp, model, optimizer = lbfgs(precision)
    closure = closure_of(amp, model, optimizer)
    first = float(closure().detach())
    amp.zero_grad()
    for _ in range(5):
        result = amp.step(optimizer, closure)
        assert result.stepped
        assert result.grad_norm > 0
    assert float(closure().detach()) < 0.2 * first


def test_gradients_do_not_add_up_over_evaluations() -> None:
    """Nor with those that were there before."""
    found = []
    for clears in (True, False):
        amp, model, optimizer = lbfgs("fp32")
        x, y = batch(0)

        def closure(amp=amp, model=model, optimizer=optimizer, clears=clears, x=x, y=y) -> Tensor:
            if clears:
                optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            amp.backward(loss)
            return loss

        if not clears:
            closure()
        for _ in range(3):
            assert amp.step(optimizer, closure).stepped
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))


def test_a_step_that_is_not_finite_is_undone() -> None:
    amp, model, optimizer = lbfgs("fp32")
    amp.step(optimizer, closure_of(amp, model, optimizer))
    weights = [p.detach().clone() for p in model.parameters()]
    history = len(optimizer.state_dict()["state"][0]["old_dirs"])
    result = amp.step(optimizer, closure_of(amp, model, optimizer, spoil=float("nan")))
    assert result.skipped
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert len(optimizer.state_dict()["state"][0]["old_dirs"]) == history
    assert amp.step(optimizer, closure_of(amp, model, optimizer)).stepped


def test_gradients_inside_a_closure_are_clipped() -> None:
    amp, model, optimizer = lbfgs("fp32", max_grad_norm=1e-3)
    seen = []
    inner = closure_of(amp, model, optimizer)
    optimizer.register_step_post_hook(
        lambda *_: seen.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
    )
    assert amp.step(optimizer, inner).grad_norm > 0.1
    assert seen[0] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp16", "O2", "O3", "bf16-true"])
def test_lbfgs_is_refused_where_it_cannot_work(precision: str) -> None:
    with pytest.raises(SetupError, match=r"`LBFGS` with a closure in .*\n.*use precision='bf16' or 'fp32'"):
        lbfgs(precision)


def test_what_else_is_refused() -> None:
    amp, model, optimizer = lbfgs("fp32")
    with pytest.raises(SetupError, match=r"amp.step\(optimizer, closure\)"):
        amp.step()
    amp, model, optimizer = lbfgs("fp32", accumulate=2)
    with pytest.raises(SetupError, match="accumulate inside it"):
        amp.step(optimizer, closure_of(amp, model, optimizer))
    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    amp = ampguard.Amp(net, sgd, "fp16")
    with pytest.raises(SetupError, match="loss scales may differ"):
        amp.step(sgd, closure_of(amp, net, sgd))


def test_a_closure_that_differentiates_nothing() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    amp = ampguard.Amp(model, optimizer, "fp32")
    with pytest.raises(ProtocolError, match="none of its parameters has a gradient"):
        amp.step(optimizer, lambda: model(batch(0)[0]).square().mean())


class OfOurOwn(torch.optim.LBFGS):
    """A subclass is one, too."""


class WithClosure(torch.optim.SGD):
    """An optimizer whose step does not come without a closure."""

    def step(self, closure):  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [OfOurOwn, WithClosure])
def test_every_optimizer_that_needs_a_closure_is_known(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(8, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(SetupError, match=f"`{kind.__name__}` with a closure in fp16"):
        ampguard.Amp(model, optimizer, "fp16")
    amp = ampguard.Amp(model, optimizer, "fp32")
    amp.backward(model(batch(0)[0]).mean())
    with pytest.raises(SetupError, match=r"do    amp\.step\(optimizer, closure\)"):
        amp.step()
    amp.zero_grad()
    assert amp.step(optimizer, closure_of(amp, model, optimizer)).stepped


def test_a_closure_that_returns_nothing() -> None:
    amp, model, optimizer = lbfgs("fp32")
    closure = closure_of(amp, model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(LossError, match="the closure of `LBFGS` returned nothing"):
        amp.step(optimizer, lambda: closure() and None)
    assert all(map(torch.equal, before, model.parameters()))
