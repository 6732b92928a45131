"""Scripts of unusual shapes under an override: what reaches them, what is said not to, and that they train as written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from ampguard.run.overrides.asked import Overrides
from ampguard.run.session import RunOptions, Session

SCALE = 2.0**16


def net_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 8, generator=generator)
        yield x, x[:, :1] * 2


def train(net: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 40) -> list[float]:
    losses = []
    for x, y in batches(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(loss.item())
    return losses


def stepping_in_backward(net: nn.Module) -> None:
    """An SGD for each parameter, stepped by the hook of its gradient: a gradient times 65536 would end it."""
    optimizers = {p: torch.optim.SGD([p], 0.05) for p in net.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("precision", ["fp16", "O2"])
def test_an_optimizer_in_backward_sees_no_loss_scale(overridden: Callable[..., Any], precision: str) -> None:
    control = net_of()
    stepping_in_backward(control)
    expected = train(control, None, 80)
    net = net_of()
    with overridden(precision) as session:
        stepping_in_backward(net)
        losses = train(net, None, 80)
    assert "gained a dynamic loss scale" in session.report.run["did"]
    assert losses[-1] < 0.02 * losses[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.2)
    assert [i.cause for i in session.report.incidents if i.severity != "info"] == []


def test_hooks_on_gradients_see_no_loss_scale(overridden: Callable[..., Any]) -> None:
    def hooked(net: nn.Module, seen: list[float]) -> torch.optim.Optimizer:
        for p in net.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        net[0].weight.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))
        net[2].bias.register_hook(lambda gradient: gradient.mul_(0.5) and None)  # written to in place
        return torch.optim.SGD(net.parameters(), 0.05)

    control, net = net_of(), net_of()
    theirs: list[float] = []
    mine: list[float] = []
    expected = train(control, hooked(control, theirs))
    with overridden("fp16") as session:
        losses = train(net, hooked(net, mine))
    assert losses == pytest.approx(expected, rel=0.02)
    assert mine[1:] == pytest.approx(theirs[1:], rel=0.05)
    hooks = net[2].bias._backward_hooks
    assert hooks is not None
    assert all(hook.__code__.co_filename == __file__ for hook in hooks.values())  # ours are gone
    assert [i.cause for i in session.report.incidents if i.severity != "info"] == []


def test_gradients_that_no_backward_pass_makes_are_said(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        net = net_of()
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        parameters = dict(net.named_parameters())
        differentiate = grad_and_value(lambda p, x, y: nn.functional.mse_loss(functional_call(net, p, (x,)), y))
        for x, y in batches(3):
            gradients, _ = differentiate({name: p.detach() for name, p in parameters.items()}, x, y)
            for name, p in parameters.items():
                p.grad = gradients[name]
            optimizer.step()
    assert session.report.run["could_not"] == [
        "gradients that come from torch.func or torch.autograd.grad get no loss scale"
    ]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("by", ["torch.func", "torch.autograd"])
def test_gradients_without_any_optimizer_are_said_to_have_no_scale(
    by: str, precision: str, overridden: Callable[..., Any]
) -> None:
    with overridden(precision) as session:
        net = net_of()
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        differentiate = grad_and_value(lambda p, x, y: nn.functional.mse_loss(functional_call(net, p, (x,)), y))
        for x, y in batches(3):
            if by == "torch.func":
                gradients, _ = differentiate(parameters, x, y)
                parameters = {name: p - 0.05 * gradients[name] for name, p in parameters.items()}
            else:
                loss = nn.functional.mse_loss(net(x), y)
                with torch.no_grad():
                    for p, gradient in zip(
                        net.parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True
                    ):
                        p -= 0.05 * gradient
    said = ["gradients that come from torch.func or torch.autograd.grad get no loss scale"]
    assert session.report.run["could_not"] == (said if precision == "fp16" else [])


def test_a_penalty_beside_a_loss_is_not_spoken_of(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        net = net_of()
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        for x, y in batches(3):
            x.requires_grad_()
            output = net(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            optimizer.zero_grad()
            (nn.functional.mse_loss(output, y) + slope.square().mean()).backward()
            optimizer.step()
    assert session.report.run["could_not"] == []


class WithTime(nn.Module):
    """As diffusion models embed their time: float32 tensors that are made inside meet the model's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.time, self.head = nn.Linear(8, 32), nn.Linear(4, 32), nn.Linear(32, 1)
        self.drop = nn.Dropout(0.1)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(4.0).sin().expand(len(x), 4)
        hidden = torch.relu(self.drop(self.inner(x)) + self.time(t))
        self.seen.append(hidden.dtype)
        return self.head(hidden.float())


@pytest.mark.parametrize(
    ("precision", "low"), [("O2", torch.float16), ("O3", torch.float16), ("bf16-true", torch.bfloat16)]
)
def test_a_model_that_mixes_float32_with_low_weights(
    overridden: Callable[..., Any], precision: str, low: torch.dtype
) -> None:
    torch.manual_seed(0)
    control, net = WithTime(), WithTime()
    net.load_state_dict(control.state_dict())
    torch.manual_seed(3)
    expected = train(control, torch.optim.SGD(control.parameters(), 0.01), 30)
    with overridden(precision) as session:
        torch.manual_seed(3)
        losses = train(net, torch.optim.SGD(net.parameters(), 0.01), 30)
    assert set(net.seen) == {low}
    assert losses == pytest.approx(expected, rel=0.1)  # from the same random numbers
    run = session.report.run
    assert run["could_not"] == []
    assert any(did.startswith("WithTime runs under") for did in run["did"])


