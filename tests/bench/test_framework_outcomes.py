"""The frameworks' own outcomes: what is read out of an output, and what a script's weights were when it ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import warm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "overhead"), str(ROOT / "bench" / "frameworks")]

from bench.faults.truth import load_cases  # noqa: E402
from bench.frameworks.bare import Ending  # noqa: E402
from bench.frameworks.outcomes import FRAMEWORKS, framework_of, telling_line, weights_of  # noqa: E402

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("step 0 loss 1.5\nstep 1 loss 1.2\n", "nothing"),
        ("step 0 loss 1.5\nstep 8 loss nan\nstep 9 loss nan\n", "prints `step 8 loss nan`"),
        ("{'loss': '0', 'grad_norm': 'nan'}", "prints `{'loss': '0', 'grad_norm': 'nan'}`"),
        ("information on banana and inference\n", "nothing"),
        (f"loss nan\n{TRACEBACK}ValueError: Attempting to unscale\n", "raises `ValueError: Attempting to unscale`"),
        (f"{TRACEBACK}[rank1]: RuntimeError: no\n{TRACEBACK}x.y.ChildFailedError: \n", "raises `RuntimeError: no`"),
        ("a.py:3: UserWarning: it skips\n", "warns `UserWarning: it skips`"),
        ("loss | nan\n", "prints `loss \\| nan`"),
    ],
)
def test_the_telling_line_of_an_output(output: str, line: str) -> None:
    assert telling_line(output) == line


def test_what_became_of_weights_in_words() -> None:
    good = Ending(tensors=4, nonfinite=0, unmoved=0, attempted=9, made=9, checksum=1)
    assert weights_of([good, good]) == "finite"
    bad = Ending(tensors=4, nonfinite=2, unmoved=1, attempted=9, made=7, checksum=2)
    assert weights_of([bad]) == "2 of 4 not finite; 1 of 4 never moved; 2 of 9 updates skipped"
    other = Ending(tensors=4, nonfinite=0, unmoved=0, attempted=9, made=9, checksum=3)
    assert weights_of([good, other]) == "differ between ranks"
    assert weights_of([]) == "not known"


def test_a_script_is_looked_at_and_ends_as_it_would(tmp_path: Path) -> None:
    script = """import sys, torch
used, forgotten = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD([*used.parameters(), *forgotten.parameters()], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for step in range(4):
    optimizer.zero_grad()
    scaler.scale(used(torch.ones(1, 2)).sum() * (float("inf") if step == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
sys.exit(3)
"""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "bench.frameworks.bare", str(tmp_path / "ending.json"), str(tmp_path / "train.py")]
    assert warm.run(command, cwd=ROOT).returncode == 3
    ending = json.loads((tmp_path / "ending.json").read_bytes())
    assert {**ending, "checksum": 0} == {
        "tensors": 4, "nonfinite": 0, "unmoved": 2, "attempted": 4, "made": 3, "checksum": 0,
    }  # fmt: skip


def test_every_framework_has_three_faults() -> None:
    faults = [framework_of(case.name) for case in load_cases() if case.kind == "fault"]
    few = {name: faults.count(name) for name in FRAMEWORKS if faults.count(name) < 3}
    assert few == {}


def test_a_pace_pairs_neighbouring_blocks_in_alternating_order() -> None:
    from contextlib import contextmanager

    from paced import Pace
    from torch import nn

    order: list[str] = []

    def row(name: str):
        @contextmanager
        def within(model: nn.Module):
            order.append(name)
            yield
            order.append("-")

        return within

    pace = Pace(nn.Identity(), row("guard"), row("plain"), pairs=2, warm_up=2, steps=3)
    assert list(pace) == [0, 0] + [0, 0, 1, 1, 1] * 4
    assert order == ["plain", "-", "guard", "-", "guard", "-", "plain", "-"]
    assert len(pace.ratios) == len(pace.seconds) == 2
