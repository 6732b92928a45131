"""Training by torch.func: steps are counted, losses kept, a bad one explained; nothing of the training changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, stack_module_state, vmap
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

from ampguard.report.history import read_history

Guard = Callable[..., Watched]
STEPS, BAD = 8, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.body(x)))
        return self.head(hidden) / hidden.abs().amax(-1, keepdim=True)


def loss_of(parameters: dict[str, Tensor], model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, parameters, (x,)), y)


def train(differentiate: Callable[..., Any], bad: int | None = None) -> list[object]:
    seed_everything()
    model = Net()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        if step == bad:
            parameters["body.bias"] = torch.zeros(8)
            x[2] = 0.0
        gradients, loss = differentiate(parameters, model, x, y)
        parameters = {name: p - 0.05 * gradients[name] for name, p in parameters.items()}
        losses.append(bits(loss))
    return [bits(parameters), losses, bits(torch.get_rng_state())]


def with_value(*args: Any) -> Any:
    return grad_and_value(loss_of)(*args)


def with_auxiliary(*args: Any) -> Any:
    def both(*inner: Any) -> tuple[Tensor, Tensor]:
        loss = loss_of(*inner)
        return loss, 2 * loss

    gradients, (loss, twice) = grad_and_value(both, has_aux=True)(*args)
    assert float(twice) == pytest.approx(2 * float(loss))
    return gradients, loss


def gradient_alone(*args: Any) -> Any:
    return grad(loss_of)(*args), torch.zeros(())


@pytest.mark.parametrize("differentiate", [with_value, with_auxiliary, gradient_alone])
def test_steps_are_counted_and_losses_kept(differentiate: Callable[..., Any], guard: Guard) -> None:
    plain = train(differentiate)
    run = guard(lambda: train(differentiate))
    assert (run.faults, run.causes, run.report.steps) == (0, [], STEPS)
    assert run.result == plain
    assert run.session.path is not None
    with read_history(run.session.path) as history:
        losses = [row.loss for row in history.steps()]
    assert len(losses) == STEPS
    assert all(loss is not None and 0.1 < loss < 50 for loss in losses)


@pytest.mark.parametrize("differentiate", [with_value, gradient_alone])
def test_bad_loss_is_explained_by_its_line(differentiate: Callable[..., Any], guard: Guard) -> None:
    plain = train(differentiate, BAD)
    run = guard(lambda: train(differentiate, BAD))
    assert run.faults == 0
    assert run.result == plain
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.mode) == ("division-by-zero", BAD, "train")
    assert incident.location is not None
    assert incident.location.code == "return self.head(hidden) / hidden.abs().amax(-1, keepdim=True)"
    assert run.report.steps == STEPS


def test_bad_gradient_of_a_finite_loss(guard: Guard) -> None:
    def distance(point: Tensor, target: Tensor) -> Tensor:
        return (point - target).pow(2).sum().sqrt()

    def script() -> None:
        point = torch.zeros(3)
        for step in range(6):
            target = point.clone() if step == 3 else torch.randn(3)
            gradient, _ = grad_and_value(distance)(point, target)
            point = point - 0.1 * gradient.nan_to_num()

    run = guard(script)
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.phase) == ("singular-gradient", 3, "backward")
    assert incident.location is not None
    assert incident.location.code == "return (point - target).pow(2).sum().sqrt()"


def ensemble_of(differentiated: Callable[..., Any]) -> Callable[[], object]:
    """Two linear models, trained together; in one step no target is left."""

    def script() -> object:
        seed_everything()
        parameters, _ = stack_module_state([nn.Linear(4, 3) for _ in range(2)])
        base = nn.Linear(4, 3, device="meta")
        ensemble = vmap(grad_and_value(differentiated), in_dims=(0, None, None, None))
        for step in range(STEPS):
            y = torch.full((5,), -100) if step == BAD else torch.randint(0, 3, (5,))
            gradients, _ = ensemble(parameters, base, torch.randn(5, 4), y)
            parameters = {name: p - 0.05 * gradients[name].nan_to_num() for name, p in parameters.items()}
        return bits(parameters)

    return script


def test_under_vmap_one_member_is_explained(guard: Guard) -> None:
    script = ensemble_of(loss_of)
    plain = script()
    run = guard(script)
    assert (run.faults, run.report.steps, run.result) == (0, STEPS, plain)
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("empty-reduction", BAD)
    assert incident.location is not None
    assert "cross_entropy" in incident.location.code
    assert "torch.func under vmap" not in run.stderr


@pytest.mark.parametrize(
    ("function", "cause", "phase"),
    [
        (lambda weights, x: (x / weights).sum(), "division-by-zero", "loss"),
        (lambda weights, x: (weights * x).pow(2).sum().sqrt(), "singular-gradient", "backward"),
    ],
)
def test_under_vmap_the_member_that_fails_is_found(
    function: Callable[..., Tensor], cause: str, phase: str, guard: Guard
) -> None:
    """The third alone divides by zero; of the other function the loss is finite, and its derivative is not."""

    def script() -> None:
        torch.manual_seed(0)
        for step in range(4):
            weights = torch.rand(4, 3) + 1
            if step == 2:
                weights[2] = 0.0
            vmap(grad_and_value(function), in_dims=(0, None))(weights, torch.rand(3) + 1)

    run = guard(script)
    assert (run.faults, run.causes) == (0, [cause])
    assert (run.first.step, run.first.phase) == (2, phase)


def test_under_vmap_it_is_said_what_cannot_be_followed(guard: Guard) -> None:
    """The member alone makes no NaN: the function refers to another batched tensor."""

    def script() -> None:
        torch.manual_seed(0)
        for step in range(4):
            shifts = torch.rand(3) - (5.0 if step == 2 else 0.0)

            def member(shift: Tensor, w: Tensor) -> Any:
                return grad_and_value(lambda v: (v.exp() + shift).log().sum())(w)

            vmap(member)(shifts, torch.rand(3, 4))

    run = guard(script)
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("unexplained", 2)
    assert run.stderr.count("torch.func under vmap") == 1


def test_gradients_inside_a_larger_loss_are_no_steps(guard: Guard) -> None:
    """An inner loop whose outcome is differentiated again, by an optimizer's own backward pass."""

    def script() -> None:
        seed_everything()
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
            parameters = dict(model.named_parameters())
            inner = grad(loss_of)(parameters, model, x, y)
            fast = {name: p - 0.1 * inner[name] for name, p in parameters.items()}
            optimizer.zero_grad()
            loss_of(fast, model, x, y).backward()
            optimizer.step()

    run = guard(script)
    assert (run.faults, run.causes, run.report.steps) == (0, [], 4)


