"""A replay writes to nothing of the script's, whatever the record says of who made what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard
from ampguard.capture.events.log import EventLog
from ampguard.capture.glue import schedule


@pytest.mark.parametrize("is_short", [False, True])
def test_a_weight_written_by_its_data_is_left_alone(
    is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the record has no copy of the weight, which its `.data` shares its memory with."""
    monkeypatch.setattr(EventLog, "_keep_under_other_names", lambda *args: None)
    monkeypatch.setattr(schedule, "LONG_STEP", 60.0 if is_short else 0.0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with ampguard.watch(out=tmp_path / "run") as session:
        for step in range(6):
            loss = model(torch.randn(4, 6)).square().mean()
            optimizer.zero_grad()
            before, version = model.weight.detach().clone(), model.weight._version
            loss.backward()  # judged first, and replayed
            assert torch.equal(model.weight.nan_to_num(7.0), before.nan_to_num(7.0))
            assert model.weight._version == version
            if step == 3 and model.weight.grad is not None:
                model.weight.data[[1, 3]] = 0.0
                model.weight.grad[[1, 3]] = 0.0
            optimizer.step()
            model.weight.data /= model.weight.data.norm(dim=1, keepdim=True)
        assert not session._barrier.tripped
    assert session.report is not None
    assert session.report.incidents[0].step == 4
