"""Several threads train at once: nobody reads gradients that another thread's autograd engine is writing."""

from __future__ import annotations

import math
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader
from watching import Watched, bits

import warm
from ampguard.capture.glue import schedule
from ampguard.capture.protocol.gradients import OptimizerWatch

Guard = Callable[..., Watched]

PROTOCOL = {
    *("clip-before-unscale", "double-unscale", "missing-update", "accumulation-broken", "bypassed-scaler"),
    *("unscaled-backward", "missing-zero-grad", "stale-parameters", "no-gradients", "scheduler-on-skipped-step"),
}

FOUR_THREADS = """
import sys, threading, torch
from torch import nn
import ampguard

def train(number, losses):
    generator = torch.Generator().manual_seed(number)
    model = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(16, 16), nn.Tanh())))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        loss = model(torch.randn(8, 16, generator=generator)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses[number] = loss.item()

sys.setswitchinterval(1e-5)
torch.set_num_threads(1)
losses = {}
with ampguard.watch(out=sys.argv[1]):
    for _ in range(2):
        threads = [threading.Thread(target=train, args=(n, losses)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
print(sorted(losses))
"""


def test_four_threads_that_train_at_once_do_not_crash(tmp_path: Path) -> None:
    """In a process of its own: a segmentation fault is a return code."""
    script = tmp_path / "train.py"
    script.write_text(FOUR_THREADS)
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = warm.run(command, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "[0, 1, 2, 3]"


def in_turns(*bodies: Callable[[Callable[[], None]], None]) -> None:
    """Run each body in a thread of its own, one at a time; where a body calls what it is given, the next one goes on."""
    turns = [threading.Semaphore(0) for _ in bodies]
    done: set[int] = set()

    def hand_over(number: int) -> None:
        for other in (*range(number + 1, len(bodies)), *range(number)):
            if other not in done:
                turns[other].release()
                return
        turns[number].release()

    def go(number: int) -> None:
        def wait() -> None:
            hand_over(number)
            turns[number].acquire()

        turns[number].acquire()
        try:
            bodies[number](wait)
        finally:
            done.add(number)
            hand_over(number)

    threads = [threading.Thread(target=go, args=(n,)) for n in range(len(bodies))]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer, clears_last: bool = False, steps: int = 6) -> Any:
    def body(wait: Callable[[], None]) -> None:
        for _ in range(steps):
            if not clears_last:
                optimizer.zero_grad()
                wait()
            loss = model(torch.ones(2, 4)).pow(2).mean()
            wait()
            loss.backward()
            wait()
            optimizer.step()
            if clears_last:
                optimizer.zero_grad()

    return body


def asked_by(monkeypatch: Any) -> dict[OptimizerWatch, set[int]]:
    """Which threads look at the gradients of which optimizer."""
    asked: dict[OptimizerWatch, set[int]] = {}

    def noting(name: str) -> None:
        original = getattr(OptimizerWatch, name)

        def look(watch: OptimizerWatch, *args: Any) -> Any:
            asked.setdefault(watch, set()).add(threading.get_ident())
            return original(watch, *args)

        monkeypatch.setattr(OptimizerWatch, name, look)

    for name in ("before_backward", "after_backward", "glance", "rest", "are_zero", "has_gradients", "keep_copy"):
        noting(name)
    return asked


def test_a_thread_looks_at_its_own_optimizers_only(guard: Guard, monkeypatch: Any) -> None:
    """Optimizers that the main thread has made, too: in loops that clear first, and in loops that clear last."""

    def body() -> None:
        for clears_last in (False, True):
            models = [nn.Linear(4, 2) for _ in range(3)]
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
            in_turns(*(trainer(m, o, clears_last) for m, o in zip(models, optimizers, strict=True)))

    asked = asked_by(monkeypatch)
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert asked
    assert all(len(threads) == 1 for threads in asked.values())


