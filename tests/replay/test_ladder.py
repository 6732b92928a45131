"""Where a step cannot be replayed: said so, watched live the next time, and the training unharmed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, fingerprint, seed_everything

from ampguard.capture.events.arguments import SMALL_ARGUMENT
from ampguard.replay.arguments import is_replayable

Guard = Callable[..., Watched]
NAN = float("nan")


class Divides(nn.Module):
    """0/0 once `divisor` is 0 or an input is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.divisor = 1.0
        self.batches = [torch.randn(SMALL_ARGUMENT // 4 + 1, 4) for _ in range(5)]  # too large to be copied at a call

    def forward(self, x: Any) -> Tensor:
        x = x.clone() if isinstance(x, Tensor) else torch.stack(list(x))
        h = self.layer(x)
        return (h - h.detach()) / (x[0, 0].detach() * self.divisor)


def train(use: Callable[[Divides, torch.optim.Optimizer, int], Tensor]) -> Callable[[], Any]:
    """Five steps, the last three of which fail; a bad loss is differentiated and its gradients dropped."""

    def body() -> Any:
        seed_everything()
        model = Divides()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(5):
            use(model, optimizer, step).backward()
            if step < 2:
                optimizer.step()
            optimizer.zero_grad()
        return fingerprint(model, optimizer)

    return body


def generator_argument(model: Divides, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    model.divisor = float(step < 2)
    return model(row for row in torch.randn(3, 4)).mean()


class Scrub(nn.Module):
    """Overwrites what it is given: in a module, where no operator is taped."""

    def forward(self, x: Tensor) -> Tensor:
        return x.fill_(1.0)


def batch_that_fails_is_overwritten(model: Divides, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    x = model.batches[step]
    if step >= 2:
        x.data[0, 0] = 0.0
    loss = model(x).mean()
    if step >= 2:
        Scrub()(x)
    return loss


def batch_is_overwritten(model: Divides, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    model.divisor = float(step < 2)
    x = model.batches[step]
    loss = model(x).mean()
    if step >= 2:
        Scrub()(x)
    return loss


def each_batch_is_overwritten(model: Divides, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Known from the first step on: the later ones are copied."""
    model.divisor = float(step < 2)
    x = model.batches[step]
    loss = model(x).mean()
    Scrub()(x)
    return loss


def parameters_are_updated_in_between(model: Divides, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    model.divisor = float(step < 2)
    loss = model(torch.randn(3, 4)).mean()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("use", "rung", "failed_at"),
    [
        (generator_argument, "live-trace", 3),  # the next time
        (batch_that_fails_is_overwritten, "live-trace", 3),
        (batch_is_overwritten, "replay-inexact", 2),
        (each_batch_is_overwritten, "replay", 2),
    ],
)
def test_rung_that_an_answer_stands_on(use: Callable[..., Tensor], rung: str, failed_at: int, guard: Guard) -> None:
    body = train(use)
    plain = body()

    run = guard(body)

    assert run.faults == 0, run.stderr
    assert run.result == plain
    first = run.first
    assert (first.cause, first.op, first.step) == ("division-by-zero", "aten.div.Tensor", failed_at)
    assert first.evidence["rung"] == rung
    if rung == "live-trace":
        assert first.evidence["not_replayed_because"]
        assert not any(fix.verified for fix in first.fixes), "what was not replayed is not called verified"


def test_failure_that_was_caught_live_is_one_incident(guard: Guard) -> None:
    run = guard(train(generator_argument))
    assert run.causes == ["division-by-zero"]


def test_parameters_updated_between_the_call_and_its_backward(guard: Guard) -> None:
    body = train(parameters_are_updated_in_between)
    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.first.evidence["rung"] == "replay-inexact"


def test_failure_that_does_not_come_back_is_reported_as_that(guard: Guard) -> None:
    seed_everything()
    model = Divides()

    def body() -> None:
        model.divisor = 0.0
        model(row for row in torch.randn(3, 4)).mean().backward()
        model.divisor = 1.0
        model(torch.randn(3, 4)).mean().backward()

    run = guard(body)
    assert run.faults == 0
    assert run.causes == ["unexplained"]
    assert "generator" in run.first.evidence["not_replayed_because"]
    assert run.first.fixes == ()
    assert run.first.op is None


def test_what_can_be_replayed() -> None:
    assert not is_replayable(x for x in [1])
    assert not is_replayable(iter([1]))
    assert not is_replayable(map(str, [1]))
    with open(__file__) as file:
        assert not is_replayable(file)
    for value in (torch.ones(1), nn.Linear(1, 1), [1], "text", None, 3.0, range(3), {"a": 1}):
        assert is_replayable(value)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory"),
        torch.OutOfMemoryError("CUDA: no memory"),
        RuntimeError("no memory"),
        ValueError("no memory"),
        AssertionError("no memory"),
    ],
    ids=repr,
)
def test_module_that_raises_in_a_replay_only(error: Exception, guard: Guard) -> None:
    """The training goes on as without a guard, and something is said of the failure."""
    seed_everything()
    inputs: dict[int, Tensor] = {}  # kept, so that no clone gets the identity of one that is gone

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.tag = Tag()

        def forward(self, x: Tensor) -> Tensor:
            self.tag.note(id(x))
            return self.layer(x) / (0.0 if self.tag.step >= 2 else 1.0)

    class Tag:
        """Not restored by a replay: knows the script's own calls from replayed ones by the tensor that they get."""

        __slots__ = ("armed", "step")

        def __init__(self) -> None:
            self.step, self.armed = 0, False

        def note(self, identity: int) -> None:
            if self.armed and identity not in inputs:
                raise error

    def body(armed: bool) -> Any:
        seed_everything()
        model = Large()
        model.tag.armed = armed
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(5):
            model.tag.step = step
            x = torch.randn(3, 4)
            inputs[id(x)] = x
            held = model(x)
            loss = held.pow(2).mean()
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            if step < 2:
                optimizer.step()
        return fingerprint(model, optimizer, losses)

    plain = body(armed=False)
    run = guard(lambda: body(armed=True))
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.report.status == "incidents"
    assert run.first.evidence["rung"] == "live-trace"
    assert "memory" in run.first.evidence["not_replayed_because"]
    assert (run.first.cause, run.first.op) == ("division-by-zero", "aten.div.Tensor")


# --- wrappers ---------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.root = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.root(self.inner(x)) * 0.0 - 1.0)


def test_wrapper_of_data_parallel_training_is_looked_through(guard: Guard) -> None:
    model = nn.DataParallel(Wrapped())

    def body() -> None:
        model(torch.randn(3, 4)).mean().backward()

    run = guard(body)
    assert run.faults == 0
    assert (run.first.cause, run.first.module, run.first.op) == ("domain-error", "", "aten.sqrt.default")
    assert run.first.evidence["rung"] == "replay"


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_is_looked_through(guard: Guard, tmp_path: Path) -> None:
    """A replay of one rank must not wait for the others: it runs the user's module, not the wrapper."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        seed_everything()
        model = DistributedDataParallel(Wrapped())

        def body() -> Any:
            for _ in range(2):
                model(torch.randn(3, 4)).mean().backward()
            return fingerprint(model)

        run = guard(body)
        seed_everything()
        model = DistributedDataParallel(Wrapped())
        assert run.result == body()
    finally:
        distributed.destroy_process_group()
    assert run.faults == 0
    assert (run.first.cause, run.first.module, run.first.op) == ("domain-error", "", "aten.sqrt.default")
    assert run.first.evidence["rung"] == "replay"
    assert any(fix.verified for fix in run.first.fixes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_module_is_replayed_eagerly_without_a_graph_break(guard: Guard) -> None:
    from torch._dynamo.utils import counters

    def body() -> Any:
        torch._dynamo.reset()
        counters.clear()
        seed_everything()
        inner = Wrapped()
        model = torch.compile(inner, backend="eager")
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).mean().backward()
            optimizer.step()
        facts = {"breaks": dict(counters["graph_break"]), "graphs": counters["stats"]["unique_graphs"]}
        return facts, fingerprint(inner, optimizer)

    plain = body()
    run = guard(body)
    torch._dynamo.reset()
    assert run.faults == 0, run.stderr
    assert plain[0]["graphs"] == 1
    assert run.result == plain
    assert (run.first.cause, run.first.module, run.first.op) == ("domain-error", "", "aten.sqrt.default")
    assert run.first.location is not None
    assert run.first.location.code.startswith("return torch.sqrt(")
