"""What PyTorch warns of while a mode of ours passes its call on is shown with the script's own line."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import warm

SCRIPT = """
import sys
import torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
total = 0.0
for step in range(9):
    opt.zero_grad()
    loss = net(torch.randn(8, 4)).square().mean()
    if step > 6:  # by now the calls of short steps are kept
        total += float(loss)
    loss.backward()
    opt.step()
"""


def test_a_warning_of_a_read_names_the_scripts_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    sources = str(Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    shown = []
    for guard in ([], ["-m", "ampguard", "run", "--out", "run"]):
        done = warm.run([sys.executable, *guard, "train.py"], cwd=tmp_path, env=env, check=True)
        shown.append(re.findall(r".*Warning: Converting a tensor.*\n.*\n", done.stderr))
    assert len(shown[0]) == 1
    assert "train.py:11: " in shown[0][0]
    assert shown[0] == shown[1]