class Asked(nn.Parameter):
    """Notes which threads ask for its gradient."""

    by: dict[int, set[int]]

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        self.by.setdefault(id(self), set()).add(threading.get_ident())
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize("forgets", [False, True], ids=["all are held", "a part is in no optimizer"])
def test_a_thread_asks_for_the_gradients_of_its_own_weights_only(forgets: bool, guard: Guard, monkeypatch: Any) -> None:
    """In any look that is taken while two train: the engine may be writing to those of the other's."""
    asked: dict[int, set[int]] = {}
    monkeypatch.setattr(Asked, "by", asked, raising=False)

    def body() -> list[int]:
        models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2)]
        for module in (part for m in models for part in m):
            module.weight, module.bias = Asked(module.weight.detach()), Asked(module.bias.detach())
        held = [[m[0].weight, *m[1].parameters()] if forgets else list(m.parameters()) for m in models]
        optimizers = [torch.optim.SGD(p, lr=0.01) for p in held]
        asked.clear()
        in_turns(*(trainer(m, o, steps=40) for m, o in zip(models, optimizers, strict=True)))
        return [len(threads) for threads in asked.values()]

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert set(run.result) == {1}


def scaled(clips: bool, wait: Callable[[], None], steps: int = 6) -> list[bytes]:
    """A loop with a scaler; `clips`: the norm of gradients that are still scaled."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 4, generator=generator))
        model.bias.zero_()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), GradScaler("cpu", init_scale=1024.0)
    for _ in range(steps):
        optimizer.zero_grad()
        wait()
        loss = model(torch.ones(2, 4)).pow(2).mean()
        scaled_loss = scaler.scale(loss)
        wait()
        scaled_loss.backward()
        wait()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            scaler.unscale_(optimizer)
        wait()
        scaler.step(optimizer)
        wait()
        scaler.update()
    return bits([p.detach() for p in model.parameters()])


def test_calls_of_two_threads_are_not_mixed_up(guard: Guard) -> None:
    """Both are right, and their calls interleave: nothing is told, and both compute what they compute alone."""

    def body() -> Any:
        results: dict[int, Any] = {}

        def one(number: int) -> Callable[[Callable[[], None]], None]:
            def run(wait: Callable[[], None]) -> None:
                results[number] = scaled(False, wait)

            return run

        in_turns(one(0), one(1), one(2))
        return results

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert not set(run.causes) & PROTOCOL, run.causes


def test_first_thread_is_followed_while_another_trains(guard: Guard) -> None:
    """It clips scaled gradients: that is told, though another thread's loop, which does not, goes on between."""

    def body() -> None:
        in_turns(lambda wait: bool(scaled(True, wait)), lambda wait: bool(scaled(False, wait)))  # type: ignore[arg-type, return-value]

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert "clip-before-unscale" in run.causes, run.causes


def test_thread_that_trains_after_another_has_ended_is_followed(guard: Guard) -> None:
    """Trials of a search, one thread after the other: the second has the error."""

    def body() -> None:
        for clips in (False, True):
            thread = threading.Thread(target=scaled, args=(clips, lambda: None))
            thread.start()
            thread.join()

    assert "clip-before-unscale" in guard(body).causes


