"""Optimizers that a script wrote itself and whose step leaves the numbers: the operator and the line of the step are named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import fingerprint, seed_everything

from ampguard.capture.protocol import own_steps

Guard = Callable[..., Any]


class Own(torch.optim.Optimizer):
    """What the optimizers below have in common: the loop over the parameters."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, self.state[p]), alpha=group["lr"])
        self.count += 1

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Normalised(Own):
    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        return p.grad / p.grad.norm()  # <- here


class CountsFromZero(Own):
    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * p.grad
        return state["m"] / (1.0 - 0.9**self.count)  # <- here


class StateCountsFromZero(Own):
    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        t = state.setdefault("t", 0)
        state["t"] = t + 1
        return p.grad / (1.0 - 0.9**t)  # <- here


class FourthPower(Own):
    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        state["v"] = 0.9 * state.get("v", torch.zeros_like(p)) + p.grad**4  # <- here
        return p.grad * state["v"].mean()


class RootOfWhatIsAddedUp(Own):
    """What the step adds to its state before it uses it makes that positive, where it is added once more."""

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        added = p.grad.norm().clamp(max=1e-2) / 1e-2
        state["c"] = state.get("c", torch.full((1,), -3.5)) + added
        return p.grad * (state["c"].sqrt() if self.count == 2 else 1.0)  # <- here


class HandMadeAdam(Own):
    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        state["v"] = 0.999 * state.get("v", torch.zeros_like(p)) + 0.001 * p.grad * p.grad
        return p.grad / (state["v"].sqrt() + 1e-8)  # <- here


class Net(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.head = nn.Linear(12, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x) * self.scale))


def train(
    kind: type[Own],
    loss_scale: float,
    dtype: torch.dtype = torch.float32,
    dead: bool = False,
    with_scaler: bool = False,
) -> dict[str, Any]:
    """Four steps; from the third on the loss is `loss_scale` times as large."""
    seed_everything()
    model = Net(1.0).to(dtype)
    if dead:
        nn.init.constant_(model.body.bias, -100.0)
    optimizer = kind(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=with_scaler)
    for step in range(4):
        loss = F.cross_entropy(model(torch.randn(8, 6, dtype=dtype)).float(), torch.randint(3, (8,)))
        optimizer.zero_grad()
        scaler.scale(loss * (loss_scale if step >= 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return fingerprint(model, optimizer)


def marked(kind: type[Own]) -> int:
    lines, first = inspect.getsourcelines(kind)
    return first + next(i for i, line in enumerate(lines) if "# <- here" in line)


class CubeOfTheGradient(Own):
    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        return p.grad**3 / (p.grad.abs().max() + 1e-8)  # <- here


CASES = {
    "a norm that is 0": (Normalised, {"loss_scale": 1.0, "dead": True}, 0, "div", {"add-epsilon"}),
    "an attribute counts from 0": (CountsFromZero, {"loss_scale": 1.0}, 0, "div", {"add-epsilon"}),
    "a state counts from 0": (StateCountsFromZero, {"loss_scale": 1.0}, 0, "div", {"add-epsilon"}),
    "a fourth power": (FourthPower, {"loss_scale": 1e12}, 2, "pow", {"clip-gradients"}),
    "a root of what is added up": (RootOfWhatIsAddedUp, {"loss_scale": 1.0}, 2, "sqrt", {"clamp"}),
    "float16 squares": (HandMadeAdam, {"loss_scale": 1.0, "dtype": torch.float16, "dead": True}, 0, "div", {"add-epsilon"}),
    "through a scaler": (Normalised, {"loss_scale": 1.0, "dead": True, "with_scaler": True}, 0, "div", {"add-epsilon"}),
}  # fmt: skip


def test_a_power_of_what_is_large_and_negative_overflows(guard: Guard) -> None:
    run = guard(lambda: train(CubeOfTheGradient, 1e16))

    assert (run.faults, run.first.cause) == (0, "optimizer-underflow")
    assert "gives a result that is not finite" in run.first.explanation
    assert "clamp" not in {fix.action for fix in run.first.fixes}


@pytest.mark.parametrize("name", CASES)
def test_line_of_the_step_is_named_and_a_cure_is_seen_to_work(guard: Guard, name: str) -> None:
    kind, options, step, op, cures = CASES[name]
    unguarded = train(kind, **options)

    run = guard(lambda: train(kind, **options))

    assert run.faults == 0, run.stderr
    assert run.result == unguarded, "the training is as without the guard"
    assert [i.cause for i in run.report.incidents if i.severity == "error"] == ["optimizer-underflow"], run.stderr
    incident = run.first
    assert (incident.step, incident.phase) == (step, "optimizer")
    assert incident.op is not None
    assert op in incident.op
    assert incident.location is not None
    assert incident.location.line == marked(kind)
    assert cures <= {fix.action for fix in incident.fixes if fix.verified}
    assert incident.module in ("body", "head")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a norm that is 0", "return p.grad / (p.grad.norm() + 1e-8)"),
        ("a state counts from 0", "return p.grad / (1.0 - 0.9**t + 1e-8)"),
        ("float16 squares", 'return p.grad / (state["v"].sqrt() + 0.0001)'),
    ],
)
def test_epsilon_is_printed_where_it_was_tried(guard: Guard, name: str, line: str) -> None:
    kind, options, *_ = CASES[name]

    run = guard(lambda: train(kind, **options))

    assert [(f.how, f.verified) for f in run.first.fixes if f.action == "add-epsilon"] == [(line, True)]


