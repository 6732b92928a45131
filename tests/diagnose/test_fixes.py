"""A fix is called verified only where the failing step was replayed with it; the float32 region is the smallest."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, seed_everything

from ampguard.diagnose import budget
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.cases import examiner
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, find_cause
from ampguard.diagnose.fixes.trying import tried, verified_fixes
from ampguard.diagnose.locate.locating import locate
from ampguard.incident import Fix
from ampguard.replay.rebuild import Replayer
from ampguard.replay.variants import Variant

Guard = Callable[..., Watched]
PLENTY = Budget(time.perf_counter() + 1e6)


class Squares(nn.Module):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.layer.weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2)


class Tower(nn.Module):
    """Independent branches; those with a large gain leave float16 when they square."""

    def __init__(self, gains: list[float]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Squares(gain) for gain in gains)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(branch(x) * 1e-5) for branch in self.branches]).sum()


def failing(gains: list[float]) -> Callable[[], None]:
    seed_everything()
    model = Tower(gains)

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 4))
        (loss * 0 + loss).backward()

    return body


def at_failure(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, body: Callable[[], None], look: Callable[..., Any]
) -> Any:
    """`look(evidence)` at the moment of the failure, in place of an explanation."""
    seen: list[Any] = []
    original = examiner.explain

    def explain(evidence: Evidence, *more: Any) -> Any:
        seen.append(look(evidence))
        return original(evidence, *more)

    monkeypatch.setattr(examiner, "explain", explain)
    run = guard(body)
    assert run.faults == 0, run.stderr
    return seen[0]


@pytest.mark.parametrize(
    ("gains", "named"),
    [
        ([1.0, 100.0, 1.0], ["branches.1"]),
        ([100.0, 1.0, 100.0], ["branches.0", "branches.2"]),
        ([100.0, 100.0, 100.0], ["branches.0", "branches.1", "branches.2"]),
    ],
    ids=["one", "two independent", "all"],
)
def test_smallest_float32_region_is_named_and_nothing_more(gains: list[float], named: list[str], guard: Guard) -> None:
    first = guard(failing(gains)).first
    assert first.cause == "fp16-overflow"
    (fix,) = [fix for fix in first.fixes if fix.action == "force-fp32"]
    assert fix.verified is True
    assert sorted(str(fix.target).split(", ")) == named
    assert all(name.rpartition(".")[2] in fix.how for name in named)


def test_region_is_widened_where_the_module_alone_does_not_do(guard: Guard) -> None:
    """The operator is in the inner module, but the value that does not fit is cast to float16 again by the outer one."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 300.0

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.inner = Inner()
            self.last = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.layer(x) * 0 + 300.0) / 3e4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(x)

    seed_everything()
    model = Net()

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 4)).float().mean()
        loss.backward()

    first = guard(body).first
    assert (first.cause, first.module) == ("fp16-overflow", "outer.inner")
    (fix,) = [fix for fix in first.fixes if fix.action == "force-fp32"]
    assert fix.verified is True
    assert fix.target in ("outer.inner", "outer")


