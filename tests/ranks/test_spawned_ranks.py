"""Ranks that the guarded script starts by itself are guarded, and neither they nor the script see any of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, WITHIN_S

import warm
from ampguard.report.store import read_report

SCRIPT = str(Path(__file__).with_name("spawning_trainings.py"))


def ended(folder: Path, *words: str, guarded: bool = True) -> subprocess.CompletedProcess[str]:
    guard = ["-m", "ampguard", "run", "--out", "out"] if guarded else []
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "AMPGUARD_DEBUG": "1"}
    command = [sys.executable, *guard, SCRIPT, *words]
    return warm.run(command, cwd=folder, env=env, timeout=WITHIN_S, modules=warm.TORCH if guarded else warm.RANKS)


@pytest.mark.slow
def test_what_the_script_sees_of_spawned_ranks_is_the_same(tmp_path: Path) -> None:
    plain = ended(tmp_path, "fork:2:none", "fork:2:raise", guarded=False)  # the same numbers, and sooner
    guarded = ended(tmp_path, "spawn:2:none", "fork:2:raise")
    assert guarded.returncode == plain.returncode == 1
    assert guarded.stdout == plain.stdout != ""
    tracebacks = [
        re.findall(r"^Traceback.*?^ValueError: .*?$", e.stderr, re.DOTALL | re.MULTILINE) for e in (plain, guarded)
    ]
    assert len(tracebacks[0]) == 1
    assert tracebacks[0] == tracebacks[1]
    assert guarded.stderr.count("ampguard:") == 1  # "4 steps, no incident"
    report = read_report(tmp_path / "out")
    assert report.incidents == ()
    assert (report.steps, report.environment.world_size) == (4, 2)
    assert report.ranks == {"reported": 2, "missing": [], "missing_count": 0}


def test_a_failure_is_told_once_with_its_rank(tmp_path: Path) -> None:
    """A later launch of the same run does not take an earlier one's notes for its own."""
    words = "fork:4:none", "Process:2:log", "Class:2:none"
    plain, guarded = ended(tmp_path, *words, guarded=False), ended(tmp_path, *words)
    assert (guarded.returncode, guarded.stdout) == (0, plain.stdout), guarded.stderr
    assert "a fault of its own" not in guarded.stderr
    report = read_report(tmp_path / "out")
    assert [(i.cause, i.step, i.rank) for i in report.incidents] == [("domain-error", 3, 1)]
    assert any(fix.verified for fix in report.incidents[0].fixes)
    assert report.ranks == {"reported": 4, "missing": [], "missing_count": 0}
