"""The script itself says what it saw: `__main__`, `argv`, the path; and what it gets is what Python gives it."""

from __future__ import annotations

import py_compile
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from workbench import Outcome, Workbench

Same = Callable[..., Outcome]

ASK = """
import sys
me = sys.modules["__main__"]
builtins = me.__dict__.pop("__builtins__")
show = {"__loader__": lambda v: type(v).__name__, "__spec__": lambda v: v and (v.name, v.origin, v.parent)}
print([(k, show.get(k, repr)(v)) for k, v in vars(me).items() if k[:2] == "__"])
print(type(builtins), type(me), __name__, me.__dict__ is globals())
print(sys.argv, sys.path)
"""


@pytest.mark.parametrize("spelling", ["train.py", "./train.py", "sub/../train.py", "sub/./inner.py", "linked.py"])
def test_script_sees_what_python_shows_it(workbench: Workbench, assert_same: Same, spelling: str) -> None:
    workbench.write("train.py", ASK)
    workbench.write("sub/inner.py", ASK)
    (workbench.folder / "linked.py").symlink_to("sub/inner.py")
    out = assert_same(spelling, "--lr", "0.1", "-m", "--", "--out", "x").stdout
    assert "'--lr', '0.1', '-m', '--', '--out', 'x'" in out
    assert workbench.session_saw() == ["start", "finish None"]


def test_absolute_path_without_suffix(workbench: Workbench, assert_same: Same) -> None:
    assert_same(str(workbench.write("elsewhere/train", ASK)))


@pytest.mark.parametrize("module", ["pkg", "pkg.train", "single", "ns.deep.train"])
def test_module_sees_what_python_shows_it(workbench: Workbench, assert_same: Same, module: str) -> None:
    workbench.write("single.py", ASK)
    workbench.write("pkg/__init__.py", "print('package', __name__)")
    workbench.write("pkg/__main__.py", "from . import other\n" + ASK)
    workbench.write("pkg/train.py", "from .other import x\n" + ASK)
    workbench.write("pkg/other.py", "x = 1")
    workbench.write("ns/deep/train.py", ASK)
    assert "'--steps', '3'" in assert_same("-m", module, "--steps", "3").stdout
    assert workbench.session_saw() == ["start", "finish None"]


def test_directory_and_zip_with_a_main(workbench: Workbench, assert_same: Same) -> None:
    workbench.write("app/__main__.py", "import beside\n" + ASK)
    workbench.write("app/beside.py", "")
    with zipfile.ZipFile(workbench.folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import beside\n" + ASK)
        archive.writestr("beside.py", "")
    assert_same("app", "1")
    assert_same("app.zip", "2")
    assert workbench.session_saw() == ["start", "finish None"]


def test_compiled_script(workbench: Workbench, assert_same: Same) -> None:
    source = workbench.write("train.py", ASK)
    py_compile.compile(str(source), str(workbench.folder / "train.pyc"))
    assert_same("train.pyc")


def test_our_future_imports_do_not_leak(workbench: Workbench, assert_same: Same) -> None:
    workbench.write("train.py", "def f(x: 1 + 1): ...\nprint(f.__annotations__)\nx: int = 3\nprint(__annotations__)")
    assert assert_same("train.py").stdout.startswith("{'x': 2}")


def test_other_encoding_and_bom(workbench: Workbench, assert_same: Same) -> None:
    (workbench.folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('é'))".encode("latin-1"))
    (workbench.folder / "bom.py").write_bytes("\ufeffprint(ascii('é'))".encode())
    assert assert_same("latin.py").stdout == assert_same("bom.py").stdout == "'\\xe9'\n"


def test_safe_path_is_respected(workbench: Workbench) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("python -P came with 3.11")
    workbench.write("train.py", "import sys; print(sys.path)")
    plain = workbench.plain("train.py", PYTHONSAFEPATH="1")
    assert workbench.guarded("train.py", PYTHONSAFEPATH="1") == plain
    assert str(workbench.folder) not in plain.stdout


def test_finding_a_module_runs_none_of_it(workbench: Workbench) -> None:
    """The session is started before a package's own `__init__` runs."""
    workbench.write("pkg/__init__.py", "import os; open(os.environ['SESSION_LOG'], 'a').write('init\\n')")
    workbench.write("pkg/train.py", "")
    assert workbench.guarded("-m", "pkg.train").status == 0
    assert workbench.session_saw() == ["start", "init", "finish None"]


def test_package_that_moves_its_own_path_is_guarded(workbench: Workbench, assert_same: Same) -> None:
    workbench.write("pkg/__init__.py", "__path__.append(__path__[0] + '/hidden')")
    workbench.write("pkg/hidden/train.py", ASK)
    assert_same("-m", "pkg.train")
    assert workbench.session_saw() == ["start", "finish None"]


def test_working_directory_may_be_elsewhere(workbench: Workbench, tmp_path: Path) -> None:
    workbench.write("lib/train.py", "import neighbour; print(neighbour.x)")
    workbench.write("lib/neighbour.py", "x = 5")
    assert workbench.guarded("lib/train.py").stdout == "5\n"


@pytest.mark.parametrize("words", ["{path}", "train.py", "-m train"], ids=["its whole path", "relative", "a module"])
def test_in_a_folder_that_is_gone(workbench: Workbench, words: str) -> None:
    """Python starts what it can find without a working directory; what it cannot find ends in its own words."""
    path = workbench.write("train.py", ASK)
    ended = []
    for guarded in (False, True):
        gone = workbench.folder / "gone"
        gone.mkdir()
        command = workbench.command(*words.format(path=path).split(), guarded=guarded)
        script = f"import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, {command!r})"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=gone,
            env=workbench.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        ended.append((done.returncode, done.stdout, done.stderr))
    assert ended[0] == ended[1]
    assert (ended[0][0] == 0) == (words == "{path}")


@pytest.mark.parametrize(
    "script", [ASK, "import sys\nprint(repr(sys.stdin.read()))", "def f():\n    1/0\nf()", "x = (\n", ""]
)
def test_script_on_standard_input(workbench: Workbench, script: str) -> None:
    def run(*, guarded: bool) -> subprocess.CompletedProcess[str]:
        command = workbench.command("-", "--lr", "0.1", guarded=guarded)
        environment = workbench.environment()
        return subprocess.run(
            command, input=script, cwd=workbench.folder, env=environment, capture_output=True, text=True
        )

    plain, guarded = run(guarded=False), run(guarded=True)
    assert (guarded.returncode, guarded.stdout, guarded.stderr) == (plain.returncode, plain.stdout, plain.stderr)
