"""The run folder: one per run, never an old one, the same for all ranks of a launch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ampguard.errors import RunFolderError, UsageError
from ampguard.incident import Report
from ampguard.report.store import MERGE_WITHIN_S, locked, write_rank_report, write_report

DEFAULT_ROOT = "ampguard-runs"
_RANKS_ARRIVE_WITHIN_S = 900.0
_SIGNATURE = ".rank-"


@dataclass(frozen=True)
class Launch:
    """This process's place among the ranks that one launcher started, as torchrun and its like say it."""

    rank: int = 0
    world_size: int = 1
    restart: int = 0
    max_restarts: int = 0
    identity: str = ""
    is_child: bool = False
    """Whether the guarded script started this process itself."""

    @property
    def shares(self) -> bool:
        """Whether the run folder is that of other processes too."""
        return self.world_size > 1 or self.is_child

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        env = os.environ if environ is None else environ
        world_size = _number(env, "WORLD_SIZE", 1)
        if world_size <= 1:
            return cls()
        return cls(
            rank=_number(env, "RANK", 0),
            world_size=world_size,
            restart=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=_number(env, "TORCHELASTIC_MAX_RESTARTS", 0),
            identity=_identity(env, world_size),
        )


@dataclass(frozen=True)
class RunFolder:
    """Where this run's report goes."""

    path: Path
    launch: Launch = Launch()

    @property
    def report_path(self) -> Path:
        return self.path / "report.json"

    def write(self, report: Report, is_last: bool = True) -> str | None:
        """Write the report; with several ranks, this rank's and the merged one. Returns None or what went wrong.

        `is_last`: whether to wait (a little) for another rank that is merging; else that is left to it.
        """
        if not self.launch.shares:
            return write_report(self.path, report)
        return write_rank_report(self.path, report, self.launch.rank, self.launch.restart, _waits(is_last))

    def write_beside_children(self, report: Report, is_last: bool = True) -> str | None:
        """Write the report of a process whose children have theirs in this folder, and merge it with them."""
        return write_rank_report(self.path, report, None, within_s=_waits(is_last))

    def has_children(self) -> bool:
        """Whether processes that this one started have put their names down."""
        with contextlib.suppress(OSError):
            return any(file.name.startswith(_SIGNATURE) for file in self.path.iterdir())
        return False


def _waits(is_last: bool) -> float:
    return MERGE_WITHIN_S if is_last else 0.0


def join_run_folder(path: Path, launch: Launch) -> RunFolder:
    """The folder of the process that started this one. Raises RunFolderError where another child has this one's number."""
    if not _sign_in(path, launch):
        raise RunFolderError(f"another process of this run is rank {launch.rank} already")
    return RunFolder(path, launch)


def make_run_folder(
    out: Path | None, script_name: str, launch: Launch | None = None, root: Path | None = None
) -> RunFolder:
    """Make the folder of this run, before the script starts.

    `out` is the folder asked for; without one it is `<root>/<date>-<time>-<script>`, never one that exists.
    Raises `UsageError` where `out` holds something already and `RunFolderError` where no folder can be made.
    """
    if (reserved := _reserved.pop((out, script_name), None)) is not None:
        return reserved
    launch = Launch.from_environment() if launch is None else launch
    root = Path(DEFAULT_ROOT) if root is None else root

    def make() -> Path:
        return _dated_folder(root, script_name) if out is None else _asked_folder(out)

    try:
        # Absolute: the script may change its working directory before the report is written.
        if launch.world_size == 1:
            return RunFolder(make().absolute(), launch)
        return RunFolder(_shared_folder(make, out.parent if out else root, launch).absolute(), launch)
    except OSError as error:
        where, hint = (out, "") if out is not None else (root, "; name another place with --out")
        raise RunFolderError(f"cannot make the run folder {where}: {error.strerror or error}{hint}") from error


