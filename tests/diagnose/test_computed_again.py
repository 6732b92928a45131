"""Late in a run, what was not recorded is computed again from the script's own variables, where its code only computes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched

from ampguard.capture.glue import schedule
from ampguard.capture.root_calls import pace
from ampguard.diagnose.code.pure import is_pure

Guard = Callable[..., Watched]
BAD = 9


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is free, and what follows a call without gradients is never recorded."""
    for where in (pace, schedule):
        monkeypatch.setattr(where, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(pace, "SHARE", 0.0)
    monkeypatch.setattr(pace, "BEHIND_SHARE", 0.0)
    monkeypatch.setattr(schedule, "GLUE_TIME_SHARE", 0.0)


def standardized(rewards: Tensor) -> Tensor:
    centred = rewards - rewards.mean()
    return centred / rewards.std()


def shuffled(rewards: Tensor) -> Tensor:
    return standardized(rewards[torch.randperm(len(rewards))])


class Scaler:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def factor(self) -> float:
        self.asked += 1
        return 1.0


def reinforce(step: Callable[..., None]) -> None:
    """Rewards that are all the same, once, late."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    for update in range(BAD + 2):
        with torch.no_grad():
            seen = torch.stack([x for x in torch.randn(6, 4) if policy(x) is not None])
        rewards = torch.zeros(6) if update == BAD else torch.rand(6)
        step(policy, optimizer, seen, rewards)


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, gain: Tensor) -> None:
    loss = -(F.log_softmax(policy(seen), 1)[:, 0] * gain).mean()
    optimizer.zero_grad()
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()


def of_a_statement(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, rewards: Tensor) -> None:
    gain = (rewards - rewards.mean()) / rewards.std()
    learn(policy, optimizer, seen, gain)


def of_a_function(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, rewards: Tensor) -> None:
    gain = standardized(rewards)
    learn(policy, optimizer, seen, gain)


def of_two_statements(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, rewards: Tensor) -> None:
    share = rewards / rewards.sum()
    gain = share * len(rewards) - 0.5
    learn(policy, optimizer, seen, gain)


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (of_two_statements, "share = rewards / rewards.sum()"),
        (of_a_statement, "gain = (rewards - rewards.mean()) / rewards.std()"),
        (of_a_function, "return centred / rewards.std()"),
    ],
)
def test_what_the_code_says_is_explained(guard: Guard, step: Callable[..., None], code: str) -> None:
    run = guard(lambda: reinforce(step))
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.op) == ("division-by-zero", BAD, "aten.div.Tensor")
    assert incident.location is not None
    assert incident.location.code == code
    assert incident.evidence["computed_again"] is True
    assert any(fix.verified and "1e-6" in fix.how for fix in incident.fixes)


def drawn(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, rewards: Tensor) -> None:
    gain = shuffled(rewards)
    learn(policy, optimizer, seen, gain)


def assigned_twice(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, rewards: Tensor) -> None:
    gain = rewards * 2
    gain = (gain - gain.mean()) / gain.std()
    learn(policy, optimizer, seen, gain)


def written_since(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, rewards: Tensor) -> None:
    gain = (rewards - rewards.mean()) / rewards.std()
    rewards += torch.arange(6)
    learn(policy, optimizer, seen, gain)


@pytest.mark.parametrize("step", [drawn, assigned_twice, written_since])
def test_what_the_code_does_not_say_is_not_claimed(guard: Guard, step: Callable[..., None]) -> None:
    run = guard(lambda: reinforce(step))
    assert run.faults == 0, run.stderr
    assert run.causes == ["nonfinite-input"]
    assert "computed_again" not in run.first.evidence


def test_nothing_of_the_scripts_is_asked_twice(guard: Guard) -> None:
    scaler = Scaler()

    def step(policy: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, rewards: Tensor) -> None:
        gain = scaler.factor * (rewards - rewards.mean()) / rewards.std()
        learn(policy, optimizer, seen, gain)

    run = guard(lambda: reinforce(step))
    assert run.faults == 0, run.stderr
    assert scaler.asked == BAD + 2


NAMES: dict[str, Any] = {
    "x": torch.ones(3),
    "torch": torch,
    "F": F,
    "n": 3,
    "layer": nn.Linear(2, 2),
    "scaler": Scaler(),
    "standardized": standardized,
    "shuffled": shuffled,
    "pairs": {"a": torch.ones(2)},
    "print": print,
}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("(x - x.mean()) / x.std()", True),
        ("torch.log(x / n) + x[1:].sum() * pairs['a'].mean()", True),
        ("F.softmax(x, dim=0) @ x", True),
        ("torch.linalg.norm(x)", True),
        ("standardized(x)", True),
        ("layer.weight.norm() / len(x)", True),
        ("shuffled(x)", False),
        ("x.div_(2)", False),
        ("x.bernoulli() / 2", False),
        ("torch.randn(3) / x", False),
        ("torch.add(x, x, out=x)", False),
        ("F.relu(x, inplace=True)", False),
        ("F.dropout(x)", False),
        ("layer(x)", False),
        ("scaler.factor * x", False),
        ("print(x)", False),
        ("unknown(x)", False),
        ("[x for _ in range(3)]", False),
        ("x.backward()", False),
        ("torch.manual_seed(0)", False),
        ("(y := x)", False),
    ],
)
def test_what_may_be_computed_once_more(code: str, expected: bool) -> None:
    assert is_pure(ast.parse(code, mode="eval").body, NAMES) is expected
