"""Models that are not called in the ordinary way: ensembles under vmap, traced modules, custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

Guard = Callable[..., Any]


def test_what_an_ensembles_bad_update_poisons_is_its_consequence(guard: Guard) -> None:
    """Its parameters belong to no module that is called."""

    def root(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.sqrt(functional_call(base, (parameters, buffers), (x,)) + 1.2)

    base = nn.Linear(4, 1).to("meta")

    def body() -> None:
        torch.manual_seed(0)
        parameters, buffers = stack_module_state([nn.Linear(4, 1) for _ in range(3)])
        optimizer = torch.optim.SGD(parameters.values(), lr=1e-3)
        for step in range(6):
            x = torch.randn(8, 4) * (0.1 if step != 2 else 30.0)
            loss = vmap(root, (0, 0, None))(parameters, buffers, x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.causes == ["domain-error"]
    assert run.first.step == 2
    assert run.first.evidence["later_failures_caused_by_it"] == 3


def test_gradients_per_sample_are_explained_by_one_sample(guard: Guard) -> None:
    model = nn.Linear(4, 3)

    def loss_of(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(model, parameters, (x[None],))
        return torch.log(out.softmax(-1).gather(1, y[None, None]) - 0.9).neg().mean()

    def body() -> None:
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        _, losses = vmap(grad_and_value(loss_of), (None, 0, 0))(parameters, torch.randn(6, 4), torch.zeros(6).long())
        losses.mean().item()

    run = guard(body)
    assert run.causes == ["domain-error"]
    assert run.first.op == "aten.log.default"
    assert run.first.location is not None
    assert run.first.location.code.startswith("return torch.log(out.softmax(-1)")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_module_is_named_with_its_operator(guard: Guard) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.linear(x) * 30)

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(Gate(), torch.randn(2, 4)))
        for step in range(3):
            model(torch.randn(8, 4) * (1.0 if step < 2 else 30.0)).mean().backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("overflow", 2)
    assert (run.first.module, run.first.op) == ("1", "aten.exp.default")


def test_custom_operators_derivative_is_followed_to_its_line(guard: Guard) -> None:
    @torch.library.custom_op("ampguard_tests::unit", mutates_args=())
    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)

    def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    def derive(ctx: Any, gradient: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        along = (gradient * out).sum(-1, keepdim=True)
        return (gradient - out * along) / x.norm(dim=-1, keepdim=True)

    unit.register_autograd(derive, setup_context=keep)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return unit(self.linear(x))

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        x = torch.randn(8, 4)
        x[2] = 0.0
        net(x).sum().backward()
        optimizer.step()

    first = guard(body).first
    assert (first.cause, first.phase) == ("singular-gradient", "backward")
    assert first.location.code.startswith("return (gradient - out * along) /")
    assert any(fix.verified for fix in first.fixes)


@torch.library.custom_op("ampguard_tests::balance", mutates_args=())
def balance(x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    return x / total


@torch.library.custom_op("ampguard_tests::power", mutates_args=())
def power(x: Tensor) -> Tensor:
    return x.square().sum(-1)


@torch.library.custom_op("ampguard_tests::outside", mutates_args=())
def outside(x: Tensor) -> Tensor:
    return torch.from_numpy(1.0 / x.numpy())


balance.register_autograd(
    lambda ctx, g: g / ctx.saved_tensors[0].sum(-1, keepdim=True).clamp(min=1.0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
power.register_autograd(
    lambda ctx, g: 2.0 * g[..., None] * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
outside.register_autograd(lambda ctx, g: g, setup_context=lambda ctx, inputs, output: None)


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize(
    ("function", "cause", "op", "code"),
    [
        (balance, "division-by-zero", "aten.div.Tensor", "return x / total"),
        (power, "fp16-overflow", "aten.square.default", "return x.square().sum(-1)"),
    ],
)
def test_what_a_custom_operator_computes_with_is_seen(
    guard: Guard, function: Callable[[Tensor], Tensor], cause: str, op: str, code: str, is_module: bool
) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        with torch.no_grad():
            net[0].bias.fill_(1.0)
        applies = Applies(function) if is_module else function
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for step in range(4):
            x = torch.randn(8, 4) * (1000.0 if step == 2 and cause == "fp16-overflow" else 0.1)
            with torch.autocast("cpu", torch.float16):
                hidden = net(x) * (0.0 if step == 2 and cause == "division-by-zero" else 1.0)
                loss = applies(hidden).float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.op) == (cause, 2, op)
    assert first.location.code == code
    assert first.module == ("" if is_module else None)
    assert any(fix.verified for fix in first.fixes)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_custom_operator_that_computes_elsewhere_is_one_operator(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), Applies(outside))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    net[0].weight.zero_()
                    net[0].bias.zero_()
            loss = net(torch.randn(8, 4)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.step, run.first.op, run.first.module) == (2, "ampguard_tests.outside.default", "1")


def test_a_residual_before_the_first_call_of_the_model_is_a_loss(guard: Guard) -> None:
    """`torch.func.jvp` calls the model; what is computed from that is no preprocessing."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            x = torch.rand(6, 2)
            out, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            residual = torch.sqrt(slope + (4.0 if step < 3 else -4.0)) * out
            loss = residual.square().mean() + model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.phase) == ("domain-error", 3, "loss")
