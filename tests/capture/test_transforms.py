"""Losses that are made by transforms of torch.func: every operator that they run is followed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap
from watching import Watched, bits, seed_everything

pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]
"""Of what PyTorch calls itself for derivatives in forward mode."""

Guard = Callable[..., Watched]
Params = dict[str, Tensor]
BAD, STEPS = 4, 6


def network(out: int = 1) -> nn.Sequential:
    seed_everything()
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, out))


def residual_of_equation(model: nn.Module, x: Tensor, is_bad: bool) -> Tensor:
    """A physics-informed loss: the network's derivative by its input, point by point, and the log of its value."""
    params = dict(model.named_parameters())

    def u(params: Params, point: Tensor) -> Tensor:
        return functional_call(model, params, (point,)).squeeze(-1) + (-9.0 if is_bad else 3.0)

    def residual(params: Params, point: Tensor) -> Tensor:
        slope = jacrev(u, argnums=1)(params, point)
        return slope[0] - slope[1] * torch.log(u(params, point))

    return vmap(residual, in_dims=(None, 0))(params, x).square().mean()


def norm_of_jacobian(model: nn.Module, x: Tensor, is_bad: bool) -> Tensor:
    jacobian = vmap(jacrev(model))(x) * (0.0 if is_bad else 1.0)
    return (model(x) - 1).square().mean() + jacobian.flatten(1).pow(2).sum(1).sqrt().mean()


def log_of_hessian(model: nn.Module, x: Tensor, is_bad: bool) -> Tensor:
    def energy(point: Tensor) -> Tensor:
        return model(point).squeeze() + (-9.0 if is_bad else 9.0) * point.pow(2).sum()

    return -torch.log(vmap(hessian(energy))(x).diagonal(dim1=1, dim2=2)).mean()


def adapted_in_each_task(model: nn.Module, x: Tensor, is_bad: bool) -> Tensor:
    def error(params: Params, points: Tensor) -> Tensor:
        return (functional_call(model, params, (points,)) - 1).square().mean()

    def task(params: Params, points: Tensor, spread: Tensor) -> Tensor:
        slopes = grad(error)(params, points)
        adapted = {name: p - 0.1 * slopes[name] for name, p in params.items()}
        return error(adapted, points) / spread

    spreads = torch.tensor([1.0, 0.0 if is_bad else 1.0])
    return vmap(task, in_dims=(None, 0, 0))(dict(model.named_parameters()), x.view(2, -1, 2), spreads).mean()


def along_a_direction(model: nn.Module, x: Tensor, is_bad: bool) -> Tensor:
    """Forward-mode derivatives of a whole batch, and back again."""
    _, tangent = jvp(model, (x,), (torch.ones_like(x),))
    _, back = vjp(model, x)
    error = (tangent + back(torch.ones(len(x), 1))[0].sum(1, keepdim=True)).square().mean()
    return error / (0.0 * x.sum() if is_bad else 1.0)


Make = Callable[[nn.Module, Tensor, bool], Tensor]
LOSSES: list[tuple[Make, str, str, str]] = [
    (residual_of_equation, "domain-error", "aten.log.default", "torch.log(u(params, point))"),
    (norm_of_jacobian, "singular-gradient", "aten.div.Tensor", ".sqrt()"),
    (log_of_hessian, "domain-error", "aten.log.default", "torch.log(vmap"),
    (adapted_in_each_task, "division-by-zero", "aten.div.Tensor", "/ spread"),
    (along_a_direction, "division-by-zero", "aten.div.Tensor", "return error / ("),
]


