"""The processes that other tests fork instead of starting them: what they find and how they end is as in real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import warm

LOOKS = """
import os, sys, random, signal, threading, warnings, multiprocessing
print(sys.argv, sys.orig_argv[1:], sys.path, os.getcwd())
print(sorted(vars(sys.modules["__main__"])), __name__, getattr(__spec__, "name", None))
print(globals().get("__file__"), os.environ.get("WORD"), signal.getsignal(signal.SIGINT))
print(threading.active_count(), os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else None)
class Own: pass
import pickle
print(type(pickle.loads(pickle.dumps(Own()))) is Own, sys.stdout.line_buffering, sys.stdout.isatty())
print(random.random() == 0, "error", file=sys.stderr)
if "torch" not in sys.argv: sys.exit()
import torch
print(*map(str, sorted(map(str, warnings.filters))), sep="\\n")
print(torch.get_num_threads(), torch.distributed.is_initialized())
"""

ENDS = {
    "raises": "def f():\n    raise ValueError('no')\ntry:\n    f()\nexcept ValueError:\n    1 / 0",
    "raises as a module": "def f():\n    raise ValueError('no')\nf()",
    "raises from": "raise KeyError(1) from ValueError(2)",
    "exits as a module": "import sys; sys.exit(7)",
    "exits": "import sys; sys.exit(7)",
    "exits with words": "raise SystemExit('enough')",
    "is interrupted": "import signal; signal.raise_signal(signal.SIGINT)",
    "is ended": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "does not compile": "x = (",
    "does not compile as a module": "x = (",
    "has a hook": "import sys; sys.excepthook = lambda *what: print('hooked', what[:2]); 1 / 0",
    "at exit": "import atexit, threading, time\natexit.register(print, 'last')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('first')\n1 / 0",
    "vanishes": "import os; print('unseen'); os._exit(3)",
    "warns": "import warnings; warnings.warn('here')",
}


def both(command: list[str], folder: Path, **environ: str) -> tuple[subprocess.CompletedProcess[str], ...]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, *command]
    real = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return real, warm.run(command, cwd=folder, env=env, modules=("torch",) if "torch" in command else ())


@pytest.mark.parametrize("command", [["sub/look.py", "b c", "torch"], ["-m", "look", "a"], ["-c", LOOKS, "a"]], ids=str)
def test_it_finds_what_a_new_process_finds(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "look.py").write_text(LOOKS)
    real, forked = both(command, tmp_path, WORD="one", PYTHONPATH=f"{tmp_path}:/nowhere")
    assert real.returncode == 0, real.stderr
    assert (forked.stdout, forked.stderr, forked.returncode) == (real.stdout, real.stderr, 0)


@pytest.mark.parametrize("way", ENDS)
def test_it_ends_as_a_new_process_does(way: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS[way])
    real, forked = both(["-m", "ends"] if way.endswith("as a module") else ["ends.py"], tmp_path)
    assert (forked.stdout, forked.stderr, forked.returncode) == (real.stdout, real.stderr, real.returncode)


def test_random_numbers_differ(tmp_path: Path) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    seen = {word for _ in range(2) for word in warm.run([sys.executable, "-c", code], check=True).stdout.split()}
    assert len(seen) == 6


def test_one_that_hangs_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(
            [sys.executable, "-c", "import time; print('x', flush=True); time.sleep(600)"], timeout=0.2, modules=()
        )
    assert time.monotonic() - began < 60
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        process = warm.start(command, stdout=out, stderr=out, modules=())
        assert process.poll() is None
        process.kill()
        assert process.wait(60.0) == -signal.SIGKILL


def test_a_failure_is_raised_where_asked() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        warm.run([sys.executable, "-c", "1 / 0"], check=True, modules=())
