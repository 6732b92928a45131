"""Thousands of small calls in one evaluation: the record is cut, and a figure that is bad in the end is still explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import fingerprint, seed_everything

from ampguard.capture.events import long_evaluation
from ampguard.capture.events.log import EventLog
from ampguard.capture.events.producers import Producers
from ampguard.capture.record import GlueOp

Guard = Callable[..., Any]
CALLS = 150
BAD = 83


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Evaluations are long sooner; how large the record became."""
    monkeypatch.setattr(long_evaluation, "CUT_FROM", 128)
    monkeypatch.setattr(long_evaluation, "CUT_AGAIN", 64)
    found: list[int] = []
    forget = EventLog.forget_finished

    def forgetting(self: EventLog, keep_all: bool, is_grad_enabled: bool) -> bool:
        found.append(self.size)
        return forget(self, keep_all, is_grad_enabled)

    monkeypatch.setattr(EventLog, "forget_finished", forgetting)
    return found


def train_and(evaluate: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    def body() -> dict[str, Any]:
        seed_everything()
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            evaluate(model)
        model.train()
        print(loss.item())  # (the last loss lives as long as the evaluation)
        return fingerprint(model, optimizer)

    return body


def negative_log(p: Tensor) -> Tensor:
    return -torch.log(p)


def probability(model: nn.Module, k: int) -> Tensor:
    logits = model(torch.ones(4))
    return torch.where(torch.tensor(k == BAD), torch.zeros(()), torch.softmax(logits, -1)[0])


def a_sum_in_place(model: nn.Module) -> None:
    total = torch.zeros(())
    for k in range(CALLS):
        total += negative_log(probability(model, k))
    print(f"{total / CALLS:.3f}")


def a_sum(model: nn.Module) -> None:
    total = 0.0
    for k in range(CALLS):
        total = total + negative_log(probability(model, k))
    assert isinstance(total, Tensor)
    print(total.item() / CALLS)


def a_list(model: nn.Module) -> None:
    figures = [negative_log(probability(model, k)) for k in range(CALLS)]
    print(torch.stack(figures).mean().item())


def each_by_itself(model: nn.Module) -> None:
    print(max(float(negative_log(probability(model, k))) for k in range(CALLS)))


@pytest.mark.parametrize("evaluate", [a_sum_in_place, a_sum, a_list, each_by_itself])
def test_one_bad_sample(evaluate: Callable[[nn.Module], None], guard: Guard, sizes: list[int]) -> None:
    run = guard(train_and(evaluate))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.mode, incident.step) == ("domain-error", "eval", 2), run.stderr
    assert incident.location is not None
    assert incident.location.function == "negative_log"
    assert any(fix.verified for fix in incident.fixes)
    assert max(sizes) < 200, "it grew with the evaluation"


def the_last_figure(model: nn.Module) -> None:
    means = [model(torch.ones(4)).mean().abs() for _ in range(CALLS)]
    print(torch.exp(torch.stack(means).sum() * 1e4).item())


def a_correlation(model: nn.Module) -> None:
    outputs = torch.stack([model(torch.ones(4))[0] for _ in range(CALLS)])
    outputs = outputs - outputs[0]
    print((outputs.sum() / outputs.norm()).item())


@pytest.mark.parametrize(("evaluate", "cause"), [(the_last_figure, "overflow"), (a_correlation, "division-by-zero")])
def test_only_what_is_made_of_all_of_them(
    evaluate: Callable[[nn.Module], None], cause: str, guard: Guard, sizes: list[int]
) -> None:
    run = guard(train_and(evaluate))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.mode) == (cause, "eval"), run.stderr
    assert incident.location is not None
    assert incident.location.function == evaluate.__name__
    assert max(sizes) < 200


def harmless(model: nn.Module) -> None:
    total, top, best = torch.zeros(()), torch.tensor(-torch.inf), torch.tensor(torch.inf)
    for k in range(CALLS):
        p = probability(model, k)
        logs = torch.log(p)
        total = total + torch.where(p > 0, logs, torch.zeros(()))
        top = torch.maximum(top, p)
    best = torch.minimum(best, total)
    print(total.item(), top.item(), best.item(), torch.isfinite(logs).item())


def test_infinities_that_reach_no_figure(guard: Guard) -> None:
    unguarded = train_and(harmless)()
    run = guard(train_and(harmless))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents, run.stderr
    assert run.result == unguarded


def test_rows_of_a_data_set_are_not_counted_at_each_call() -> None:
    producers = Producers()
    rows = torch.randn(500, 2)
    op = GlueOp(0, torch.ops.aten.unbind.int, (), {}, None, False)
    views = rows.unbind()
    producers.add_views(op, rows, views)
    producers.forget({0})
    known = producers.known
    producers.forget({0})
    assert producers.known is known
    assert producers.of(views[499], views[499]._version) is not None