def test_trial_decides_what_is_verified(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(evidence: Evidence) -> Variant:
        raise ValueError("no such thing")

    proposals = {
        "cures": Proposal("disable-amp", None, "", trial=lambda e: Variant(convert=torch.float32)),
        "cures not": Proposal("clamp", None, "", trial=lambda e: Variant()),
        "cannot be tried": Proposal("load-weights", None, ""),
        "raises": Proposal("clamp", None, "", trial=raises),
    }

    def look(evidence: Evidence) -> dict[str, Fix | None]:
        return {name: tried(evidence, proposal, PLENTY) for name, proposal in proposals.items()}

    fixes = at_failure(guard, monkeypatch, failing([100.0]), look)
    assert {name: fix.verified for name, fix in fixes.items()} == {
        "cures": True, "cures not": False, "cannot be tried": None, "raises": None,
    }  # fmt: skip
    assert fixes["cures"].outcome.startswith("the replayed step is finite, its gradients too; the loss is ")
    assert fixes["cures not"].outcome == "the replayed step is still bad"
    assert "no such thing" in fixes["raises"].outcome


def test_spent_budget_leaves_fixes_untried(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []

    def look(evidence: Evidence) -> Any:
        finding = find_cause(evidence)
        assert isinstance(finding, Finding)
        run = Replayer.run
        monkeypatch.setattr(Replayer, "run", lambda *a, **k: replays.append(1) or run(*a, **k))
        fixes = verified_fixes(evidence, finding, Budget(0.0))
        count = len(replays)
        monkeypatch.setattr(Replayer, "run", run)
        return fixes, count

    fixes, count = at_failure(guard, monkeypatch, failing([100.0]), look)
    assert count == 0
    assert fixes
    tried = {fix.action: fix.verified for fix in fixes}
    assert tried.pop("disable-amp"), "the cause has asked for the step in float32 already"
    assert set(tried.values()) == {None}
    assert all(fix.how for fix in fixes), "what to change is said all the same"


def test_float32_tried_once_is_known_when_time_is_up(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []

    def look(evidence: Evidence) -> Any:
        monkeypatch.delitem(vars(evidence), "step_in_float32", raising=False)
        evidence.seen_in_float32 = None
        float32 = Proposal("disable-amp", None, "", trial=lambda e: e.all_in_float32)
        first = tried(evidence, float32, PLENTY)
        run = Replayer.run
        monkeypatch.setattr(Replayer, "run", lambda *a, **k: replays.append(1) or run(*a, **k))
        again = tried(evidence, float32, Budget(0.0))
        monkeypatch.setattr(Replayer, "run", run)
        return first, again

    first, again = at_failure(guard, monkeypatch, failing([100.0]), look)
    assert first.verified
    assert first == again
    assert not replays


def test_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(budget, "SCHEDULER", tmp_path / "none")
    now = time.perf_counter()
    assert not Budget.for_step(0.001, now).is_spent
    assert Budget.for_step(0.001, now - 3.0).is_spent, "a small step may take three seconds in all"
    assert not Budget.for_step(1.0, now - 3.0).is_spent
    assert Budget.for_step(1.0, now - 30.0).is_spent


def test_fix_is_what_plain_pytorch_confirms(guard: Guard) -> None:
    """The loss that a verified fix promises is the loss that the changed model gives."""
    seed_everything()
    fix = next(f for f in guard(failing([1.0, 100.0])).first.fixes if f.action == "disable-amp")
    seed_everything()
    expected = Tower([1.0, 100.0])(torch.ones(2, 4))
    assert fix.outcome == f"the replayed step is finite, its gradients too; the loss is {expected.item():.4g}"


def test_step_is_located_once_more_without_side_effects(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(evidence: Evidence) -> Any:
        assert evidence.replayer is not None
        again = [locate(evidence.bad, evidence.replayer) for _ in range(2)]
        return [(e.op.index, e.op.name, e.flat, e.kind) for e in (evidence, *again) if e is not None]

    found = at_failure(guard, monkeypatch, failing([1.0, 100.0]), look)
    assert len(found) == 3
    assert len(set(found)) == 1


def test_bound_that_is_not_enough_is_tightened(guard: Guard) -> None:
    """exp(80) is a number, its square is none."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 100.0)

    def body() -> None:
        (model(torch.ones(3, 2)).exp() ** 2).mean().backward()

    first = guard(body).first
    assert first.cause == "overflow"
    assert [(fix.how, fix.verified) for fix in first.fixes if fix.action == "clamp"] == [
        ("(model(torch.ones(3, 2)).clamp(max=10).exp() ** 2).mean().backward()", True)
    ]


class Likelihood(nn.Module):
    """A criterion beside the model: its epsilon is 0 in float16."""

    def forward(self, scores: Tensor) -> Tensor:
        return -torch.log(scores.half().softmax(-1)[:, 0] + 1e-24).mean()


def test_a_criterion_is_called_by_its_class(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model, criterion = nn.Linear(4, 3), Likelihood()
        with torch.no_grad():
            model.bias[0] = -40.0
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(torch.ones(5, 4)))
        loss.backward()

    fix = next(fix for fix in guard(body).first.fixes if fix.action == "force-fp32")
    assert fix.verified is True
    call, cast = fix.how.splitlines()
    assert call.startswith(
        "leave autocast for this one call: "
        'loss = torch.autocast("cpu", enabled=False)(criterion)(model(torch.ones(5, 4)).float())  # test_fixes.py:'
    )
    assert cast.startswith("and leave out the cast to float16 in: return -torch.log(scores.half()")


class Reader(nn.Module):
    """Embeds its tokens, which are whole numbers: `x.float()` would be an error."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.full((7, 4), 300.0))

    def forward(self, tokens: Tensor) -> Tensor:
        found = nn.functional.embedding(tokens, self.words)
        return (found @ found.transpose(-2, -1)).mean()


def test_a_model_that_is_given_a_batch_is_called_as_it_was(guard: Guard) -> None:
    def body() -> None:
        model, tokens = Reader(), torch.tensor([[1, 2, 3]])
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(tokens)
        loss.backward()

    fix = next(fix for fix in guard(body).first.fixes if fix.action == "force-fp32")
    assert fix.verified is True
    assert fix.how.startswith('with torch.autocast("cpu", enabled=False): loss = model(tokens)  # test_fixes.py:')
