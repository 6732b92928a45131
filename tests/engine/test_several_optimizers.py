from __future__ import annotations

import math

import pytest
import torch
from engine_loops import batch
from torch import Tensor, nn

import ampguard
from ampguard.errors import ProtocolError, SetupError


class Gan:
    """A generator, a discriminator and one optimizer each."""

    def __init__(self, precision: str = "fp16", **options: object) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        self.opt_d = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        models = {"generator": self.generator, "critic": self.critic}
        optimizers = {"opt_g": self.opt_g, "opt_d": self.opt_d}
        self.amp = ampguard.Amp(models, optimizers, precision, **{"init_scale": 1024.0, **options})

    def critic_loss(self, x: Tensor) -> Tensor:
        with self.amp.autocast():
            return (self.critic(self.generator(x).detach()) - self.critic(x)).mean()

    def generator_loss(self, x: Tensor) -> Tensor:
        with self.amp.autocast():
            return -self.critic(self.generator(x)).mean()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_step_of_all_after_a_backward_pass_for_one(precision: str) -> None:
    gan = Gan(precision)
    for number in range(2):
        gan.amp.backward(gan.generator_loss(batch(number)[0]), "opt_g")
        says = r"`opt_d`, which holds no gradient: the last amp.backward\(\) was for 'opt_g' alone(.|\n)*amp.step\('opt_g'\)"
        with pytest.raises(ProtocolError, match=says):
            gan.amp.step()
        gan.amp.step("opt_g")
        gan.amp.backward(gan.critic_loss(batch(number)[0]), "opt_d")
        gan.amp.step("opt_d")


def test_the_scale_is_updated_once_after_the_last() -> None:
    gan = Gan(growth_interval=1)
    for number in range(3):
        x, _ = batch(number)
        scale = gan.amp.get_scale()
        gan.amp.backward(gan.critic_loss(x))
        assert gan.amp.step(gan.opt_d).loss_scale == scale
        assert gan.amp.get_scale() == scale
        gan.amp.backward(gan.generator_loss(x), gan.opt_g)
        assert gan.amp.step(gan.opt_g).loss_scale == scale
        assert gan.amp.get_scale() == 2 * scale


def test_both_overflow_and_the_scale_is_halved_once() -> None:
    gan = Gan()
    x, _ = batch(0)
    x[0] = 6e4
    gan.amp.backward(gan.critic_loss(x * 1e6))
    assert gan.amp.step("opt_d").skipped
    gan.amp.backward(gan.generator_loss(x * 1e6), "opt_g")
    assert gan.amp.step("opt_g").skipped
    assert gan.amp.get_scale() == 512.0


@pytest.mark.parametrize("critic_steps", [2, 5])
def test_a_critic_may_step_more_often(critic_steps: int) -> None:
    gan = Gan(growth_interval=1, init_scale=1.0)
    for number in range(3):
        for inner in range(critic_steps):
            x, _ = batch(10 * number + inner)
            gan.amp.backward(gan.critic_loss(x))
            assert gan.amp.step(gan.opt_d).stepped
        gan.amp.backward(gan.generator_loss(x), gan.opt_g)
        assert gan.amp.step(gan.opt_g).stepped
    assert gan.amp.steps == 3 * (critic_steps + 1)
    assert gan.amp.get_scale() == 2.0 ** (3 * critic_steps)


def test_only_the_named_optimizer_gets_gradients() -> None:
    gan = Gan("O2")
    x, _ = batch(0)
    gan.amp.backward(gan.generator_loss(x), gan.opt_g)
    assert all(p.grad is None for p in gan.opt_d.param_groups[0]["params"])
    assert all(p.grad is not None for p in gan.opt_g.param_groups[0]["params"])
    assert gan.amp.step(gan.opt_g).stepped