def test_optimizer_made_here_and_trained_in_a_thread_is_followed(guard: Guard) -> None:
    def body() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = GradScaler("cpu", init_scale=1024.0)

        def train() -> None:
            for _ in range(4):
                scaler.scale(model(torch.ones(2, 4)).pow(2).mean()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    run = guard(body)
    assert run.faults == 0
    assert "clip-before-unscale" in run.causes


class Waiting(nn.Module):
    """Its call lasts while others go on."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.wait = wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wait()
        return self.inner(x)


@pytest.mark.parametrize("seed", range(12))
def test_calls_that_went_unseen_break_no_rule(seed: int, guard: Guard) -> None:
    """A call that comes while another thread is inside a module is not looked at: half of a step is judged by none."""

    def other(wait: Callable[[], None]) -> None:
        model, chance = Waiting(wait), random.Random(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(24):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(chance.randrange(7)):
                wait()

    def body() -> None:
        in_turns(lambda wait: bool(scaled(False, wait, steps=12)), other)  # type: ignore[arg-type, return-value]

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert not set(run.causes) & PROTOCOL, run.causes


def modes_on() -> int:
    return len(_get_current_dispatch_mode_stack()) + torch._C._len_torch_function_stack()


@pytest.mark.parametrize("comes_back", ["with a module", "with a batch", "with an optimizer"])
@pytest.mark.parametrize("long_step", [0.0, math.inf], ids=["long steps", "short steps"])
def test_the_tape_of_a_thread_that_trains_no_more_is_taken_off(
    long_step: float, comes_back: str, guard: Guard, monkeypatch: Any
) -> None:
    """The main thread has computed a loss, and another one trains: the next thing of ours that is called here cleans up.

    That of the other thread is on its stack then: one of calls where its steps are short, else one of operators.
    """
    monkeypatch.setattr(schedule, "LONG_STEP", long_step)
    monkeypatch.setattr(schedule, "MUCH_GLUE", math.inf)
    model = nn.Linear(4, 2)
    x = torch.ones(2, 4)
    has_trained, ends = threading.Event(), threading.Event()

    def trains() -> None:
        other = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            other(x).pow(2).mean().backward()
            optimizer.step()
        has_trained.set()
        ends.wait(20)

    def body() -> tuple[int, int]:
        loss = model(x).pow(2).mean()
        thread = threading.Thread(target=trains)
        thread.start()
        has_trained.wait(20)
        before = modes_on()
        if comes_back == "with a module":
            with torch.no_grad():
                model(x)
        elif comes_back == "with a batch":
            next(iter(DataLoader(torch.ones(2, 4))))
        else:
            torch.optim.SGD(model.parameters(), lr=0.1)
        del loss
        after = modes_on()
        ends.set()
        thread.join()
        return before, after

    before, after = guard(body).result
    assert (before, after) == (1, 0)


def test_failures_are_told_after_training_has_come_back_to_its_first_thread(guard: Guard) -> None:
    """The loss outside the module is taped again: its operator is named."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(is_bad: bool) -> None:
        optimizer.zero_grad()
        out = model(torch.ones(2, 4)).pow(2).mean()
        (out / (0.0 if is_bad else 1.0) if is_bad else torch.log(out + 1)).backward()
        optimizer.step()

    def elsewhere(count: int) -> None:
        thread = threading.Thread(target=lambda: [step(False) for _ in range(count)])
        thread.start()
        thread.join()

    def body() -> None:
        step(False)
        loss = model(torch.ones(2, 4)).mean()
        elsewhere(2)
        step(False)
        elsewhere(1)
        step(False)
        del loss
        step(True)

    run = guard(body)
    assert (run.first.cause, run.first.op) == ("division-by-zero", "aten.div.Tensor")
    assert not run.faults


class Ratio(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = x.exp()
        return weights / weights.sum()


def in_a_thread(run: Callable[[], Any]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("threads", ["one worker", "one for each request"])
def test_server_that_answers_in_threads_is_followed(threads: str, guard: Guard) -> None:
    """Nothing trains, and the main thread calls no module."""

    def body() -> None:
        model = Ratio().half().eval()

        def answer(size: float) -> None:
            with torch.inference_mode():
                model(torch.full((3,), size).half())

        if threads == "one worker":
            in_a_thread(lambda: [answer(size) for size in (1.0, 2.0, 50.0)])
        else:
            for size in (1.0, 2.0, 50.0):
                in_a_thread(lambda size=size: answer(size))  # type: ignore[misc]

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["fp16-overflow"]


def test_main_thread_is_followed_though_another_called_a_module_first(guard: Guard) -> None:
    """A thread that prepares batches with modules, and goes on doing so while the main thread evaluates."""

    def body() -> None:
        prepared, more = threading.Event(), threading.Event()

        def prepare() -> None:
            resize = nn.AvgPool1d(2)
            resize(torch.ones(1, 1, 4))
            prepared.set()
            more.wait(20)
            resize(torch.ones(1, 1, 4))

        thread = threading.Thread(target=prepare)
        thread.start()
        prepared.wait(20)
        with torch.no_grad():
            Ratio().half().eval()(torch.full((3,), 50.0).half())
        more.set()
        thread.join()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["fp16-overflow"]
