"""Which options go together."""

from __future__ import annotations

import pytest

from ampguard.errors import UsageError
from ampguard.run.overrides.asked import Overrides, overrides_of


def test_nothing_asked() -> None:
    assert overrides_of(None, None, False, ()) is None


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        (("fp16", None, False), "fp16"),
        ((None, "O0", False), "fp32"),
        ((None, "O1", False), "fp16"),
        ((None, "bf16", False), "bf16"),
        ((None, "O2", False), "O2"),
        (("O3", "O3", False), "O3"),
        (("bf16-true", None, False), "bf16-true"),
        ((None, None, True), "fp32"),
        (("fp32", "O0", True), "fp32"),
    ],
)
def test_names(options: tuple[str | None, str | None, bool], precision: str) -> None:
    assert overrides_of(*options, ("head",)) == Overrides(precision, ("head",))


@pytest.mark.parametrize("options", [("fp16", "O0", False), ("bf16", None, True), ("O2", "O3", False)])
def test_contradictions(options: tuple[str | None, str | None, bool]) -> None:
    with pytest.raises(UsageError, match="contradict each other"):
        overrides_of(*options, ())


def test_an_empty_pattern() -> None:
    with pytest.raises(UsageError, match="an empty pattern"):
        overrides_of(None, None, False, ("",))


def test_an_option_in_place_of_a_pattern() -> None:
    with pytest.raises(UsageError, match="--force-fp32 --out: a pattern of modules is missing"):
        overrides_of(None, None, False, ("--out",))
