"""Reports of several ranks as one: what began where, and that nobody waits for a rank that is stuck."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from ampguard.incident import Environment, Incident, Report, status_of
from ampguard.report.merging import in_words, merge
from ampguard.report.store import read_report, write_rank_report


def incident(
    rank: int, cause: str, step: int = 5, phase: Any = "loss", severity: Any = "error", **evidence: Any
) -> Incident:
    return Incident(step, rank, "train", phase, severity, cause, None, None, None, None, "It failed.", evidence)


def report(*incidents: Incident, steps: int = 20, ranks: int = 4) -> Report:
    return Report(status_of(incidents), Environment("2.13.0", "3.11.7", "cpu", ranks), steps, incidents)


def merged(*reports: Report) -> list[tuple[Any, ...]]:
    whole = merge(reports, range(len(reports)))
    return [
        (i.cause, i.step, i.rank, i.evidence.get("ranks"), i.evidence.get("reached_ranks")) for i in whole.incidents
    ]


def test_what_came_with_the_gradients_is_told_where_it_began() -> None:
    poisoned = [incident(r, "nonfinite-parameter", 6, "parameters", gradients_changed_in_step=5) for r in (0, 2, 3)]
    began = incident(1, "domain-error")
    reports = [report(poisoned[0]), report(began), report(poisoned[1]), report(poisoned[2])]
    assert merged(*reports) == [("domain-error", 5, 1, [1], [0, 2, 3])]
    text = merge(reports, range(4)).incidents[0].explanation
    assert text.startswith("It failed. With the gradients it reached ranks 0, 2 and 3. Of 4 ranks only rank 1 saw it")
    elsewhere = incident(0, "nonfinite-parameter", 6, "parameters", gradients_changed_in_step=3)
    assert [row[0] for row in merged(report(elsewhere), report(began))] == ["domain-error", "nonfinite-parameter"]


def test_gradients_without_a_replay_belong_to_the_rank_whose_loss_failed() -> None:
    loss, gradients = incident(1, "unexplained"), incident(0, "unexplained", phase="backward")
    assert merged(report(gradients), report(loss)) == [("unexplained", 5, 1, [1], [0])]
    later = incident(0, "unexplained", step=9, phase="backward")
    assert len(merged(report(later), report(loss))) == 2
    assert len(merged(report(incident(0, "unexplained")), report(loss))) == 1  # the same on both


def test_the_odd_rank_out_is_the_one_that_all_others_differ_from() -> None:
    differing = [incident(r, "rank-divergence", phase="optimizer", compared_with_rank=0) for r in (1, 2, 3)]
    whole = merge([report(), *map(report, differing)], range(4))
    assert whole.incidents[0].evidence["ranks"] == [1, 2, 3]
    assert whole.incidents[0].explanation.endswith("look at rank 0 first.")
    some = merge([report(), *map(report, differing[:2]), report()], range(4))
    assert some.incidents[0].explanation == "It failed."


def test_nothing_is_said_about_ranks_that_had_not_come_so_far() -> None:
    assert merged(report(steps=5), report(incident(1, "domain-error"), steps=6)) == [("domain-error", 5, 1, None, None)]


def test_ranks_in_words() -> None:
    assert [in_words(ranks) for ranks in ([3], [0, 2], [0, 1, 3], [4, 5, 6])] == [
        "rank 3",
        "ranks 0 and 2",
        "ranks 0, 1 and 3",
        "ranks 4 to 6",
    ]
    assert in_words(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, 2); print(flush=True); input()"


def test_a_process_that_keeps_the_lock_delays_nobody_for_long(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".merge.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stuck:
        assert stuck.stdout is not None
        stuck.stdout.readline()
        assert write_rank_report(tmp_path, report(ranks=2), rank=0, within_s=0.2) is None
        assert (tmp_path / "rank-0.json").exists()
        assert not (tmp_path / "report.json").exists()
        stuck.kill()
    write_rank_report(tmp_path, report(ranks=2), rank=1)
    assert read_report(tmp_path).ranks == {"reported": 2, "missing": [], "missing_count": 0}