class Unscales(torch.optim.Optimizer):
    """Its `step` is told by what the gradients are to be divided."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, inv_scale: Any, *, power: int = 2) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            g = p.grad * inv_scale
            v = self.state[p].setdefault("v", torch.zeros_like(p)).add_(g**power)
            p.sub_(g / v.sqrt(), alpha=1e-3)  # <- here


@pytest.mark.parametrize("scale", [1e-30, torch.tensor(1e-30)])
def test_what_a_step_is_called_with_is_part_of_it(guard: Guard, scale: Any) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(6, 3)
        optimizer = Unscales(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).exp().sum().backward()
            optimizer.step(scale * 1e30 if step < 2 else scale, power=2 if step < 3 else 4)
            if step < 2:
                optimizer.state.clear()

    run = guard(body)

    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.op) == ("optimizer-underflow", 2, "aten.div.Tensor")
    assert first.location.line == marked(Unscales)
    assert [fix.action for fix in first.fixes if fix.verified] == ["add-epsilon"]


class Masters(Own):
    """Keeps its moments in float32 beside weights of float16, until a checkpoint is loaded."""

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        g = p.grad.float()
        v = state["v"] = 0.9 * state.get("v", torch.zeros_like(g)) + 0.1 * g * g
        return (g / (v.sqrt() + 1e-8)).to(p.dtype)  # <- here


@pytest.mark.parametrize("repairs", [False, True])
def test_state_that_a_checkpoint_has_brought_in_low_precision(guard: Guard, repairs: bool) -> None:
    def fresh() -> tuple[nn.Module, Masters]:
        model = nn.Linear(6, 3).half()
        return model, Masters(model.parameters())

    class Low(Masters):
        def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
            v = state["v"].mul_(0.9).add_(0.1 * p.grad * p.grad)
            return p.grad / (v.sqrt() + 1e-8)  # <- here

    def body() -> None:
        seed_everything()
        model, optimizer = fresh()
        for step in range(6):
            if step == 3:
                saved = optimizer.state_dict()
                optimizer = Low(model.parameters())
                optimizer.load_state_dict(saved)  # resumed
                if repairs:
                    for s, kept in zip(optimizer.state.values(), saved["state"].values(), strict=True):
                        s.update(kept)
            optimizer.zero_grad()
            (model(torch.randn(8, 6).half()).float().square().mean() * 1e-4).backward()
            optimizer.step()

    run = guard(body)

    assert run.faults == 0, run.stderr
    found = [i for i in run.report.incidents if i.cause == "optimizer-underflow"]
    assert bool(found) != repairs
    if found:
        assert found[0].step == 3
        assert "`v` was in float32 in the checkpoint" in found[0].explanation
        assert "# resumed" in found[0].explanation
        assert found[0].evidence["state_dtype"] == "float16"
        assert (found[0].fixes[0].action, found[0].fixes[0].verified) == ("fp32-parameters", True)


@pytest.mark.parametrize("kind", [Normalised, HandMadeAdam, FourthPower, StateCountsFromZero])
def test_what_stays_finite_is_not_accused(guard: Guard, kind: type[Own]) -> None:
    class Sound(kind):  # type: ignore[misc,valid-type]
        def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
            return super().update(p, state).nan_to_num(0.0, 0.0, 0.0)

    run = guard(lambda: train(Sound, 1.0, dead=True))

    assert run.faults == 0
    assert [i for i in run.report.incidents if i.cause == "optimizer-underflow"] == []


def test_gradients_that_are_bad_are_not_the_steps_doing(guard: Guard) -> None:
    run = guard(lambda: train(FourthPower, 1e40))

    assert run.faults == 0
    assert "optimizer-underflow" not in run.causes


def test_parameters_that_were_bad_before_are_not_its_doing(guard: Guard) -> None:
    """Memory that was never initialised, and that the model does not use."""

    def body() -> None:
        seed_everything()
        model = Net(1.0)
        model.spare = nn.Parameter(torch.full((3,), float("nan")))
        optimizer = HandMadeAdam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
            optimizer.step()

    run = guard(body)

    assert run.faults == 0
    assert "optimizer-underflow" not in run.causes


def test_looks_that_take_too_long_are_no_longer_made(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_steps, "FREE_STEPS", 1)
    monkeypatch.setattr(own_steps, "SHARE", 0.0)
    monkeypatch.setattr(own_steps, "FREE_SECONDS", 0.0)
    looked: list[int] = []
    counters_of = own_steps.counters_of
    monkeypatch.setattr(
        own_steps, "counters_of", lambda optimizer: looked.append(optimizer.count) or counters_of(optimizer)
    )
    unguarded = train(FourthPower, 1e12)
    looked.clear()

    run = guard(lambda: train(FourthPower, 1e12))

    assert run.faults == 0, run.stderr
    assert run.result == unguarded
    assert looked == [0]
    assert [i.cause for i in run.report.incidents if i.severity == "error"] != ["optimizer-underflow"]
    assert run.report.incidents, "the weights are bad in the next step, which is told all the same"


def test_the_first_steps_of_a_later_optimizer_are_looked_at_as_well(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_steps, "FREE_STEPS", 2)
    monkeypatch.setattr(own_steps, "SHARE", 0.0)
    monkeypatch.setattr(own_steps, "FREE_SECONDS", 0.0)

    def body() -> None:
        model = nn.Linear(6, 3)
        for kind in (HandMadeAdam, CountsFromZero):
            optimizer = kind(model.parameters())
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
                optimizer.step()

    run = guard(body)
    assert (run.faults, run.first.cause, run.first.step) == (0, "optimizer-underflow", 5)


class SecondMoments(Own):
    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        state["t"] = state.get("t", 0) + 1
        state["v"] = 0.9 * state.get("v", torch.zeros_like(p)) + 0.1 * p.grad**2
        return p.grad * state["v"].rsqrt()  # <- here


def unfrozen(is_held: bool, kind: type[torch.optim.Optimizer]) -> None:
    """Of a frozen layer one output has no gradient: its second moments are 0. `is_held`: the optimizer has it at first."""
    torch.manual_seed(0)
    frozen, head = nn.Linear(6, 4), nn.Linear(4, 3)
    with torch.no_grad():
        head.weight[:, 2] = 0.0
    frozen.requires_grad_(False)
    optimizer = kind((nn.Sequential(frozen, head) if is_held else head).parameters(), lr=1e-3)
    for step in range(12):
        if step == 8:
            frozen.requires_grad_(True)
            if not is_held:
                optimizer.add_param_group({"params": list(frozen.parameters())})
            with torch.no_grad():
                head.weight[:, 2] = 0.0
        optimizer.zero_grad()
        F.cross_entropy(head(frozen(torch.randn(8, 6))), torch.randint(3, (8,))).backward()
        optimizer.step()


@pytest.mark.parametrize("is_held", [True, False])
def test_the_first_steps_that_reach_an_unfrozen_part_are_looked_at(
    is_held: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_steps, "FREE_STEPS", 2)
    monkeypatch.setattr(own_steps, "SHARE", 0.0)
    monkeypatch.setattr(own_steps, "FREE_SECONDS", 0.0)
    run = guard(lambda: unfrozen(is_held, SecondMoments))
    assert (run.faults, run.first.cause, run.first.step) == (0, "optimizer-underflow", 8)
    assert "# <- here" in run.first.location.code


@pytest.mark.parametrize("is_held", [True, False])
def test_an_unfrozen_part_was_not_bad_from_the_beginning(
    is_held: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that step is not looked at, the weights are found bad in the next one."""
    monkeypatch.setattr(own_steps, "FREE_STEPS", 0)
    monkeypatch.setattr(own_steps, "SHARE", 0.0)
    monkeypatch.setattr(own_steps, "FREE_SECONDS", 0.0)
    run = guard(lambda: unfrozen(is_held, SecondMoments))
    assert (run.faults, run.first.cause, run.first.step) == (0, "nonfinite-parameter", 9)
    assert run.first.evidence["since_step"] == 8
    assert "initialisation" not in run.first.explanation


