"""Every way a script can end: the same status and the same words on stderr as with Python; a finished session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from workbench import Outcome, Workbench

Same = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("statement", "status"),
    [
        ("sys.exit()", 0),
        ("sys.exit(None)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit(True)", 1),
        ("sys.exit(-1)", 255),
        ("sys.exit('the loss is nan')", 1),
        ("sys.exit(('a', 1))", 1),
        ("raise SystemExit", 0),
        ("exit(4)", 4),
    ],
)
def test_exit_status(workbench: Workbench, assert_same: Same, statement: str, status: int) -> None:
    workbench.write("train.py", f"import sys\nprint('on')\n{statement}")
    assert assert_same("train.py").status == status
    assert workbench.session_saw()[1].startswith("finish SystemExit(")


def test_exit_status_beyond_every_integer(workbench: Workbench) -> None:
    """Python 3.12 and later say so on stderr in words of their own internals, which differ."""
    workbench.write("train.py", "import sys\nsys.exit(2**80)")
    assert workbench.guarded("train.py").status == workbench.plain("train.py").status == 255


TRACEBACKS = {
    "plain": "def f(x):\n    return 1 / x\n\nf(0)",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('nan in\\nloss') from e",
    "context": "try:\n    {}['a']\nexcept KeyError:\n    int('x')",
    "through a library": "import json\njson.loads('{')",
    "own exception": "class Diverged(Exception): pass\nraise Diverged(3)",
    "no source": "exec(compile('1/0', '<generated>', 'exec'))",
    "while exiting": "import sys\ntry:\n    sys.exit(3)\nfinally:\n    1/0",
    "syntax error inside": "eval('1 +')",
    "assertion": "assert 1 == 2, 'x'",
    "group": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "note": "e = ValueError(1)\ne.add_note('try a smaller rate')\nraise e",
    "keyboard": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
}


@pytest.mark.parametrize("name", TRACEBACKS)
def test_traceback_is_pythons(workbench: Workbench, assert_same: Same, name: str) -> None:
    workbench.write("train.py", TRACEBACKS[name])
    assert "Error" in assert_same("train.py").stderr or name in ("own exception", "keyboard", "generator exit", "group")
    assert workbench.session_saw()[1].startswith("finish ")


@pytest.mark.parametrize("name", ["plain", "chained", "keyboard"])
def test_traceback_of_a_module_is_pythons(workbench: Workbench, assert_same: Same, name: str) -> None:
    workbench.write("pkg/__init__.py", "")
    workbench.write("pkg/train.py", TRACEBACKS[name])
    outcome = assert_same("-m", "pkg.train")
    assert outcome.status in (1, -2)
    assert "runpy" in outcome.stderr  # python -m shows these lines too


@pytest.mark.parametrize(
    "text", ["x = (\n", "def f():\nreturn 1", "  x = 1", "for", "x = 'abc", "a b\n", "print 'x'\n", "f(**{)"]
)
def test_syntax_error_is_pythons_own(workbench: Workbench, assert_same: Same, text: str) -> None:
    workbench.write("train.py", text)
    outcome = assert_same("train.py")
    assert outcome.status == 1
    assert "Traceback" not in outcome.stderr
    assert workbench.session_saw() == []  # nothing ran, nothing is reported


def test_syntax_error_in_a_module(workbench: Workbench, assert_same: Same) -> None:
    workbench.write("train.py", "x = (\n")
    workbench.write("main.py", "import train")
    assert_same("-m", "train")
    assert workbench.session_saw() == []
    assert_same("main.py")


def test_syntax_warning(workbench: Workbench, assert_same: Same) -> None:
    workbench.write("train.py", "print(1 is 1)")
    assert "SyntaxWarning" in assert_same("train.py").stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("nowhere.py",), 2),
        (("no/where.py", "--x"), 2),
        (("-m", "nowhere"), 1),
        (("-m", "pkg"), 1),
        (("-m", "pkg.nowhere"), 1),
        (("-m", "nowhere.at.all"), 1),
        (("-m", "single.below"), 1),
        (("-m", "..relative"), 1),
        (("folder",), 1),
    ],
)
def test_nothing_to_run(workbench: Workbench, assert_same: Same, words: tuple[str, ...], status: int) -> None:
    workbench.write("pkg/__init__.py", "")
    workbench.write("folder/notes.txt", "")
    workbench.write("single.py", "")
    outcome = assert_same(*words)
    assert outcome.status == status
    assert outcome.stderr
    assert workbench.session_saw() == []


def test_unreadable_script(workbench: Workbench, assert_same: Same) -> None:
    loop = workbench.folder / "loop.py"
    loop.symlink_to(loop)
    assert assert_same("loop.py").status == 2


HOOKS = {
    "hook": "sys.excepthook = lambda k, v, tb: print('HOOK', k, v, tb.tb_frame.f_code.co_name, tb.tb_lineno)",
    "hook that exits": "sys.excepthook = lambda *a: sys.exit(9)",
    "hook that exits with words": "sys.excepthook = lambda *a: sys.exit('bye')",
    "hook that fails": "def hook(*a):\n    raise TypeError('in hook')\nsys.excepthook = hook",
    "hook that is interrupted": "def hook(*a):\n    raise KeyboardInterrupt\nsys.excepthook = hook",
    "no hook": "del sys.excepthook",
    "hook that looks around": "sys.excepthook = lambda *a: print(sys.exc_info(), sys.last_value is a[1])",
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_scripts_own_excepthook(workbench: Workbench, assert_same: Same, name: str) -> None:
    workbench.write("train.py", f"import sys\n{HOOKS[name]}\ndef f():\n    1/0\nf()")
    assert_same("train.py")
    assert workbench.session_saw()[1] == "finish ZeroDivisionError('division by zero')"


def test_order_of_the_end(workbench: Workbench) -> None:
    """Traceback, then the threads, then our report, then the script's atexit: as Python, with us in between."""
    workbench.write(
        "train.py",
        """
import atexit, os, sys, threading, time
def say(word): open(os.environ["SESSION_LOG"], "a").write(word + "\\n")
def late():
    time.sleep(0.3)
    say(f"thread {sys.modules['__main__'].MARK} {threading.main_thread().is_alive()}")
MARK = "sees main"
atexit.register(say, "atexit")
sys.excepthook = lambda *a: say("traceback")
threading.Thread(target=late).start()
1/0
""",
    )
    assert workbench.guarded("train.py").status == 1
    assert workbench.session_saw() == [
        "start",
        "traceback",
        "thread sees main False",
        "finish ZeroDivisionError('division by zero')",
        "atexit",
    ]


