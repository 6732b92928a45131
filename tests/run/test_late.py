"""The session starts with the script's own `import torch`: no sooner, and without a trace in what is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

LATE = """
import sys
from pathlib import Path
from ampguard.run.late import LateSession
from ampguard.run.script import ScriptTarget, execute
class Session:
    def start(self):
        if "clumsy" in sys.argv: raise ZeroDivisionError("a bug")
        print("session starts", sys.modules["torch"].x)
    def finish(self, error): print("session ends", error)
sys.exit(execute(ScriptTarget("train.py", tuple(sys.argv[1:])), LateSession(Session, Path("out"), "train")))
"""


def run(folder: Path, script: str, *args: str, torch: str = "x = 1") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    (folder / "torch.py").write_text(torch)  # a stand-in: it is the import that counts here
    (folder / "guard.py").write_text(LATE)
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "guard.py", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_it_starts_right_after_the_import(tmp_path: Path) -> None:
    done = run(tmp_path, "print('first')\nimport torch\nprint('then')\nimport torch")
    assert done.stdout.splitlines() == ["first", "session starts 1", "then", "session ends None"]


def test_looking_for_torch_is_not_importing_it(tmp_path: Path) -> None:
    """As transformers does; and what it finds is torch's own spec."""
    look = "import importlib.util\nspec = importlib.util.find_spec('torch')\n"
    done = run(tmp_path, look + "print(spec.origin[-8:], spec.loader.path[-8:])\nprint('then')\nimport torch")
    assert done.stdout.splitlines()[:3] == ["torch.py torch.py", "then", "session starts 1"]


def test_the_imported_module_bears_no_trace(tmp_path: Path) -> None:
    script = (
        "import sys\nbefore = len(sys.meta_path)\nimport torch\n"
        "print(type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__, before - len(sys.meta_path))"
    )
    assert "SourceFileLoader True 1" in run(tmp_path, script).stdout


def test_a_script_without_torch_is_told_so_and_leaves_no_folder(tmp_path: Path) -> None:
    done = run(tmp_path, "print('hello')")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert done.stderr == "ampguard: the script did not import torch; nothing was watched\n"
    assert not (tmp_path / "out").exists()


def test_a_script_that_ends_before_the_import_is_left_alone(tmp_path: Path) -> None:
    """`train.py --help`, or a missing argument."""
    done = run(tmp_path, "import sys\nsys.exit('usage: train.py')\nimport torch")
    assert (done.returncode, done.stderr) == (1, "usage: train.py\n")
    assert not (tmp_path / "out").exists()


def test_a_session_that_cannot_start_does_not_break_the_import(tmp_path: Path) -> None:
    done = run(tmp_path, "import torch\nprint(torch.x)", "clumsy")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr == "ampguard: could not start; the script runs unguarded (ZeroDivisionError: a bug)\n"


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    script = "try:\n    import torch\nexcept ImportError as e:\n    print(e)"
    done = run(tmp_path, script, torch="raise ImportError('no CUDA')")
    assert done.stdout == "no CUDA\n"
    assert "did not import torch" in done.stderr


def test_a_forked_child_that_imports_torch_is_not_guarded(tmp_path: Path) -> None:
    done = run(tmp_path, "import os\nif os.fork() == 0:\n    import torch\n    os._exit(0)\nos.wait()\nprint('parent')")
    assert done.stdout == "parent\n"


def test_a_wrong_out_is_refused_before_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    done = run(tmp_path, "print('never')\nimport torch")
    assert done.stdout == ""
    assert "is not empty" in done.stderr


@pytest.mark.slow
def test_what_the_script_sets_before_importing_torch_counts(tmp_path: Path) -> None:
    """The reason for all this: with torch imported beforehand the guarded script would use other threads."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    env["PYTHONPATH"] = str(SOURCES)
    command = [sys.executable, "-m", "ampguard", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert "ampguard: 0 steps" in done.stderr
