"""A module is called by the same name while the script runs and when it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard


class Brain:
    """SpeechBrain's: it holds the script's modules in a dictionary of its own, and ends the training on a bad loss."""

    def __init__(self, net: nn.Module) -> None:
        self.modules = nn.ModuleDict({"net": net})
        self.bad_losses = 0

    def fit(self, steps: int) -> None:
        optimizer = torch.optim.SGD(self.modules.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.modules["net"](torch.ones(4, 8), 1e6 if step > 5 else 1.0).float().pow(2).mean()
            if not torch.isfinite(loss):
                self.bad_losses += 1
                if self.bad_losses > 2:
                    raise ValueError("Loss is not finite and patience is exhausted.")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, gain: float) -> torch.Tensor:
        return self.last(x) * gain


def test_the_loss_that_ends_the_training_is_no_failure_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()  # the script has a name for it too, and at the end no other is left
    with pytest.raises(ValueError, match="patience"), ampguard.watch(out=tmp_path / "run") as session:
        Brain(net).fit(12)
    assert session.report is not None
    assert [(i.cause, i.module) for i in session.report.incidents] == [("fp16-overflow", "net")]
    assert session.report.incidents[0].occurrences == 3
