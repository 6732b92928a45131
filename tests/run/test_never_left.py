"""A guard that is entered by hand and never left, as in a notebook, ends with the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import ampguard

guard = ampguard.watch(out=sys.argv[1])
guard.__enter__()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.ones(4, 2)
    if step == 2:
        x[1, 0] = float("nan")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print("end of the script")
"""


@pytest.mark.slow
def test_a_guard_that_is_never_left_ends_with_the_process(tmp_path: Path) -> None:
    """Python cannot wait for a thread any more where it takes its modules apart: it hung there."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", "seen"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("end of the script\n")
    report = json.loads((tmp_path / "seen" / "report.json").read_text())
    assert [(one["cause"], one["step"]) for one in report["incidents"]] == [("nonfinite-input", 2)]