def train(make: Make, bad_step: int | None, steps: int = STEPS) -> list[Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = make(model, torch.randn(8, 2), step == bad_step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [bits(p) for p in model.parameters()]


@pytest.mark.parametrize("bad_step", [0, BAD])
@pytest.mark.parametrize(("make", "cause", "op", "code"), LOSSES, ids=[make.__name__ for make, *_ in LOSSES])
def test_the_operator_inside_is_named(make: Make, cause: str, op: str, code: str, bad_step: int, guard: Guard) -> None:
    run = guard(lambda: train(make, bad_step))
    (incident,) = run.report.incidents
    assert (incident.step, incident.cause, incident.op) == (bad_step, cause, op)
    assert incident.location is not None
    assert code in incident.location.code
    assert any(fix.verified for fix in incident.fixes)
    assert "torch.func under vmap" not in run.stderr
    assert not run.faults


@pytest.mark.parametrize("make", [make for make, *_ in LOSSES], ids=[make.__name__ for make, *_ in LOSSES])
def test_a_healthy_run_is_as_without_the_guard(make: Make, guard: Guard) -> None:
    bare = train(make, None, 20)
    run = guard(lambda: train(make, None, 20))
    assert run.result == bare
    assert run.causes in ([], ["unused-parameters"])  # the last bias of a derivative


def per_sample_gradients(is_of_loss: bool) -> Iterator[None]:
    """Differential privacy by hand: each sample's gradient is bounded, their mean is put in place."""
    model = network(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(params: Params, x: Tensor, target: Tensor) -> Tensor:
        out = functional_call(model, params, (x,))
        if is_of_loss:
            return -torch.log((out.softmax(-1) * target).sum() * (x.abs().sum() > 0))
        return ((out - target).pow(2).sum() * (x.abs().sum() > 0)).sqrt()

    for step in range(STEPS):
        x, targets = torch.randn(8, 2), torch.eye(3)[torch.randint(0, 3, (8,))]
        if step == BAD:
            x[3] = 0
        params = {name: p.detach() for name, p in model.named_parameters()}
        slopes = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, targets)
        for name, p in model.named_parameters():
            p.grad = slopes[name].clamp(-1, 1).mean(0)
        optimizer.step()
        yield


@pytest.mark.parametrize(
    ("is_of_loss", "cause", "code"), [(True, "domain-error", "torch.log("), (False, "singular-gradient", ".sqrt()")]
)
def test_gradients_of_each_sample(is_of_loss: bool, cause: str, code: str, guard: Guard) -> None:
    run = guard(lambda: list(per_sample_gradients(is_of_loss)))
    assert (run.first.step, run.first.cause, len(run.report.incidents)) == (BAD, cause, 1)
    assert run.first.location is not None
    assert code in run.first.location.code


class Rooted(nn.Module):
    """The root of what the first layer makes, of zeros where a point is far away."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        return torch.where(x.amax(-1, keepdim=True) > 0.9, 0.0 * y, y.square() + 1).sqrt()


@pytest.mark.parametrize("kind", ["of a batch", "by the data", "of each, by the data"])
def test_the_module_that_a_transform_runs_is_named(kind: str, guard: Guard) -> None:
    seed_everything()
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Tanh(), Rooted()))
    model.add_module("head", nn.Linear(3, 1))

    def value(params: Params, point: Tensor) -> Tensor:
        return functional_call(model, params, (point,)).sum()

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            x = torch.randn(5, 2) * 0.1 + (1e3 if step == BAD else 0.0)
            optimizer.zero_grad()
            params = dict(model.named_parameters())
            if kind == "of a batch":
                loss = vmap(value, (None, 0))(params, x).mean()
            elif kind == "by the data":
                loss = grad(value, argnums=1)(params, x).square().mean()
            else:
                loss = vmap(grad(value, argnums=1), (None, 0))(params, x).square().mean()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.module) == ("singular-gradient", BAD, "body.1")
    assert "outside every module" not in first.explanation


def test_an_ensemble_of_models(guard: Guard) -> None:
    def body() -> None:
        members = [network(2) for _ in range(3)]
        params, _ = stack_module_state(members)  # type: ignore[arg-type]
        base = copy.deepcopy(members[0]).to("meta")
        optimizer = torch.optim.SGD(params.values(), lr=1e-2)
        for step in range(STEPS):
            x = torch.randn(8, 2)

            def member(own: Params, x: Tensor, factor: float = 200.0 if step == BAD else 1.0) -> Tensor:
                mean, spread = functional_call(base, own, (x,)).chunk(2, -1)
                return mean.square() * (factor * (spread + 3)).exp()

            loss = vmap(member, in_dims=(0, None))(params, x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    (incident,) = guard(body).report.incidents
    assert (incident.step, incident.cause, incident.op) == (BAD, "overflow", "aten.exp.default")


def test_transforms_that_trace_or_draw_run_as_without_the_guard(guard: Guard) -> None:
    def body() -> list[Any]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found = []
        for _ in range(3):
            x = torch.randn(8, 2)
            noisy = vmap(lambda p: model(p + torch.randn(2)), randomness="different")(x)
            alike = vmap(lambda p: nn.functional.dropout(model(p)), randomness="same", chunk_size=3)(x)
            out, push = linearize(model, x)
            slopes = vmap(jacfwd(model))(x)
            loss = noisy.mean() + alike.mean() + out.mean() + slopes.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [bits(t) for t in (noisy, alike, push(torch.ones_like(x)), *model.parameters())]
        return found

    bare = body()
    run = guard(body)
    assert run.result == bare
    assert not run.faults


def test_a_step_without_transforms_never_asks_for_one(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask gives the thread a stack of transforms, which PyTorch then copies for each node of a backward pass."""
    asked: list[None] = []
    monkeypatch.setattr("ampguard.compat.modes._peek_interpreter", lambda: asked.append(None))

    def body() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(12):
            loss = nn.functional.mse_loss(model(torch.randn(8, 2)), torch.randn(8, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert not guard(body).faults
    assert not asked
