"""The run folder: new, never an old one, one for all ranks of a launch; the wrong `--out` is refused at once."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import pytest

from ampguard.errors import RunFolderError, UsageError
from ampguard.incident import Environment, Report
from ampguard.report.store import locked, read_report
from ampguard.run.folder import Launch, make_run_folder, name_of_program

SOURCES = Path(__file__).parents[2] / "src"
ALONE = Launch()
CLEAN = Report("clean", Environment("2.13.0", "3.11.7", "cpu", 1), 3)


def test_default_folder_is_dated_and_named_after_the_script(tmp_path: Path) -> None:
    folder = make_run_folder(None, "src/train.py", ALONE, root=tmp_path / "runs")
    assert re.fullmatch(r"\d{8}-\d{6}-train", folder.path.name)
    assert folder.path.is_dir()


@pytest.mark.parametrize(
    ("script", "stem"), [("pkg.train", "pkg.train"), ("a/b c'.py", "b_c_"), ("app/", "app"), ("..", "script")]
)
def test_odd_script_names(tmp_path: Path, script: str, stem: str) -> None:
    assert make_run_folder(None, script, ALONE, root=tmp_path).path.name.split("-", 2)[2] == stem


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("/home/me/train.py", "train"),
        ("/venv/lib/python3.12/site-packages/ipykernel_launcher.py", "notebook"),
        ("-c", "session"),
        ("", "session"),
    ],
)
def test_name_of_the_program_that_watches_itself(program: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert name_of_program() == name


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_run_folder(None, "train.py", ALONE, root=tmp_path).path, range(12)))
    assert len(set(made)) == 12
    assert any(path.name.endswith("-train-2") for path in made)


def test_the_folder_stays_where_it_is_when_the_script_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run_folder(Path("out"), "train.py", ALONE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert folder.write(CLEAN) is None
    assert read_report(tmp_path / "out") == CLEAN


def test_asked_folder_may_be_new_or_empty(tmp_path: Path) -> None:
    for name in ("new/deep", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert make_run_folder(tmp_path / name, "train.py", ALONE).path == tmp_path / name
        assert list((tmp_path / name).iterdir()) == []


@pytest.mark.parametrize(
    ("file", "message"), [("report.json", "earlier run"), ("notes.txt", "is not empty"), (".hidden", "is not empty")]
)
def test_asked_folder_that_holds_something_is_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_text("kept")
    with pytest.raises(UsageError, match=message):
        make_run_folder(tmp_path, "train.py", ALONE)
    assert (tmp_path / file).read_text() == "kept"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="a file of that name"):
        make_run_folder(tmp_path / "file", "train.py", ALONE)
    with pytest.raises(RunFolderError, match="Not a directory"):
        make_run_folder(tmp_path / "file" / "out", "train.py", ALONE)
    with pytest.raises(RunFolderError, match=r"Not a directory|File exists"):
        make_run_folder(None, "train.py", ALONE, root=tmp_path / "file")


def test_no_permission() -> None:
    """/proc takes no new folders, not even from root."""
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    with pytest.raises(RunFolderError, match="cannot make the run folder /proc/nowhere/run"):
        make_run_folder(Path("/proc/nowhere/run"), "train.py", ALONE)
    with pytest.raises(RunFolderError, match="; name another place with --out"):
        make_run_folder(None, "train.py", ALONE, root=Path("/proc/nowhere"))


def torchrun(rank: int, world_size: int = 4, **other: str) -> Launch:
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        **other,
    }
    return Launch.from_environment(environ)


def test_without_a_launcher_there_is_one_rank() -> None:
    assert Launch.from_environment({}) == Launch.from_environment({"WORLD_SIZE": "1", "RANK": "0"}) == ALONE
    assert Launch.from_environment({"WORLD_SIZE": "many"}) == ALONE


@pytest.mark.parametrize("out", [None, "asked"])
def test_all_ranks_of_a_launch_share_a_folder(tmp_path: Path, out: str | None) -> None:
    asked = tmp_path / out if out else None
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda rank: make_run_folder(asked, "t.py", torchrun(rank), root=tmp_path), range(4)))
    assert len({folder.path for folder in folders}) == 1
    for folder in folders:
        assert folder.write(CLEAN) is None
    assert len(list(folders[0].path.glob("rank-*.json"))) == 4
    assert read_report(folders[0].path).steps == 3
    assert not list(tmp_path.glob(".launch-*"))


def test_the_next_launch_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first = [make_run_folder(None, "t.py", torchrun(rank), root=tmp_path).path for rank in (0, 1)]  # 2 and 3 died
    second = [make_run_folder(None, "t.py", torchrun(rank), root=tmp_path).path for rank in (1, 0, 2, 3)]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_the_next_launch_may_not_have_the_same_asked_folder(tmp_path: Path) -> None:
    for rank in range(4):
        make_run_folder(tmp_path / "asked", "t.py", torchrun(rank)).write(CLEAN)
    with pytest.raises(UsageError, match="earlier run"):
        make_run_folder(tmp_path / "asked", "t.py", torchrun(2))


def test_a_restarted_launch_goes_on_in_its_folder(tmp_path: Path) -> None:
    def ranks(restart: int, port: str) -> set[Path]:
        attempt = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": str(restart), "MASTER_PORT": port}
        folders = [make_run_folder(tmp_path / "asked", "t.py", torchrun(rank, **attempt)) for rank in range(4)]
        assert [folder.write(CLEAN) for folder in folders] == [None] * 4
        return {folder.path for folder in folders}

    assert ranks(0, "29500") == ranks(1, "41234") == {tmp_path / "asked"}
    assert len(list((tmp_path / "asked").glob("rank-*.json"))) == 8


def test_a_rank_killed_while_it_met_the_others_does_not_cost_the_restart_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher kills the other ranks as soon as one has failed, at whatever they are doing."""

    class Killed(BaseException):
        pass

    def rank(number: int, restart: int) -> Path:
        attempt = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": str(restart)}
        return make_run_folder(tmp_path / "asked", "t.py", torchrun(number, **attempt)).path

    class DiesAfter:
        """The meeting file of a process that is gone after so many calls that change it."""

        def __init__(self, file: TextIO, calls: int) -> None:
            self.file, self.calls = file, calls

        def __getattr__(self, name: str) -> Any:
            if name in ("write", "truncate"):
                self.calls -= 1
                if self.calls < 0:
                    raise Killed
            return getattr(self.file, name)

    for calls in (0, 1):
        with monkeypatch.context() as patch:

            @contextlib.contextmanager
            def locked_until_killed(path: Path, calls: int = calls) -> Iterator[Any]:
                with locked(path) as file:
                    yield DiesAfter(file, calls)

            patch.setattr("ampguard.run.folder.locked", locked_until_killed)
            with pytest.raises(Killed):
                rank(1, restart=0)
        assert rank(0, restart=calls + 1) == tmp_path / "asked"
        (tmp_path / "asked" / ".rank-1-0").unlink(missing_ok=True)


