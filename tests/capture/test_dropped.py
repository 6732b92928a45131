"""Bad gradients that a loop drops by itself, without any step: their cause is told, wherever they are cleared or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, fingerprint, seed_everything

from ampguard.capture.protocol import dropped

Guard = Callable[..., Watched]
BAD = 4


class Net(nn.Module):
    """The derivative of a hand-written norm at zero is NaN; the loss stays finite."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        length = hidden.pow(2).sum(-1).sqrt()
        return self.head(hidden) + 0 * length[:, None]


class Loop:
    def __init__(self, has_scaler: bool) -> None:
        seed_everything()
        self.model = Net()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=has_scaler)
        self.dropped = 0

    def backward(self, step: int) -> None:
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        if step == BAD:
            x = x * 0
            nn.init.zeros_(self.model.body.bias)
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.scaler.is_enabled()):
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()

    def is_bad(self) -> bool:
        bad = any(not p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None)
        self.dropped += bad
        return bad

    def step(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()


def cleared_by_the_next_iteration(loop: Loop, steps: int) -> None:
    for step in range(steps):
        loop.opt.zero_grad()
        loop.backward(step)
        if loop.is_bad():
            continue
        loop.step()


def cleared_by_the_module(loop: Loop, steps: int) -> None:
    for step in range(steps):
        loop.model.zero_grad()
        loop.backward(step)
        if loop.is_bad():
            continue
        loop.step()


def never_cleared_again(loop: Loop, steps: int) -> None:
    """`continue` jumps over zero_grad as well."""
    for step in range(steps):
        loop.backward(step)
        if loop.is_bad():
            continue
        loop.step()
        loop.opt.zero_grad()


LOOPS = [cleared_by_the_next_iteration, cleared_by_the_module, never_cleared_again]


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("body", LOOPS)
def test_cause_of_dropped_gradients_is_told(body: Callable[[Loop, int], None], has_scaler: bool, guard: Guard) -> None:
    def script() -> tuple[int, object]:
        loop = Loop(has_scaler)
        body(loop, BAD + 2)
        return loop.dropped, fingerprint(loop.model, loop.opt, loop.scaler)

    plain = script()
    run = guard(script)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.result[0] >= 1
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.phase) == ("singular-gradient", BAD, "backward")
    assert incident.location is not None
    assert incident.location.code == "length = hidden.pow(2).sum(-1).sqrt()"


class Unscaled(Loop):
    """Without any scaler. (Its optimizer is gone when the run ends, as a local variable of `main` is.)"""

    def step(self) -> None:
        self.opt.step()


def test_last_iteration_of_a_run_without_scaler(guard: Guard) -> None:
    run = guard(lambda: cleared_by_the_next_iteration(Unscaled(False), BAD + 1))
    assert run.causes == ["singular-gradient"]


def test_last_iteration_of_the_run(guard: Guard) -> None:
    run = guard(lambda: cleared_by_the_next_iteration(Loop(False), BAD + 1))
    assert run.causes == ["singular-gradient"]


def test_gradients_that_are_never_cleared_again_stop_the_training(guard: Guard) -> None:
    run = guard(lambda: never_cleared_again(Loop(False), BAD + 6))
    assert run.causes == ["singular-gradient", "missing-zero-grad"]
    stuck = run.report.incidents[1]
    assert stuck.evidence["since_step"] == BAD
    assert ".zero_grad(); continue" in stuck.fixes[0].how


def test_iteration_that_is_left_with_good_gradients_is_no_incident(guard: Guard) -> None:
    """An accumulation window that is never stepped, a norm that is too large: nothing was bad."""

    def script() -> None:
        loop = Loop(False)
        for step in range(12):
            loop.opt.zero_grad()
            loop.backward(0 if step == BAD else step + 100)
            if step % 3 == 2:
                continue
            loop.step()

    run = guard(script)
    assert run.faults == 0
    assert run.causes == []


def test_healthy_accumulation_is_looked_at_before_its_first_step_only(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    original = dropped._is_finite
    monkeypatch.setattr(dropped, "_is_finite", lambda gradient: (looked.append(steps[0]), original(gradient))[1])
    steps = [0]

    def script() -> None:
        loop = Loop(False)
        for step in range(24):
            loop.backward(step + 100)
            if step % 4 == 3:
                loop.step()
                loop.opt.zero_grad()
                steps[0] += 1

    run = guard(script)
    assert run.causes == []
    assert set(looked) == {0}


def test_overflow_in_the_first_accumulation_window_is_the_scale_settling(guard: Guard) -> None:
    """Bad gradients are added to until the window is complete; the scaler then skips it and lowers the scale."""

    def script() -> None:
        loop = Loop(False)
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
        for step in range(40):
            loop.backward(step + 100)
            if step % 5 == 4:
                loop.step()
                loop.opt.zero_grad()

    run = guard(script)
    assert run.faults == 0
    assert set(run.causes) == {"loss-scale-overflow"}
    assert run.report.status == "clean"


@pytest.mark.parametrize("window", [12, 30])
def test_accumulation_window_that_grows_lets_the_scale_settle(window: int, guard: Guard) -> None:
    """One micro-batch a step at first, then many; the run ends within a window, or goes on after it."""

    def script() -> None:
        loop = Loop(False)
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21)
        for step in range(window):
            loop.backward(step + 100)
            if step == 0 or step == 27:
                loop.step()
                loop.opt.zero_grad()

    run = guard(script)
    assert run.faults == 0
    assert set(run.causes) == {"loss-scale-overflow"}
    assert run.report.status == "clean"


def test_training_with_a_scaler_that_is_stuck_is_told_at_the_end(guard: Guard) -> None:
    run = guard(lambda: never_cleared_again(Loop(True), BAD + 25))
    assert run.causes == ["singular-gradient", "missing-zero-grad"]


def test_bad_gradients_that_are_cleared_each_time_do_not_pile_up(guard: Guard) -> None:
    """New ones may lie where those before them have lain."""

    def body() -> None:
        seed_everything()
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(60):
            loss = (net(torch.randn(4, 3)) / (0.0 if step >= BAD else 1.0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["division-by-zero"]


def test_bad_gradients_of_the_first_window_are_what_its_update_spoils_the_weights_with(guard: Guard) -> None:
    """In the first step it is not known that several passes make one window: they seem to be dropped, and are used."""

    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(4):
                length = model(torch.randn(5, 4)) * (0.0 if step == part == 0 else 1.0)
                length.pow(2).sum().sqrt().backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert [(incident.cause, incident.step) for incident in run.report.incidents] == [("singular-gradient", 0)], (
        run.stderr
    )
