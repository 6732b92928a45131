"""A check reads well in a terminal of 80 columns, and as a table where there is room."""

from __future__ import annotations

import pytest

from ampguard.check.examine import check_machine
from ampguard.check.facts import Check
from ampguard.check.text import as_text


@pytest.fixture(scope="module")
def check() -> Check:
    return check_machine(("cpu",))


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal(check: Check, columns: int) -> None:
    lines = as_text(check, columns).splitlines()
    assert max(map(len, lines)) <= columns
    (half,) = [i for i, line in enumerate(lines) if line.startswith("  float16 ")]
    told = " ".join(line.strip() for line in lines[half : half + 4])
    for word in ("matmul good", "convolution", "attention", "softmax", "GradScaler"):
        assert word in told


def test_a_file_or_a_wide_terminal_gets_the_table(check: Check) -> None:
    assert as_text(check, 300).split("\n\n")[1:] == as_text(check).split("\n\n")[1:]
    lines = as_text(check).splitlines()
    head = next(i for i, line in enumerate(lines) if line.split() == ["matmul", "convolution", "attention", "softmax"])
    assert [lines[head + i].split()[0] for i in (1, 2, 3)] == ["float32", "float16", "bfloat16"]
    column = lines[head].index("convolution")
    assert all(lines[head + i][column:].startswith("good") for i in (1, 2, 3))