class Plain:
    """Adam of a script that knows no `torch.optim`: one number too small for float16."""

    def __init__(self, parameters: list[nn.Parameter], eps: float) -> None:
        self.parameters, self.eps, self.steps = parameters, eps, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for p, m, v in zip(self.parameters, self.first, self.second, strict=True):
            assert p.grad is not None
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            update = (m / (1 - 0.9**self.steps)) / ((v / (1 - 0.999**self.steps)).sqrt() + self.eps)
            p.sub_(update, alpha=1e-3)
            p.grad = None


def plain_class(eps: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).half()
    optimizer = Plain(list(model.parameters()), eps)
    for _ in range(6):
        x = torch.randn(32, 8)
        nn.functional.cross_entropy(model(x.half()).float(), x[:, :3].argmax(1)).backward()
        optimizer.step()


def trees(eps: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).half()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in weights.items()}
    for _ in range(6):
        x = torch.randn(32, 8)
        out = torch.func.functional_call(model, weights, (x.half(),))
        loss = nn.functional.cross_entropy(out.float(), x[:, :3].argmax(1))
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        with torch.no_grad():
            second = {name: 0.999 * v + 0.001 * gradients[name] * gradients[name] for name, v in second.items()}
            weights = {
                name: (p - 1e-3 * gradients[name] / (second[name].sqrt() + eps)).requires_grad_()
                for name, p in weights.items()
            }


