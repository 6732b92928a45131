"""Which of the processes that a script starts are its own, and what is said of those that nobody watches."""

from __future__ import annotations

import concurrent.futures.process
import functools
import multiprocessing
import multiprocessing.pool
import random
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
import torch.utils.data._utils.worker
from torch import nn

import ampguard
from ampguard.run.child import ChildSession, GivenGuard
from ampguard.run.children import ChildProcesses, is_scripts, processes_made


@pytest.mark.parametrize("computes", [False, True])
def test_processes_that_nobody_watches(computes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = processes_made()
    with ampguard.watch(out=tmp_path / "run"):
        multiprocessing.Process(target=int)
        if computes:  # they are a loader's workers, say
            nn.Linear(2, 2)(torch.ones(1, 2))
    assert processes_made() == before + 1
    said = capsys.readouterr().err
    assert ("torchrun" in said) is not computes
    assert "a fault of its own" not in said


def test_a_process_that_the_script_does_not_wait_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fork = multiprocessing.get_context("fork")
    may_end = fork.Event()
    process = fork.Process(target=wait_for, args=(may_end,))
    with ampguard.watch(out=tmp_path / "run"):
        process.start()
    may_end.set()
    process.join()
    said = capsys.readouterr().err
    assert "still running" in said
    assert "torchrun" not in said


def wait_for(event: Event) -> None:
    """A target of the script's."""
    event.wait(30)


def train() -> None:
    """A target of the script's."""


class Learner(multiprocessing.Process):
    def run(self) -> None:
        train()


def test_what_is_the_scripts_own() -> None:
    process = multiprocessing.Process
    assert is_scripts(process(target=train))
    assert is_scripts(process(target=functools.partial(functools.partial(train))))
    assert is_scripts(Learner())
    assert not is_scripts(process())
    assert not is_scripts(process(target=print))
    assert not is_scripts(process(target=torch.utils.data._utils.worker._worker_loop))
    assert not is_scripts(process(target=multiprocessing.pool.worker))
    assert not is_scripts(process(target=concurrent.futures.process._process_worker))


def test_a_process_is_as_it_was_once_it_was_started(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        process = multiprocessing.get_context("fork").Process(target=train)
        process.start()
        process.join()
        assert "run" not in vars(process)
        assert process.exitcode == 0
        broken = multiprocessing.get_context("spawn").Process(target=lambda: None)
        with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
            broken.start()
        assert "run" not in vars(broken)
    assert session.report is not None
    assert session.report.ranks is not None  # it trained nothing: no rank


def test_a_child_is_given_the_seed_of_the_run(tmp_path: Path) -> None:
    given: GivenGuard = ChildProcesses(tmp_path, "options", seed=7)._give(multiprocessing.Process(target=train), None)
    state = random.getstate()
    child = ChildSession(given)
    with torch.random.fork_rng(devices=[]):
        child.start()
        drawn = random.random(), torch.rand(()).item()
        child.finish(None)
        random.seed(7)
        torch.manual_seed(7)
        assert drawn == (random.random(), torch.rand(()).item())
    random.setstate(state)


def test_a_child_keeps_its_own_random_numbers_where_none_were_seeded(tmp_path: Path) -> None:
    given = ChildProcesses(tmp_path, "options")._give(multiprocessing.Process(target=train), None)
    before = torch.get_rng_state()
    child = ChildSession(given)
    child.start()
    child.finish(None)
    assert torch.equal(before, torch.get_rng_state())