def test_idle_thread_pool_does_not_hold_the_end_up(workbench: Workbench, assert_same: Same) -> None:
    workbench.write(
        "train.py",
        "from concurrent.futures import ThreadPoolExecutor\nimport time\npool = ThreadPoolExecutor(2)\n"
        "pool.submit(time.sleep, 0.1)\npool.submit(print, 'done')",
    )
    assert assert_same("train.py").stdout == "done\n"


def test_stop_run_ends_the_script_cleanly(workbench: Workbench) -> None:
    workbench.write(
        "train.py",
        """
from ampguard.errors import StopRun
try:
    for step in range(9):
        try:
            if step == 2: raise StopRun("--steps 2", 0 if len(__import__("sys").argv) == 1 else 3)
        except Exception:
            print("swallowed")
finally:
    print("cleaned up")
""",
    )
    outcome = workbench.guarded("train.py")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "cleaned up\n", "")
    assert workbench.session_saw() == ["start", "finish StopRun('--steps 2')"]
    assert workbench.guarded("train.py", "stop").status == 3


@pytest.mark.parametrize("fault", ["start", "finish"])
@pytest.mark.parametrize("script", ["print('trained')", "import sys; sys.exit(5)"])
def test_a_fault_of_ours_changes_nothing(workbench: Workbench, fault: str, script: str) -> None:
    workbench.write("train.py", script)
    plain = workbench.plain("train.py")
    guarded = workbench.guarded("train.py", SESSION_FAULT=fault)
    assert (guarded.status, guarded.stdout) == (plain.status, plain.stdout)
    assert f"ZeroDivisionError: a bug in {fault}" in guarded.stderr
    assert guarded.stderr.count("\n") == 1


def test_usage_error_ends_before_the_script_starts(workbench: Workbench) -> None:
    workbench.write("train.py", "print('never')")
    outcome = workbench.guarded("train.py", SESSION_FAULT="usage")
    assert outcome.stdout == ""
    assert "UsageError: the folder is taken" in outcome.stderr


OUR_FRAMES = """
import importlib.util, sys, types
sys.path.insert(0, {folder!r})
import ampguard.run.script as inside
text = "def probe(call):\\n    return call()\\n\\ndef slip():\\n    return {{}}['ours']\\n"
code = compile(text, inside.__file__, "exec")
ours = types.ModuleType("ours"); exec(code, ours.__dict__)
def lose():
    raise ValueError("loss is nan")
def step():
    {call}
step()
"""


def test_probes_between_the_scripts_frames_are_hidden(workbench: Workbench) -> None:
    workbench.write("train.py", OUR_FRAMES.format(folder=str(workbench.folder), call="ours.probe(lose)"))
    stderr = workbench.guarded("train.py").stderr
    assert "run/script.py" not in stderr
    assert [line.split()[-1] for line in stderr.splitlines() if "File" in line] == ["<module>", "step", "lose"]
    assert "run/script.py" in workbench.plain("train.py").stderr


def test_an_accident_of_ours_shows_its_frames(workbench: Workbench) -> None:
    workbench.write("train.py", OUR_FRAMES.format(folder=str(workbench.folder), call="ours.probe(ours.slip)"))
    stderr = workbench.guarded("train.py").stderr
    assert [line.split()[-1] for line in stderr.splitlines() if "File" in line] == ["<module>", "step", "probe", "slip"]