@pytest.mark.parametrize("script", [plain_class, trees])
def test_optimizer_that_is_none_of_pytorchs(guard: Guard, script: Callable[[float], None]) -> None:
    run = guard(lambda: script(1e-8))
    assert run.faults == 0, run.stderr
    assert run.causes == ["optimizer-underflow"]
    incident = run.first
    assert (incident.step, incident.phase, incident.op, incident.dtype) == (
        0,
        "optimizer",
        "aten.div.Tensor",
        "float16",
    )
    assert "sqrt() + " in incident.location.code
    assert incident.fixes[0].action == "add-epsilon"
    assert incident.fixes[0].verified


@pytest.mark.parametrize("script", [plain_class, trees])
def test_the_same_with_an_epsilon_that_float16_has(guard: Guard, script: Callable[[float], None]) -> None:
    assert guard(lambda: script(1e-3)).causes == []


class Rowwise(Own):
    """A second moment for each row of a table, in the table's own precision; only rows with a gradient are moved."""

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        grad = p.grad.coalesce()
        rows, g = grad.indices()[0], grad.values()
        v = state.setdefault("v", p.new_zeros(p.shape[0]))
        v[rows] = v[rows] * 0.9 + g.square().mean(1) * 0.1
        moved = torch.zeros_like(p)
        moved[rows] = g / (v[rows].sqrt() + 1e-8)[:, None]  # <- here
        return moved


def test_rows_of_a_table_that_nothing_reads_for_long(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late in a run, too, the rows that a sparse gradient has moved are looked at, and the step is run again with it."""
    monkeypatch.setattr(own_steps, "FREE_STEPS", 4)
    bad = 20

    def body() -> None:
        seed_everything()
        table = nn.Embedding(40, 4, sparse=True, dtype=torch.float16)
        optimizer = Rowwise(table.parameters())
        for step in range(30):
            row = torch.tensor([30 if step == bad else step % 8])
            loss = table(row).float().square().mean() * (1e-4 if step == bad else 10.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity == "error"]
    assert (incident.cause, incident.step) == ("optimizer-underflow", bad)
    assert incident.location.code == "moved[rows] = g / (v[rows].sqrt() + 1e-8)[:, None]  # <- here"
    assert incident.fixes[0].verified