def test_inner_gradient_of_a_larger_loss(guard: Guard) -> None:
    """Where an inner loss is bad, so is the outer one that it is part of, which can be run again whole."""

    def inner(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ weight - y) ** 2).mean()

    def task(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        adapted = weight - 0.1 * grad(inner)(weight, x, y)
        return inner(adapted, x, y)

    def script() -> object:
        seed_everything()
        weight = torch.randn(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.01)
        for step in range(STEPS):
            x, y = torch.randn(3, 5, 4), torch.randn(3, 5)
            if step == BAD:
                y[1] = 1e25
            loss = vmap(task, in_dims=(None, 0, 0))(weight, x, y).mean()
            optimizer.zero_grad()
            loss.backward()
            if step == BAD:
                weight.grad.zero_()
            optimizer.step()
        return bits({"weight": weight})

    plain = script()
    run = guard(script)
    assert (run.faults, run.report.steps, run.result) == (0, STEPS, plain)
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("overflow", BAD)
    assert incident.evidence["rung"] == "replay"
    assert incident.location is not None
    assert incident.location.code == "return ((x @ weight - y) ** 2).mean()"
    with read_history(run.session.path) as history:
        assert all(row.loss is None or row.loss < 100 for row in history.steps() if row.step != BAD)


@pytest.mark.parametrize("is_batched", [False, True])
def test_gradients_that_are_handed_to_an_optimizer(is_batched: bool, guard: Guard) -> None:
    """Its parameters require gradients, so the loss has a graph, though nothing differentiates it."""

    def script() -> object:
        seed_everything()
        base = nn.Linear(4, 3)
        weights = (
            stack_module_state([nn.Linear(4, 3) for _ in range(2)])[0] if is_batched else dict(base.named_parameters())
        )
        differentiated = grad_and_value(loss_of)
        ensemble = vmap(differentiated, in_dims=(0, None, None, None)) if is_batched else differentiated
        optimizer = torch.optim.Adam(list(weights.values()), lr=0.01)
        for step in range(STEPS):
            y = torch.full((5,), -100) if step == BAD else torch.randint(0, 3, (5,))
            gradients, _ = ensemble(weights, base, torch.randn(5, 4), y)
            optimizer.zero_grad()
            for name, weight in weights.items():
                weight.grad = gradients[name].nan_to_num()
            optimizer.step()
        return bits(weights)

    plain = script()
    run = guard(script)
    assert (run.faults, run.report.steps, run.result) == (0, STEPS, plain)
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("empty-reduction", BAD)


def test_steps_that_call_a_module_and_steps_that_do_not(guard: Guard) -> None:
    """Where the gradients are cleared behind the loss, the tape is on from one step to the next all the same."""

    def script() -> None:
        seed_everything()
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(16):
            x = torch.randn(5, 4).abs()
            if step < 6:
                loss = model(x).pow(2).mean()
            else:
                rate = (x @ model.weight.T + model.bias).pow(2)
                loss = (rate + (0.0 if step != 13 else -rate)).log().mean()
            optimizer.zero_grad()
            loss.backward()
            if step != 13:
                optimizer.step()

    run = guard(script)
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.evidence["rung"]) == ("domain-error", 13, "replay")


