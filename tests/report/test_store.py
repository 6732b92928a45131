"""Reports on disk: whole or not at all; several ranks' merged; a failing disk is one line and no exception."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from ampguard.errors import RunFolderError
from ampguard.incident import Environment, Fix, Incident, Location, Report, Severity, status_of
from ampguard.report.store import _why, merge, read_report, write_rank_report, write_report

SOURCES = Path(__file__).parents[2] / "src"


def an_incident(
    step: int = 41, rank: int = 0, severity: Severity = "error", cause: str = "fp16-overflow", **evidence: object
) -> Incident:
    return Incident(
        step=step,
        rank=rank,
        mode="train",
        phase="forward",
        severity=severity,
        cause=cause,
        module="blocks.3.attn",
        op="aten.bmm.default",
        dtype="float16",
        location=Location("model.py", 57, "forward", "scores = q @ k"),
        explanation="too large",
        evidence=evidence,
        fixes=(Fix("use-bf16", None, "train in bfloat16", True, "finite"),),
    )


def a_report(*incidents: Incident, steps: int = 120, world_size: int = 1) -> Report:
    return Report(status_of(incidents), Environment("2.13.0", "3.11.7", "cpu", world_size), steps, incidents)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    report = a_report(an_incident(limit=65504.0))
    assert write_report(tmp_path / "run", report) is None
    assert read_report(tmp_path / "run") == report == read_report(tmp_path / "run" / "report.json")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["report.json"]
    assert json.loads((tmp_path / "run" / "report.json").read_bytes())["schema"] == "ampguard.report/1"


def test_nonfinite_evidence_survives_json(tmp_path: Path) -> None:
    evidence = {"max": float("inf"), "rows": [float("nan"), {"low": float("-inf")}], "limit": 65504.0}
    write_report(tmp_path, a_report(an_incident(**evidence)))
    read = read_report(tmp_path).incidents[0].evidence
    assert read == {"max": "Inf", "rows": ["NaN", {"low": "-Inf"}], "limit": 65504.0}


def test_evidence_that_is_no_json_is_one_line(tmp_path: Path) -> None:
    class Wordless:
        def __str__(self) -> str:
            raise ValueError

    problem = write_report(tmp_path, a_report(an_incident(value=Wordless())))
    assert problem is not None
    assert "report.json" in problem
    assert "\n" not in problem
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_keeps_the_old_report(tmp_path: Path) -> None:
    """A real write that fails half way (the file size limit): no exception, the earlier report is whole."""
    old = a_report(an_incident())
    write_report(tmp_path, old)
    script = f"""
import resource, sys
sys.path.insert(0, {str(SOURCES)!r}); sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_store import a_report, an_incident
from ampguard.report.store import write_report
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
print(write_report(Path({str(tmp_path)!r}), a_report(*[an_incident(step=i) for i in range(50)])))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == f"the report could not be written to {tmp_path / 'report.json'}: File too large\n"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert read_report(tmp_path) == old


def test_a_full_disk_is_called_by_its_name() -> None:
    assert _why(Path("r.json"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))).endswith("the disk is full")


def test_a_folder_that_went_away_is_made_again(tmp_path: Path) -> None:
    assert write_report(tmp_path / "a" / "b", a_report()) is None
    (tmp_path / "file").touch()
    assert "Not a directory" in str(write_report(tmp_path / "file" / "b", a_report()))


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 3}', "not json"])
def test_reading_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"report\.json is not a report"):
        read_report(tmp_path)


def test_reading_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="No such file"):
        read_report(tmp_path / "nowhere.json")


