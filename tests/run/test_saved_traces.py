"""A trained model is traced by `torch.jit.trace` and saved: PyTorch compares the trace's constants then, by an operator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return CONSTANTS

net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
net.eval()
with torch.no_grad():
    traced = torch.jit.trace(net, torch.ones(2, 4))
traced.save("net.pt")
print(torch.equal(torch.jit.load("net.pt")(torch.ones(2, 4)), net(torch.ones(2, 4))))
"""


@pytest.mark.parametrize(
    "constants",
    ["self.fc(x) * 0.2 + torch.exp(x * 0.2) * 0.1", "self.fc(x) * 3 + x * 3 * 2", "self.fc(x) * (x > 0) * 2.0 + x * 2"],
)
def test_a_trace_is_saved(constants: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("CONSTANTS", constants))
    command = [sys.executable, "-m", "ampguard", "run", "--out", "run", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr
    assert "fault of its own" not in run.stderr
