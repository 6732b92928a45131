"""SIGTERM for a rank that waits in a collective for one that does not come: it ends, and what it saw is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from launching import ROOT

from ampguard.report.store import read_report

TRAIN = """
import os, time, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    loss = torch.log(net(torch.ones(2, 4)) * (-1.0 if step == 2 else 0.0) + (1.0 if step < 2 else -9.0)).mean()
    optimizer.zero_grad()
    loss.backward()
    if step < 2:
        optimizer.step()
open(f"ready-{dist.get_rank()}", "w").close()
if dist.get_rank() == 1:
    time.sleep(120)
dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_is_blocked_ends_at_once_and_tells_what_it_saw(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "ampguard", "run", "--out", "out", "train.py"]
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 200
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(0.5)
        ranks[0].send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert ranks[0].wait(60) == -signal.SIGTERM
        assert time.monotonic() - started < 20  # torchrun kills after 30
        report = read_report(tmp_path / "out")
        assert [(i.cause, i.step) for i in report.incidents] == [("domain-error", 2)]
    finally:
        for rank in ranks:
            rank.kill()
    assert "a fault of its own" not in ranks[0].communicate()[1] + ranks[1].communicate()[1]
