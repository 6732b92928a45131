"""The standard deviation of one element: the printed line, put into the script, gives the loss that it promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_fix_texts import promised, run, script

Guard = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:std\\(\\):UserWarning", "ignore:var\\(\\):UserWarning")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("one = h[0, :1]; r = one / (one.std() + 1e-3)", "r = one / (one.std(correction=0) + 1e-3)"),
        ("one = h[:1, 0]; r = one * torch.std(one)", "r = one * torch.std(one, correction=0)"),
        ("one = h[0, :1]; r = h.std() + one.var() + one", "r = h.std() + one.var(correction=0) + one"),
        ("one = h[:1]; r = one * one.std(0)", "r = one * one.std(0, correction=0)"),
        ("one = h[:1]; r = one * one.var(dim=0, keepdim=True)", "r = one * one.var(dim=0, keepdim=True, correction=0)"),
        ("one = h[:1]; r = one * torch.var(one, (0,),)", "r = one * torch.var(one, (0,),correction=0)"),
        ("one = h[:1]; r = one * one.std(0, unbiased=True)", "r = one * one.std(0, unbiased=False)"),
        ("one = h[:1]; r = one * one.var(dim=0, correction=1)", "r = one * one.var(dim=0, correction=0)"),
    ],
)
def test_printed_line_is_what_was_tried(line: str, changed: str, guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "empty-reduction"
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert fix.how.endswith(f": {changed}")
    namespace: dict[str, Any] = {}
    exec(script(f"{line.split('; ')[0]}; {changed}", "outside"), namespace)
    assert namespace["loss"].item() == pytest.approx(promised(fix), rel=2e-3)


def test_argument_that_may_be_unbiased_stays_as_it_is_written(guard: Guard, tmp_path: Path) -> None:
    line = "dim = 0; r = h[:1].std(dim)"
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    (fix,) = [fix for fix in first.fixes if fix.action == "guard-empty"]
    assert "correction=0" in fix.how.partition(":")[0]
    assert fix.how.endswith(f": {line}")


def test_a_spread_that_divides_gets_an_epsilon_in_both_lines(guard: Guard, tmp_path: Path) -> None:
    """0 in place of NaN would be divided by; and the second view of the batch has but one row as well."""
    lines = ["one = (h[:1] - h[:1].mean(0)) / h[:1].std(0)", "two = h[:1] / h[:1].std(0)", "r = one + two"]
    changed = [
        "one = (h[:1] - h[:1].mean(0)) / (h[:1].std(0, correction=0) + 1e-6)",
        "two = h[:1] / (h[:1].std(0, correction=0) + 1e-6)",
    ]
    first, _ = run(script("\n".join(lines), "outside"), tmp_path / "script.py", guard)
    assert first is not None
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    one, two = fix.how.splitlines()
    assert one.endswith(f": {changed[0]}")
    assert f": {changed[1]}  # " in two
    namespace: dict[str, Any] = {}
    exec(script("\n".join([*changed, lines[2]]), "outside"), namespace)
    assert namespace["loss"].item() == pytest.approx(promised(fix), rel=2e-3)


def test_a_mean_beside_a_loss_that_takes_one(guard: Guard, tmp_path: Path) -> None:
    """Both have nothing to reduce: one of them alone, rewritten, would be no cure."""
    line = "none = h[:0]; r = F.cross_entropy(h, x.argmax(1) % 3) + F.l1_loss(none, none * 2) + (1 - none).mean()"
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "empty-reduction"
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert "numel()" not in fix.how
    assert "clamp(" not in fix.how
    assert fix.how.endswith("(1 - none).mean()")


@pytest.mark.parametrize(
    ("spread", "changed"),
    [
        ("v.std()", "v.std(correction=min(1, v.numel() - 1))"),
        ("torch.var(v, 0)", "torch.var(v, 0, correction=min(1, v.shape[0] - 1))"),
    ],
)
def test_a_hidden_one_beside_spreads_that_stay(spread: str, changed: str, guard: Guard, tmp_path: Path) -> None:
    """Groups of one are kept from the loss, and the spreads of the others are what it learns from."""
    lines = "\n".join(
        [
            "groups = [h[0, :1], h[:4, 1], h[1:4, 2]]",
            "s = torch.stack([SPREAD for v in groups])",
            "r = torch.where(torch.tensor([False, True, True]), (s - 1) ** 2, 0.0)",
        ]
    )
    first, _ = run(script(lines.replace("SPREAD", spread), "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "singular-gradient"
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert fix.how.endswith(f": s = torch.stack([{changed} for v in groups])")
    namespace: dict[str, Any] = {}
    exec(script(lines.replace("SPREAD", changed), "outside"), namespace)
    assert namespace["loss"].item() == pytest.approx(promised(fix), rel=2e-3)
