"""What the guard itself has put in the place of bad gradients is not taken for the script's doing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_at_a_lower_scale_are_the_guards_own(clips: bool, tmp_path: Path) -> None:
    def script() -> None:
        torch.manual_seed(0)
        models = [nn.Linear(8, 8), nn.Linear(8, 8)]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(12):
            x = torch.randn(32, 8)
            for model, optimizer in zip(models, optimizers, strict=True):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(x).abs().mean() * 3
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
            scaler.update()

    with ampguard.watch(out=tmp_path / "run", on_nonfinite="heal") as session:
        script()
    assert session.report is not None
    assert [(i.cause, i.severity) for i in session.report.incidents] == [("loss-scale-overflow", "info")]
