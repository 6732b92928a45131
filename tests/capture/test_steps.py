"""Counting iterations: an attempted step of every optimizer in use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from watching import Watched

from ampguard.capture.steps import StepCounter

Guard = Callable[..., Watched]


def optimizers(count: int) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(count)]


def counter(created: list[torch.optim.Optimizer]) -> StepCounter:
    steps = StepCounter()
    for optimizer in created:
        steps.created(optimizer)
    return steps


@pytest.mark.parametrize(
    ("pattern", "iterations"),
    [
        ("a" * 7, 7),
        ("ab" * 5, 5),
        ("aab" * 4, 4),
        ("aaaaab" * 4, 4),
        ("abb" * 4, 4),
        ("abc" * 4, 4),
        ("abacab", 1),
        (("aabb" + "ab" * 3) * 5, 20),
        (("ab" * 3 + "aabb") * 5, 20),
        (("ab" * 3 + "aab") * 5, 20),
        (("ab" * 15 + "abb") * 3, 48),
    ],
    ids=[
        "one",
        "gan",
        "n_critic 2",
        "n_critic 5",
        "generator twice",
        "three",
        "unfinished",
        "lazy penalties first",
        "lazy penalties last",
        "lazy penalty of one",
        "lazy penalty of the last",
    ],
)
def test_iteration_ends_when_the_last_optimizer_has_stepped(pattern: str, iterations: int) -> None:
    letters = sorted(set(pattern))
    made = dict(zip(letters, optimizers(len(letters)), strict=True))
    steps = counter(list(made.values()))
    for letter in pattern:
        steps.attempted(made[letter])
    assert steps.count == iterations


def test_count_never_falls_when_an_optimizer_joins_late() -> None:
    early, late = optimizers(2)
    steps = counter([early, late])
    for _ in range(30):
        steps.attempted(early)
    counted = steps.count
    for _ in range(10):
        steps.attempted(early)
        steps.attempted(late)
        assert steps.count >= counted
        counted = steps.count
    assert counted >= 38


@pytest.mark.parametrize("known", ["made under the guard", "made before"])
@pytest.mark.parametrize(
    ("pattern", "iterations"),
    [
        ("a" * 5 + "b" * 5, 10),
        ("a" * 20 + "b" * 20, 40),
        ("a" * 20 + "b" * 20 + "a" * 20, 60),
        ("ab" * 10 + "a" * 10, 20),
        ("ab" * 10 + "b" * 10, 20),
        ("a" * 30 + "ab" * 10, 40),
        ("ab" * 10 + "aab" * 10, 20),
        ("abc" * 5 + "ab" * 5, 10),
        ("a" * 12 + "b" * 12 + "c" * 12, 36),
    ],
)
def test_optimizers_that_stop_and_that_follow_each_other(pattern: str, iterations: int, known: str) -> None:
    letters = sorted(set(pattern))
    made = dict(zip(letters, optimizers(len(letters)), strict=True))
    steps = counter(list(made.values()) if known == "made under the guard" else [])
    for letter in pattern:
        steps.attempted(made[letter])
    assert steps.count == iterations


@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_an_optimizer_made_when_the_others_are_done_begins_a_phase(length: int) -> None:
    steps = StepCounter()
    kept = []
    for phase in range(3):
        kept += optimizers(2)
        for optimizer in kept[-2:]:
            steps.created(optimizer)
        for step in range(length):
            assert not steps.attempted(kept[-2])
            assert steps.attempted(kept[-1])
            assert steps.count == phase * length + step + 1


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_of_optimizers_from_before_the_guard_the_last_ends_the_iteration(turns: int) -> None:
    first, last = optimizers(2)
    steps = StepCounter()
    for _ in range(6):
        ends = [steps.attempted(first) for _ in range(turns)] + [steps.attempted(last)]
    assert ends == [False] * turns + [True]
    assert steps.count == 6


def test_first_step_ends_no_iteration_before_the_second_optimizer_has_stepped() -> None:
    a, b = optimizers(2)
    steps = counter([a, b])
    assert not steps.attempted(a)
    assert steps.attempted(b)


@pytest.mark.parametrize("since", [1, 3, 40, None])
@pytest.mark.parametrize("used", ["ab", "abc", "aab"])
def test_an_iteration_begins_where_the_loop_does_whoever_is_yet_to_come(used: str, since: int | None) -> None:
    """Another optimizer was made with those that step, and steps from some iteration on, or never."""
    made = dict(zip("abcz", optimizers(4), strict=True))
    steps = counter([made[letter] for letter in sorted({*used, "z"})])
    for step in range(60):
        if step >= 4 and (
            since is None or not since <= step < since + 16
        ):  # (it may turn out to belong to a longer one)
            assert steps.count == step
        for letter in used + ("z" if since is not None and step >= since else ""):
            steps.attempted(made[letter])


def test_optimizer_that_is_never_used_is_not_waited_for() -> None:
    used, unused = optimizers(2)
    steps = counter([used, unused])
    for _ in range(5):
        steps.attempted(used)
    assert steps.count == 5


def test_optimizer_that_is_gone_is_not_waited_for() -> None:
    used, unused = optimizers(2)
    steps = counter([used, unused])
    del unused
    for _ in range(3):
        steps.attempted(used)
    assert steps.count == 3


def test_backward_stands_for_the_step_until_an_optimizer_is_known() -> None:
    (optimizer,) = optimizers(1)
    steps = StepCounter()
    assert steps.differentiated()
    assert steps.count == 1
    steps.attempted(optimizer)
    assert steps.count == 1
    assert not steps.differentiated()


# --- in real loops --------------------------------------------------------------------------------------------------


def test_manual_update_without_an_optimizer(guard: Guard) -> None:
    model = nn.Linear(2, 1)

    def body() -> None:
        for _ in range(5):
            model(torch.randn(3, 2)).pow(2).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
                    p.grad = None

    assert guard(body).report.steps == 5


def test_accumulation_window_is_one_iteration(guard: Guard) -> None:
    model = nn.Linear(2, 1)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(4):
                model(torch.randn(3, 2)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert guard(body).report.steps == 3


def test_step_that_the_scaler_skips_counts(guard: Guard) -> None:
    model = nn.Linear(2, 1)

    def body() -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(3, 2)).pow(2).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    run = guard(body)
    assert run.result < 2.0**40, "some step must have been skipped"
    assert run.report.steps == 4


def test_optimizer_made_before_the_guard_counts(guard: Guard) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()

    assert guard(body).report.steps == 3


def test_closure_is_one_iteration(guard: Guard) -> None:
    model = nn.Linear(2, 1)

    def body() -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for _ in range(2):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(3, 2)).pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    run = guard(body)
    assert run.faults == 0
    assert run.report.steps == 2


def test_steps_option_ends_the_block_cleanly(guard: Guard) -> None:
    model = nn.Linear(2, 1)
    done = []

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(100):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()
            done.append(step)

    run = guard(body, steps=6)
    assert run.report.steps == 6 == len(done)
    assert run.report.status == "clean"


def test_optimizers_that_are_made_as_they_step_share_the_iteration_of_their_gradients() -> None:
    steps = StepCounter()
    kept: list[torch.optim.Optimizer] = []
    for step in range(5):
        steps.backwards += 1
        for index in range(3 if step < 2 else 4):  # one more parameter is met in the third iteration
            if index == len(kept):
                kept += optimizers(1)
                steps.created(kept[-1])
            steps.attempted(kept[index])
        assert steps.count == step + 1


def test_optimizer_made_for_new_gradients_begins_a_phase() -> None:
    first, second = optimizers(2)
    steps = counter([first])
    for _ in range(3):
        steps.backwards += 1
        steps.attempted(first)
    steps.created(second)
    for _ in range(3):
        steps.backwards += 1
        assert steps.attempted(second)
    assert steps.count == 6


def test_one_optimizer_per_parameter_made_when_it_is_first_needed(guard: Guard) -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        made: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for step in range(6):
            loss = model(torch.ones(2, 3)).sum() / (0.0 if step == 4 else 1.0)
            loss.backward()
            for p in model.parameters():
                if p not in made:
                    made[p] = torch.optim.Adam([p], lr=1e-3)
                made[p].step()
                made[p].zero_grad()

    run = guard(body)
    assert run.faults == 0
    assert run.first.step == 4
    assert run.report.steps == 6


def test_backward_passes_before_an_optimizer_is_made_are_no_steps() -> None:
    steps = StepCounter()
    for _ in range(5):  # a fit by SciPy
        assert steps.differentiated()
    assert steps.count == 5
    (optimizer,) = optimizers(1)
    steps.created(optimizer)
    assert steps.count == 0
    assert not steps.differentiated()
    assert steps.attempted(optimizer)
    assert steps.count == 1