def test_gradients_that_wait_follow_the_scale() -> None:
    """One backward for both; the first one's overflow must not spoil the second one's unscaling."""
    for overflows in (False, True):
        torch.manual_seed(0)
        a, b = nn.Linear(8, 1), nn.Linear(8, 1)
        opt_a, opt_b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
        amp = ampguard.Amp([a, b], {"a": opt_a, "b": opt_b}, init_scale=1024.0, max_grad_norm=math.inf)
        x, y = batch(1)

        def loss_of_both(a: nn.Module = a, b: nn.Module = b, x: Tensor = x, y: Tensor = y) -> Tensor:
            return nn.functional.mse_loss(a(x), y) + nn.functional.mse_loss(b(x), y)

        for _ in range(2):
            amp.backward(loss_of_both())
            if overflows:
                a.weight.grad[0, 0] = torch.inf
            amp.step("a")
        true = torch.autograd.grad(nn.functional.mse_loss(b(x), y), b.weight)[0].norm()
        bias = torch.autograd.grad(nn.functional.mse_loss(b(x), y), b.bias)[0].norm()
        result = amp.step("b")
        assert result.grad_norm == pytest.approx(2 * float((true**2 + bias**2).sqrt()), rel=1e-4)
        assert amp.get_scale() == (256.0 if overflows else 1024.0)


def test_stepping_all_is_one_norm_and_one_verdict() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 1)
    opt_a, opt_b = torch.optim.SGD(body.parameters(), lr=0.1), torch.optim.AdamW(head.parameters(), lr=0.1)
    amp = ampguard.Amp({"body": body, "head": head}, [opt_a, opt_b], "fp16", max_grad_norm=0.1, init_scale=1024.0)
    x, y = batch(0)
    with amp.autocast():
        loss = nn.functional.mse_loss(head(body(x)), y)
    expected = torch.autograd.grad(loss, [*body.parameters(), *head.parameters()], retain_graph=True)
    norm = torch.stack([g.norm() for g in expected]).norm()
    amp.backward(loss)
    before = body.weight.detach().clone()
    assert amp.step().grad_norm == pytest.approx(float(norm), rel=1e-2)
    moved = (body.weight.detach() - before).norm()
    assert float(moved) == pytest.approx(0.1 * 0.1 * float(expected[0].norm() / norm), rel=1e-2)

    with amp.autocast():
        loss = nn.functional.mse_loss(head(body(x)), y)
    amp.backward(loss)
    body.weight.grad[0, 0] = torch.nan
    kept = [p.detach().clone() for p in (*body.parameters(), *head.parameters())]
    result = amp.step()
    assert result.skipped
    assert result.nonfinite == ("body.weight",)
    assert all(torch.equal(p, k) for p, k in zip((*body.parameters(), *head.parameters()), kept, strict=True))
    assert amp.get_scale() == 512.0


def test_an_optimizer_that_the_loss_does_not_reach_is_refused() -> None:
    gan = Gan()
    gan.amp.backward(gan.critic_loss(batch(0)[0]))
    with pytest.raises(ProtocolError, match=r"amp.step\(\) of `opt_g`.*reached none of its parameters") as caught:
        gan.amp.step()
    assert caught.value.cause == "no-gradients"
    assert gan.amp.step(gan.opt_d).stepped


def test_an_unknown_optimizer_is_named() -> None:
    gan = Gan()
    gan.amp.backward(gan.critic_loss(batch(0)[0]))
    with pytest.raises(SetupError, match=r"there is no optimizer 'opt_x'\n.*'opt_g', 'opt_d'"):
        gan.amp.step("opt_x")


def test_frozen_and_unused_parameters() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 1), "unused": nn.Linear(8, 1), "frozen": nn.Linear(8, 8)})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for mode in ("fp16",):
        amp = ampguard.Amp(model, optimizer, mode, max_grad_norm=1.0, init_scale=64.0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        x, y = batch(0)
        with amp.autocast():
            loss = nn.functional.mse_loss(model["used"](model["frozen"](x)), y)
        amp.backward(loss)
        assert amp.step().stepped
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == {"used.weight", "used.bias"}