def reserve_run_folder(out: Path | None, script_name: str) -> RunFolder:
    """Make the run folder now; the next `make_run_folder` of this process with the same arguments returns it."""
    folder = make_run_folder(out, script_name)
    _reserved[out, script_name] = folder
    return folder


_reserved: dict[tuple[Path | None, str], RunFolder] = {}


def _dated_folder(root: Path, script_name: str) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_stem(script_name)}"
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():  # a file stands where the root should be
                raise
            number += 1
        else:
            return path


def _asked_folder(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: there is a file of that name")
    out.mkdir(parents=True, exist_ok=True)
    if (out / "report.json").exists():
        raise UsageError(f"--out {out}: holds the report of an earlier run, which is never overwritten")
    # Names put down by the ranks of a launch that was killed before it wrote anything are nobody's data.
    if any(not file.name.startswith(_SIGNATURE) for file in out.iterdir()):
        raise UsageError(f"--out {out}: is not empty; name a new folder")
    probe = out / ".writable"
    probe.touch()
    probe.unlink()
    return out


def name_of_program() -> str:
    """What a run folder is named after where no script is given: the running one; a notebook; a session at a prompt."""
    name = Path(sys.argv[0]).stem if sys.argv else ""
    return {"": "session", "-c": "session", "ipykernel_launcher": "notebook"}.get(name, name)


def _stem(script_name: str) -> str:
    stem = script_name.removesuffix(".py").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "_", stem).strip(".") or "script"


def _shared_folder(make: Callable[[], Path], parent: Path, launch: Launch) -> Path:
    """The folder that the first rank of this launch made; each rank puts its name down in it, once.

    The ranks meet over a small file beside the folder. If this rank's name is in the folder already, what was found
    belongs to an earlier launch from the same shell, and this rank is the first of a new one.
    """
    parent.mkdir(parents=True, exist_ok=True)
    meeting = parent / f".launch-{launch.identity}"
    with locked(meeting) as file:
        file.seek(0)
        note = _note_of_launch(file.read(), parent, launch)
        if note is None or not _sign_in(parent / note.folder, launch):
            note = _Note(make().name, time.time())
            _sign_in(parent / note.folder, launch)
        note.signed_in += 1
        # Written in one go, then cut: a launcher may kill this rank at any point, and the note must stay readable.
        file.seek(0)
        file.write(json.dumps(asdict(note)) + "\n")
        file.truncate()
        if launch.max_restarts == 0 and note.signed_in >= launch.world_size:
            with contextlib.suppress(OSError):
                meeting.unlink()  # all are here
    return parent / note.folder


@dataclass
class _Note:
    """What the meeting file says: the folder that the first rank made, when, and how many have put their name down."""

    folder: str
    made: float
    signed_in: int = 0


def _note_of_launch(text: str, parent: Path, launch: Launch) -> _Note | None:
    try:
        note = _Note(**json.loads(text.partition("\n")[0]))
        is_current = launch.restart > 0 or time.time() - note.made < _RANKS_ARRIVE_WITHIN_S
        return note if is_current and (parent / note.folder).is_dir() else None
    except (ValueError, TypeError):
        return None


def _sign_in(folder: Path, launch: Launch) -> bool:
    try:
        (folder / f"{_SIGNATURE}{launch.rank}-{launch.restart}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _identity(env: Mapping[str, str], world_size: int) -> str:
    """What the ranks of one launch have in common and, as far as can be told, no other launch has."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    meeting_point = ("MASTER_ADDR", "MASTER_PORT")
    if _number(env, "LOCAL_WORLD_SIZE", 0) == world_size or "MASTER_ADDR" not in env:
        # One machine: they have one parent. (A restarted launch may come back with another port.)
        common = [socket.gethostname(), str(os.getppid()), *(env.get(name, "") for name in names)]
    else:
        common = [env.get(name, "") for name in (*names, *meeting_point)]
    return hashlib.sha256("\0".join(common).encode()).hexdigest()[:12]


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env[name])
    except (KeyError, ValueError):
        return default
