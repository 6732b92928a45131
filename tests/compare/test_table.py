"""The comparison as it is printed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ampguard.compare.course import Course
from ampguard.compare.evaluation import run_evaluation
from ampguard.compare.runs import Subject, run_each
from ampguard.compare.table import print_comparison
from ampguard.compare.verdict import recommend

LOSSES = tuple(2.0 * 0.97**i for i in range(12345))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_is_cut_off_at_80_columns(is_terminal: bool) -> None:
    out = io.StringIO()
    courses = [
        Course(name, 0, 12345, losses, 120, 3, 130, 0.1234, 81234.0, folder=f"/runs/{name}")
        for name, losses in (("fp32", LOSSES), ("bf16-true", LOSSES), ("fp16", (None,) * 12345))
    ]
    console = Console(file=out, width=80, force_terminal=is_terminal, color_system=None)
    print_comparison(courses, recommend(courses), console)
    table = out.getvalue().split("recommended")[0]
    assert "…" not in table
    for cell in ("bf16-true", "not finite", "12345", "123.4 ms", "81234 MiB"):
        assert cell in table
    if is_terminal:
        assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            'raise ValueError("no such data set")',
            "it ended with status 1 before it computed anything: ValueError: no such",
        ),
        ("", "it ended with status 0 before it computed anything: ampguard: the script did not import torch"),
    ],
)
def test_a_run_that_left_nothing_says_how_it_ended(script: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    (course,) = run_each(Subject((str(tmp_path / "train.py"),)), ["fp32"], tmp_path, lambda _: None)
    assert course.trouble is not None
    assert course.trouble.startswith(said)
    assert "cannot read" not in course.trouble


def test_an_evaluation_that_left_nothing_says_how_it_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('raise ValueError("no such data set")')
    found = run_evaluation(Subject((str(tmp_path / "train.py"),)), ["fp16"], tmp_path)
    assert found.trouble is not None
    assert found.trouble.startswith("it ended with status 1 before it computed anything: ValueError: no such data set")


def test_a_run_that_left_nothing_says_where_its_output_is(tmp_path: Path) -> None:
    (course,) = run_each(Subject((str(tmp_path / "missing.py"),)), ["fp32"], tmp_path, lambda _: None)
    assert course.trouble is not None
    assert str(tmp_path / "fp32-output.txt") in course.trouble
    assert (tmp_path / "fp32-output.txt").read_text()
