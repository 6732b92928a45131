"""Which precision is recommended follows from the courses' numbers."""

from __future__ import annotations

from typing import Any

import pytest

from ampguard.compare.course import Course
from ampguard.compare.distance import distance, noise, shift
from ampguard.compare.table import plain_lines, row_of
from ampguard.compare.verdict import recommend
from ampguard.incident import Incident

FALLING = tuple(2.0 * 0.97**i for i in range(100))


def course(precision: str, **changes: Any) -> Course:
    settings = {"losses": FALLING, "step_seconds": 0.1, "memory_mib": 1000.0, **changes}
    return Course(precision, settings.pop("status", 0), settings.pop("steps", 100), **settings)


def error(severity: str = "error") -> Incident:
    return Incident(41, 0, "train", "forward", severity, "fp16-overflow", "blocks.3", None, "float16", None, "")


def shifted(factor: float) -> tuple[float, ...]:
    return tuple(loss * factor for loss in FALLING)


def test_the_fastest_that_trains_alike() -> None:
    verdict = recommend([course("fp32"), course("fp16", step_seconds=0.05), course("bf16", step_seconds=0.04)])
    assert verdict.recommended == "bf16"
    assert verdict.reason == "2.50 times as fast as fp32; its loss is the same as fp32's"
    assert verdict.against == {"fp32": "2.50 times bf16's time", "fp16": "1.25 times bf16's time"}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"incidents": (error(),), "nonfinite": 1}, "not finite: fp16-overflow in blocks.3, first in step 41"),
        ({"incidents": (error(),)}, "an error was found: fp16-overflow in blocks.3, first in step 41"),
        ({"losses": FALLING[:50] + shifted(1000.0)[50:]}, "its loss rose from 2 to 112.9"),
        ({"losses": shifted(1.3)}, "its loss is 30.0% above fp32's"),
        ({"losses": (2.0,) + (None,) * 99}, "its losses cannot be compared"),
        (
            {"status": 1, "folder": "/runs/fp16"},
            "the script ended with status 1; what it printed is in /runs/fp16-output.txt",
        ),
        ({"skipped": 40, "skipped_late": 20}, "20 of its last 50 steps were skipped"),
        ({"steps": 0, "losses": ()}, "no optimizer step was made"),
        ({"trouble": "cannot read the report x"}, "cannot read the report x"),
    ],
)
def test_a_fast_one_that_does_not_train(fault: dict[str, Any], why: str) -> None:
    verdict = recommend([course("fp32"), course("fp16", step_seconds=0.01, **fault)])
    assert verdict.recommended == "fp32"
    assert verdict.against["fp16"] == why


@pytest.mark.parametrize(
    "harmless", [{"incidents": (error("info"),), "skipped": 3}, {"losses": shifted(0.7)}, {"losses": shifted(1.01)}]
)
def test_what_does_no_harm(harmless: dict[str, Any]) -> None:
    """A scale that settled, a lower loss, a loss within 2 %."""
    assert recommend([course("fp32"), course("fp16", step_seconds=0.05, **harmless)]).recommended == "fp16"


def test_within_the_noise_of_float32() -> None:
    noisy = tuple(1.0 + 0.2 * (-1) ** i for i in range(100))
    reference = course("fp32", losses=noisy)
    other = course("bf16", losses=tuple(x + 0.1 for x in noisy), step_seconds=0.05)
    assert noise(reference) == pytest.approx(0.4, rel=0.02)
    assert recommend([reference, other]).recommended == "bf16"


def test_float32_that_diverges_is_not_recommended() -> None:
    rising = tuple(2.0 * 1.2**i for i in range(100))
    verdict = recommend([course("fp32", losses=rising), course("bf16")])
    assert verdict.recommended == "bf16"
    assert verdict.reason.startswith("fp32 itself does not train (its loss rose from 10.32 to ")
    both = recommend([course("fp32", losses=rising), course("bf16", losses=rising)])
    assert both.recommended is None
    assert recommend([course("fp32", losses=(1e-9, *FALLING))]).recommended == "fp32"  # one small loss is no beginning


def test_one_precision_is_compared_with_nothing() -> None:
    assert recommend([course("fp16")]).reason == "nothing else was run"


def test_nothing_gained() -> None:
    verdict = recommend([course("fp32"), course("bf16", step_seconds=0.099)])
    assert (verdict.recommended, verdict.reason) == ("fp32", "no other precision is faster or smaller on this device")
    few = recommend([course("fp32", steps=5), course("bf16", steps=5, step_seconds=0.01)])
    assert (few.recommended, few.reason) == ("fp32", "5 steps are too few to compare times")
    assert all("times would be compared" in why for why in few.against.values())


def test_memory_is_worth_something_where_time_is_the_same() -> None:
    verdict = recommend([course("fp32"), course("bf16", memory_mib=600.0)])
    assert (verdict.recommended, verdict.reason.partition(";")[0]) == ("bf16", "40% less memory than fp32")


def test_float32_fails_too() -> None:
    verdict = recommend([course("fp32", incidents=(error(),)), course("fp16", incidents=(error(),))])
    assert verdict.recommended is None
    assert "precision is not the cause" in verdict.reason


def test_distances() -> None:
    reference = course("fp32", losses=(4.0,) * 8)
    assert distance(course("bf16", losses=(4.0,) * 6 + (4.4, 3.6)), reference) == pytest.approx(0.1)
    assert shift(course("bf16", losses=(4.0,) * 6 + (4.4, 3.6)), reference) == pytest.approx(0.0)
    assert shift(course("bf16", losses=(4.0,) * 6 + (3.0, 3.0)), reference) == pytest.approx(-0.25)
    assert distance(course("bf16", losses=(4.0,) * 6 + (None, None)), reference) is None


def test_final_loss() -> None:
    assert course("fp32", losses=(9.0,) * 95 + (1.0,) * 5).final_loss == pytest.approx(5.0)
    assert course("fp32", losses=(9.0, None, None, None)).final_loss is None


def test_a_table_of_a_failed_run() -> None:
    reference = course("fp32")
    rows = [
        row_of(c, reference) for c in (reference, course("fp16", losses=(1.0,) + (None,) * 9), Course("bf16", 1, 0))
    ]
    lines = plain_lines(rows)
    assert "not finite" in lines[1]
    assert lines[2].split() == ["bf16", "0", "-", "-", "0", "0", "-", "-"]
    assert len({len(line) for line in lines}) == 1