SHARE = (
    "import sys; from pathlib import Path; from ampguard.run.folder import make_run_folder; "
    "print(make_run_folder(Path(sys.argv[1]), 't.py').path)"
)


def test_machines_that_share_a_disk_share_a_folder(tmp_path: Path) -> None:
    """Two machines have different parents (and host names); the meeting point they have in common."""
    paths = set()
    for rank in range(4):
        environ = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        environ |= {"MASTER_ADDR": "first", "MASTER_PORT": "1"}
        # A shell that stays: every rank has a parent of its own, as on machines of their own.
        command = f'"{sys.executable}" -c "{SHARE}" "{tmp_path / "asked"}"; true'
        env = {**os.environ, "PYTHONPATH": str(SOURCES), **environ}
        paths.add(subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=True).stdout)
    assert paths == {f"{tmp_path / 'asked'}\n"}


def test_torchrun_itself(tmp_path: Path) -> None:
    """The real launcher, with a restart: both attempts of both ranks end up in one folder."""
    pytest.importorskip("torch")
    (tmp_path / "rank.py").write_text(
        """
import os, sys
from pathlib import Path
from ampguard.incident import Environment, Report
from ampguard.run.folder import make_run_folder
folder = make_run_folder(Path(sys.argv[1]), "t.py")
steps = 10 * int(os.environ["RANK"]) + folder.launch.restart
assert folder.write(Report("clean", Environment("2.13.0", "3.11.7", "cpu", 2), steps)) is None
sys.exit(1 if folder.launch.restart == 0 else 0)
"""
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "--standalone", "--monitor-interval=0.05", str(tmp_path / "rank.py"), str(tmp_path / "asked")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert {"rank-0.restart-1.json", "rank-1.restart-1.json"} <= {file.name for file in (tmp_path / "asked").iterdir()}
    assert read_report(tmp_path / "asked").steps == 11
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["asked"]
