"""The pages of the causes: read from their files, never imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampguard.errors import UsageError
from ampguard.incident import CAUSES
from ampguard.report import explain as room
from ampguard.report.explain import explain, list_causes


@pytest.mark.parametrize("code", CAUSES)
def test_every_code_is_explained(code: str) -> None:
    assert explain(code).startswith(f"{code}: ")


def test_the_page_is_the_files_docstring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = '"""mask-overflow: too low.\n\nWhat happens   it became -Inf é.\n"""\nraise ImportError("not for reading")\n'
    (tmp_path / "mask_overflow.py").write_text(page, encoding="utf-8")
    monkeypatch.setattr(room, "_CAUSE_FILES", tmp_path)
    assert explain("mask-overflow") == "mask-overflow: too low.\n\nWhat happens   it became -Inf é."
    assert explain("overflow") == f"overflow: {CAUSES['overflow']}"  # no file: its one-line meaning


def test_the_causes_are_looked_for_where_they_live() -> None:
    import ampguard.diagnose.causes as causes

    assert causes.__file__ is not None
    assert Path(causes.__file__).parent == room._CAUSE_FILES


def test_the_list_has_one_line_per_code() -> None:
    lines = list_causes().splitlines()
    assert [line.split()[0] for line in lines] == list(CAUSES)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("fp16_overflow", "did you mean fp16-overflow"),
        ("Devision-by-zero", "division-by-zero"),
        ("qqq", "lists all codes"),
    ],
)
def test_an_unknown_code_names_the_nearest(wrong: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        explain(wrong)