class OpensItself(nn.Module):
    """Its own region is inside the call, where another one may have been gained."""

    def __init__(self, written: torch.dtype) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 32), nn.Linear(32, 1)
        self.written = written
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.written):
            x = torch.relu(self.inner(x))
        self.seen.append(x.dtype)
        return self.head(x.float())


@pytest.mark.parametrize(
    ("precision", "wanted"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("written", [torch.float16, torch.bfloat16])
def test_a_region_inside_a_models_own_forward(
    overridden: Callable[..., Any], precision: str, wanted: torch.dtype, written: torch.dtype
) -> None:
    with overridden(precision) as session:
        torch.manual_seed(0)
        net = OpensItself(written)
        train(net, torch.optim.SGD(net.parameters(), 0.01), 4)
    assert set(net.seen) == {wanted}
    assert "gained autocast around calls of the script's models" not in session.report.run["did"]


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
def test_a_model_whose_code_bears_no_low_weights_stays_in_float32(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    class Widens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop, self.head = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.drop(self.inner(x)).float()
            return self.head(torch.lerp(hidden, self.inner.bias.expand_as(hidden), 0.5))  # no operator of autocast's

    control = Widens()
    net = Widens()
    net.load_state_dict(control.state_dict())
    torch.manual_seed(3)
    expected = train(control, torch.optim.SGD(control.parameters(), 0.01), 5)
    with overridden(precision) as session:
        torch.manual_seed(3)
        losses = train(net, torch.optim.SGD(net.parameters(), 0.01), 5)
    assert losses == expected  # the same random numbers too
    (said,) = session.report.run["could_not"]
    assert said.startswith("Widens stays in float32: its own code does not go with")
    assert "not overridden: Widens stays in float32" in capsys.readouterr().err
    assert not [done for done in session.report.run["did"] if "casts" in done or "Widens" in done]


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
def test_a_model_that_is_compiled_with_its_backward_pass(overridden: Callable[..., Any], precision: str) -> None:
    """AOTAutograd differentiates while it traces the call, with the casts in their places."""
    torch._dynamo.reset()
    control, net = net_of(), net_of()
    with overridden(precision):
        expected = train(control, torch.optim.AdamW(control.parameters(), 1e-2), 30)
        compiled = torch.compile(net, backend="aot_eager")
        losses = train(compiled, torch.optim.AdamW(net.parameters(), 1e-2), 30)
    assert losses[0] == pytest.approx(expected[0], rel=1e-3)
    assert losses[-1] < 0.2 * losses[0]
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_a_step_that_is_explained_as_the_next_one_begins(overridden: Callable[..., Any], precision: str) -> None:
    """The script passes a step over by itself; what was wrong is found out as the model is called again."""
    net = net_of()
    with overridden(precision) as session:
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        for x, y in batches(30):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if all(bool(torch.isfinite(p.grad).all()) for p in net.parameters() if p.grad is not None):
                scaler.step(optimizer)
                scaler.update()
            else:
                scaler.update(scaler.get_scale() / 4)
            optimizer.zero_grad()
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in net.parameters())
    assert scaler.get_scale() < 2.0**24
    assert [i.cause for i in session.report.incidents if i.severity == "error"] == []


def test_a_script_whose_own_regions_are_overridden_needs_no_module(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        weight = torch.randn(8, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = torch.randn(4, 8) @ weight
        product.float().sum().backward()
    assert product.dtype == torch.float16
    assert session.report.run["could_not"] == []


def test_an_optimizer_that_evaluates_losses_by_itself_gets_no_loss_scale(overridden: Callable[..., Any]) -> None:
    """Its first gradients would overflow at 65536, nothing could hold its step off, and its history would keep them."""
    with overridden("fp16") as session:
        net = net_of()
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
        (x, y), *_ = batches(1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y * 4)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < 0.2 * losses[0]
    assert any("LBFGS" in what and "no loss scale" in what for what in session.report.run["could_not"])


def test_a_script_that_fails_before_its_first_model_is_told_nothing_of_overrides(tmp_path: Path) -> None:
    for error in (ModuleNotFoundError("no such package"), None):
        session = Session(RunOptions(out=tmp_path / str(error), overrides=Overrides("fp16", ())))
        session.start()
        session.finish(error)
        assert bool(session.report.run["could_not"]) is (error is None)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "O2"])
def test_float64_weights_are_said_to_stay(precision: str, overridden: Callable[..., Any]) -> None:
    with overridden(precision) as session:
        net = net_of().double()
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        for x, y in batches(3):
            output = net(x.double())
            optimizer.zero_grad()
            nn.functional.mse_loss(output, y.double()).backward()
            optimizer.step()
    assert output.dtype == torch.float64
    said = ["the weights of Sequential are float64, which autocast leaves as they are"]
    assert session.report.run["could_not"] == ([] if precision == "fp32" else said)