def test_the_same_failure_on_several_ranks_is_one_incident() -> None:
    merged = merge(
        [
            a_report(an_incident(rank=0, limit=1.0), steps=10, world_size=3),
            a_report(an_incident(rank=1), an_incident(step=5, rank=1, severity="info"), steps=12),
            a_report(an_incident(rank=2), an_incident(rank=2, cause="overflow")),
        ]
    )
    assert [(i.step, i.cause, i.rank, i.evidence.get("ranks")) for i in merged.incidents] == [
        (41, "fp16-overflow", 0, [0, 1, 2]),
        (41, "overflow", 2, None),
        (5, "fp16-overflow", 1, None),
    ]
    assert merged.incidents[0].evidence["limit"] == 1.0
    assert (merged.steps, merged.status, merged.environment.world_size) == (120, "incidents", 3)


def test_merged_incidents_are_in_order_of_severity_step_and_rank() -> None:
    first = a_report(an_incident(step=1, severity="info"), an_incident(step=9), an_incident(step=7, severity="warning"))
    second = a_report(an_incident(step=8, rank=1), an_incident(step=0, severity="warning", rank=1))
    order = [(i.severity, i.step) for i in merge([first, second]).incidents]
    assert order == [("error", 8), ("error", 9), ("warning", 0), ("warning", 7), ("info", 1)]


def test_a_clean_rank_does_not_make_the_run_clean(tmp_path: Path) -> None:
    write_rank_report(tmp_path, a_report(an_incident(rank=1)), rank=1)
    write_rank_report(tmp_path, a_report(), rank=0)
    assert read_report(tmp_path).status == "incidents"


def test_a_guard_that_went_off_on_one_rank_is_told_of_the_run() -> None:
    off = msgspec.structs.replace(a_report(), status="incidents", off_since_step=4)
    merged = merge([a_report(), off])
    assert (merged.status, merged.off_since_step) == ("incidents", 4)
    assert merge([a_report(), a_report()]).off_since_step is msgspec.UNSET


def test_ranks_that_finish_at_once_all_get_in(tmp_path: Path) -> None:
    def finish(rank: int) -> str | None:
        return write_rank_report(tmp_path, a_report(an_incident(rank=rank), world_size=8), rank)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(finish, range(8))) == [None] * 8
    assert read_report(tmp_path).incidents[0].evidence["ranks"] == list(range(8))


def test_rank_writing_is_idempotent_and_keeps_earlier_attempts(tmp_path: Path) -> None:
    write_rank_report(tmp_path, a_report(an_incident(step=3)), rank=0)
    for _ in range(2):
        write_rank_report(tmp_path, a_report(an_incident(step=8)), rank=0, restart=1)
    assert [i.step for i in read_report(tmp_path).incidents] == [3, 8]


def test_another_ranks_broken_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "rank-1.json").write_text('{"status": ')
    (tmp_path / "rank-notes.json").write_text("{}")
    assert write_rank_report(tmp_path, a_report(an_incident()), rank=0) is None
    assert len(read_report(tmp_path).incidents) == 1


def test_names_of_files_that_the_locale_does_not_know(tmp_path: Path) -> None:
    """Python has lone surrogates for their bytes, which no JSON can hold: the report was lost."""
    name = "bad é.py".encode().decode("ascii", "surrogateescape")
    incident = msgspec.structs.replace(an_incident(names=[name, "\ud800"]), location=Location(name, 1, "f", "x = 1"))
    report = Report("incidents", Environment("2.13.0", "3.11.7", "cpu", 1), 3, (incident,))
    assert write_report(tmp_path, report) is None
    (read,) = read_report(tmp_path).incidents
    assert read.location is not None
    assert read.location.file == "bad é.py"
    assert read.evidence["names"] == ["bad é.py", "?"]


def test_evidence_that_json_does_not_know(tmp_path: Path) -> None:
    report = Report(
        "incidents", Environment("2.13.0", "3.11.7", "cpu", 1), 3, (an_incident(large=2**70, path=Path("a"), small=-3),)
    )
    assert write_report(tmp_path, report) is None
    (read,) = read_report(tmp_path).incidents
    assert read.evidence == {"large": str(2**70), "path": "a", "small": -3}
