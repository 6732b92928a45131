"""Pickling, threads, forked and spawned children: all that looks `__main__` up after the fact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from workbench import Outcome, Workbench

Same = Callable[..., Outcome]


def test_pickling_a_class_of_the_script_from_a_late_thread(workbench: Workbench, assert_same: Same) -> None:
    workbench.write(
        "train.py",
        """
import pickle, threading, time
class Sample:
    def __init__(self, x): self.x = x
def late():
    time.sleep(0.2)  # the top level has ended
    again = pickle.loads(pickle.dumps(Sample(3)))
    print(type(again) is Sample, again.x, type(again).__module__)
threading.Thread(target=late).start()
""",
    )
    assert assert_same("train.py").stdout == "True 3 __main__\n"
    assert assert_same("-m", "train").stdout == "True 3 __main__\n"


POOL = """
import multiprocessing, os, sys
class Sample:
    def __init__(self, x): self.x = x
def double(sample):
    return Sample(2 * sample.x), __name__, "SESSION_LOG" in os.environ
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            (result, name, _), = pool.map(double, [Sample(4)])
        print(method, type(result) is Sample, result.x, name)
    child = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
    child.start(); child.join(); print(child.exitcode)
"""


@pytest.mark.parametrize("words", [("train.py",), ("-m", "pkg.train"), ("app",)])
def test_children_of_every_start_method(workbench: Workbench, assert_same: Same, words: tuple[str, ...]) -> None:
    workbench.write("train.py", POOL)
    workbench.write("pkg/train.py", POOL)
    workbench.write("app/__main__.py", POOL.replace('"fork", "spawn", "forkserver"', '"fork",').split("    child")[0])
    outcome = assert_same(*words)
    assert "fork True 8 __main__" in outcome.stdout
    assert words == ("app",) or "spawn True 8 __mp_main__" in outcome.stdout
    assert workbench.session_saw() == ["start", "finish None"]


def test_a_forked_child_reports_nothing(workbench: Workbench, assert_same: Same) -> None:
    workbench.write(
        "train.py",
        """
import os, sys
if os.fork() == 0:
    print("child", flush=True)
    1/0
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
    )
    assert assert_same("train.py").stdout == "child\n1\n"
    assert workbench.session_saw() == ["start", "finish None"]


def test_a_terminated_worker_reports_nothing(workbench: Workbench, assert_same: Same) -> None:
    workbench.write(
        "train.py",
        """
import multiprocessing, signal, time
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
worker.start(); time.sleep(0.2); worker.terminate(); worker.join()
print(worker.exitcode == -signal.SIGTERM)
""",
    )
    assert assert_same("train.py").stdout == "True\n"
    assert workbench.session_saw() == ["start", "finish None"]


def test_data_loader_workers(workbench: Workbench) -> None:
    pytest.importorskip("torch")
    workbench.write(
        "train.py",
        """
import warnings
import torch
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return torch.tensor(float(i))
def collate(items): return torch.stack(items).sum()
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=3, num_workers=1, collate_fn=collate, multiprocessing_context=method)
        print(method, [batch.item() for batch in loader])
""",
    )
    outcome = workbench.guarded("train.py", OMP_NUM_THREADS="1")
    assert (outcome.status, outcome.stdout) == (0, "fork [3.0, 12.0]\nspawn [3.0, 12.0]\n")
    assert workbench.session_saw() == ["start", "finish None"]
