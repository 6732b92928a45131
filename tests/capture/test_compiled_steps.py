"""A compiled training step: left as it is, recorded as a call, and a failing one explained by running it eagerly."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import fingerprint

import ampguard
from ampguard.incident import Incident, Report

Step = Callable[..., Any]
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def guarded(
    guarded: Callable[[Callable[[], Any]], tuple[Any, Report]],
) -> Callable[[Callable[[], Any]], tuple[Any, Report]]:
    """The body must leave the same behind as without the guard."""

    def run(body: Callable[[], Any]) -> tuple[Any, Report]:
        plain = body()
        torch._dynamo.reset()
        result, report = guarded(body)
        assert result == plain
        return result, report

    return run


def only(report: Report) -> Incident:
    (incident,) = report.incidents
    return incident


def place(incident: Incident) -> tuple[str, str | None, str | None, str]:
    assert incident.location is not None
    return incident.cause, incident.module, incident.op, incident.location.code


class Length(nn.Module):
    def forward(self, v: Tensor) -> Tensor:
        length = (v * v).sum(-1, keepdim=True).sqrt()
        return v / (length + 1e-6)


class Cube(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * h * h


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.middle = middle
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.first(x), 0.2, self.training)
        return self.last(self.middle(h) + 0 * self.norm(h))  # type: ignore[no-any-return]


@BACKENDS
def test_loss_is_explained_by_the_line_that_made_it(guarded: Any, backend: str) -> None:
    def body() -> Any:
        torch.manual_seed(0)
        model = Net(nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        @torch.compile(backend=backend)
        def step(x: Tensor) -> None:
            loss = model(x).square().mean()
            loss = loss + x.sum(1).log().mean()
            loss.backward()

        for i in range(5):
            step(torch.full((8, 4), -1.0) if i == 3 else torch.rand(8, 4) + 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return fingerprint(model, optimizer)

    incident = only(guarded(body)[1])
    assert (incident.step, incident.mode, incident.phase) == (3, "train", "loss")
    assert place(incident) == ("domain-error", None, "aten.log.default", "loss = loss + x.sum(1).log().mean()")
    assert any(fix.verified for fix in incident.fixes)


@BACKENDS
def test_gradient_is_explained_and_those_of_the_script_stay_theirs(guarded: Any, backend: str) -> None:
    """The step clears its gradients in place: the replay clears copies."""

    def body() -> Any:
        torch.manual_seed(0)
        model = Net(Length())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        calls = [0]

        @torch.compile(backend=backend)
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            calls[0] += 1
            loss = functional.smooth_l1_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        for i in range(4):
            x, y = torch.randn(6, 4), torch.randn(6, 2)
            if i == 2:
                x[1] = 0.0
            step(x, y)
        return fingerprint(model, optimizer), calls, torch.rand(2).tolist()

    incident = only(guarded(body)[1])
    assert (incident.step, incident.phase) == (2, "backward")
    cause, module, _, code = place(incident)
    assert (cause, module) == ("singular-gradient", "middle")
    assert code == "length = (v * v).sum(-1, keepdim=True).sqrt()"
    assert any(fix.verified for fix in incident.fixes)


@BACKENDS
def test_scaled_loss_in_float16_under_a_compiled_region(guarded: Any, backend: str) -> None:
    """The scaler is not called needless: compiled code has switched autocast on, unseen."""

    def body() -> Any:
        torch.manual_seed(0)
        model = Net(Cube())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        compiled = torch.compile(step, backend=backend)
        for i in range(6):
            compiled(torch.randn(6, 4) * (200.0 if i == 4 else 1.0), torch.randint(0, 2, (6,)))
        return fingerprint(model, optimizer), scaler.get_scale()

    incident = only(guarded(body)[1])
    assert incident.step == 4
    assert place(incident) == ("fp16-overflow", "middle", "aten.mul.Tensor", "return h * h * h")
    assert any(fix.action == "force-fp32" and fix.verified for fix in incident.fixes)


def test_second_of_two_losses_on_updated_weights(guarded: Any) -> None:
    def body() -> Any:
        torch.manual_seed(0)
        made, judged = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (judged, made)]

        @torch.compile(backend="aot_eager")
        def step(real: Tensor, z: Tensor, factor: float) -> None:
            first = judged(made(z).detach()).mean() - judged(real).mean()
            first.backward()
            optimizers[0].step()
            score = judged(made(z) * factor)
            second = (1 - score).log().mean()
            second.backward()
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()

        for i in range(4):
            step(torch.randn(8, 2), torch.randn(8, 3), 1e6 if i == 2 else 1.0)
        return fingerprint(made), fingerprint(judged)

    incident = only(guarded(body)[1])
    assert incident.step == 2
    assert place(incident) == ("domain-error", None, "aten.log.default", "second = (1 - score).log().mean()")
    assert any(fix.verified for fix in incident.fixes)


def test_method_of_a_trainer(guarded: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Net(Length())
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.step = torch.compile(self.differentiate, backend="eager")

        def differentiate(self, batch: dict[str, Tensor]) -> Tensor:
            self.optimizer.zero_grad()
            loss = self.model(batch["x"]).mean()
            loss.backward()
            return loss

    def body() -> Any:
        torch.manual_seed(0)
        trainer = Trainer()
        for i in range(3):
            trainer.step({"x": torch.zeros(5, 4) if i == 1 else torch.randn(5, 4)})
            trainer.optimizer.step()
        return fingerprint(trainer.model, trainer.optimizer)

    incident = only(guarded(body)[1])
    assert (incident.step, incident.cause, incident.module) == (1, "singular-gradient", "middle")


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.linear(x).relu() + (0.1 if x.sum() > -1e3 else 0.0)).mean()


@pytest.mark.parametrize("raises", [True, False])
def test_loss_that_the_step_itself_refuses(guarded: Any, tmp_path: Path, raises: bool) -> None:
    """It is never differentiated: the step returns it, or ends the script."""

    def body() -> Any:
        torch.manual_seed(0)
        model = Log()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        @torch.compile(backend="eager")
        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x)
            if torch.isfinite(loss):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            elif raises:
                raise ArithmeticError("the loss is not finite")
            return loss

        return [math.isfinite(step(torch.randn(8, 4) - (1e4 if i == 2 else 0)).item()) for i in range(4)]

    if raises:
        with pytest.raises(ArithmeticError), ampguard.watch(out=tmp_path / "run") as session:
            body()
        assert session.report is not None
        report = session.report
    else:
        result, report = guarded(body)
        assert result == [True, True, False, True]
    incident = only(report)
    assert incident.step == 2
    assert place(incident)[:3] == ("domain-error", "", "aten.log.default")
    assert any(fix.verified for fix in incident.fixes)


def test_compiled_evaluation(guarded: Any) -> None:
    def body() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Cube()).eval()

        @torch.compile(backend="aot_eager")
        def evaluate(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return model(x)  # type: ignore[no-any-return]

        with torch.no_grad():
            return [evaluate(torch.randn(4, 4) * factor).isfinite().all().item() for factor in (1, 100)]

    result, report = guarded(body)
    assert result == [True, False]
    assert (only(report).mode, only(report).module) == ("eval", "1")
    assert place(only(report))[3] == "return h * h * h"


def test_compiled_update_is_no_forward_pass(guarded: Any) -> None:
    """Else the gradients would be taken for dropped, and the weights that they spoil for another failure."""

    def body() -> Any:
        torch.manual_seed(0)
        model = Net(Length())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        @torch.compile(backend="aot_eager")
        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for i in range(4):
            model(torch.zeros(5, 4) if i == 2 else torch.randn(5, 4)).mean().backward()
            update()
        return fingerprint(model, optimizer)

    incident = only(guarded(body)[1])
    assert (incident.step, incident.cause, incident.module) == (2, "singular-gradient", "middle")
    assert incident.occurrences == 1


def steps_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Step]:
    """Healthy training steps; each calls functions that the guard has wrapped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def clipped(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    def scaled(x: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def by_hand(x: Tensor) -> None:
        gradients = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.01 * gradient.clamp(-1, 1))

    return {"clipped": clipped, "scaled": scaled, "by_hand": by_hand}


@pytest.mark.parametrize("name", ["clipped", "scaled", "by_hand"])
def test_healthy_steps_make_the_same_graphs(guarded: Any, name: str) -> None:
    """Neither are our frames compiled, nor is what the script calls through ours left out, nor is there one break more."""
    from torch._dynamo.utils import counters

    breaks = []

    def body() -> Any:
        counters.clear()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        step = torch.compile(steps_of(net, optimizer)[name], backend="aot_eager")
        for _ in range(4):
            step(torch.randn(8, 4))
        breaks.append(sum(counters["graph_break"].values()))
        return fingerprint(net), counters["stats"]["unique_graphs"]

    _, report = guarded(body)
    assert report.incidents == ()
    assert breaks[1] <= breaks[0]


@BACKENDS
def test_a_step_that_was_compiled_before_the_guard_runs_on(backend: str, tmp_path: Path) -> None:
    """Dynamo puts back the dispatch keys with which a call began: it must not begin under our tape."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.compile(backend=backend)
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()

    with ampguard.watch(out=tmp_path / "run") as watched:
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.rand(8, 4)
            step(x - x.mean())
            optimizer.step()
    assert watched.report is not None
    assert (watched.report.steps, watched.report.incidents) == (6, ())


class Machine:
    """Handed to the compiled function, which itself names nothing that differentiates."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05)

    def run(self, x: Tensor) -> Tensor:
        loss = (1 / self.net(x).var(0)).sum()  # <- here
        self.finish(loss)
        return loss.detach()

    def finish(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_a_method_of_an_argument_differentiates(guarded: Any) -> None:
    def body() -> Any:
        torch.manual_seed(0)
        machine = Machine()
        once = torch.compile(lambda engine, x: engine.run(x), backend="aot_eager")
        for step in range(5):
            x = torch.randn(6, 4)
            once(machine, x[:1].expand(6, 4).contiguous() if step == 4 else x)
        return fingerprint(machine.net)

    incident = guarded(body)[1].incidents[0]
    assert (incident.cause, incident.step) == ("division-by-zero", 4)
    assert incident.location is not None
    assert incident.location.code.endswith("# <- here")
