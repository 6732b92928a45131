"""SIGTERM in the middle of an investigation: what is said then is heard, though a replay silences what the script prints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, torch
from torch import nn

class Model(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        Model.calls += 1
        if Model.calls == 6:  # after five steps: this one is the guard's
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(x).square()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    loss = torch.log(model(torch.ones(2, 4)) + (1 if step < 4 else -99)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_card_and_the_summary_are_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "ampguard", "run", "--out", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGTERM
    assert "error[domain-error] step 4, loss" in done.stderr
    assert "1 error" in done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [incident["cause"] for incident in report["incidents"]] == ["domain-error"]