def test_losses_that_are_scaled_under_vmap_leave_the_guard_on(guard: Guard) -> None:
    """Gradients of single samples (DP-SGD), which the script puts in place itself."""

    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 3)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)

        def of_sample(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = scaler.scale(F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None]))
            return loss

        for _ in range(STEPS):
            parameters = {name: p.detach() for name, p in model.named_parameters()}
            gradients = vmap(grad(of_sample), in_dims=(None, 0, 0))(
                parameters, torch.randn(5, 4), torch.randint(0, 3, (5,))
            )
            for name, p in model.named_parameters():
                p.grad = gradients[name].mean(0)
            scaler.step(opt)
            scaler.update()

    run = guard(body)
    assert (run.faults, run.causes, run.report.steps) == (0, [], STEPS), run.stderr


@pytest.mark.parametrize("draws_inside", [True, False])
def test_gradients_of_samples_that_the_script_clips_and_puts_in_place(guard: Guard, draws_inside: bool) -> None:
    """Also where all that they are computed from are weights and numbers that the step itself has drawn."""

    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.randn(STEPS, 6, 4)

        def of_sample(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            loss: Tensor = functional_call(model, parameters, (x[None],)).square().sum()
            return loss

        for step in range(STEPS):
            x = torch.randn(6, 4) if draws_inside else data[step]
            if step == BAD:
                x[2] = 0.0
            parameters = {name: p.detach() for name, p in model.named_parameters()}
            gradients = vmap(grad(of_sample), in_dims=(None, 0))(parameters, x)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            factors = 1.0 / norms
            for name, p in model.named_parameters():
                p.grad = torch.einsum("n,n...->...", factors, gradients[name]) / 6
            opt.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.causes, run.first.step) == (["division-by-zero"], BAD)
    assert run.first.location.code == "factors = 1.0 / norms"
    assert [fix.verified for fix in run.first.fixes] == [True, True]


@pytest.mark.parametrize("rule", ["its sign", "itself"])
@pytest.mark.parametrize("on_meta", [True, False])
def test_bad_gradients_of_weights_given_to_a_call(rule: str, on_meta: bool, guard: Guard) -> None:
    """Leaves in a dict, moved by hand: the sign of NaN is 0, and leaves them as they are for ever."""

    def script() -> object:
        seed_everything()
        net = nn.Linear(4, 3)
        weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        if on_meta:
            net.to("meta")
        for step in range(STEPS):
            x = torch.rand(4, 4)
            z = functional_call(net, weights, (x,))
            others = functional_call(net, weights, (x if step == BAD else x.flip(0),))
            loss = (z - others).square().sum(1).sqrt().mean()
            for p in weights.values():
                p.grad = None
            loss.backward()
            with torch.no_grad():
                for p in weights.values():
                    p -= 0.01 * (p.grad.sign().nan_to_num() if rule == "its sign" else p.grad)
        return bits(weights)

    plain = script()
    run = guard(script)
    assert (run.faults, run.result) == (0, plain)
    assert [(i.cause, i.step) for i in run.report.incidents][:1] == [("singular-gradient", BAD)]
    assert run.first.location is not None
    assert run.first.location.code == "loss = (z - others).square().sum(1).sqrt().mean()"
    assert run.report.steps == STEPS
