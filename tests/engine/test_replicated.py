"""A state taken apart for torch.distributed.checkpoint, and put together from its files."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ampguard
from ampguard.engine.checkpoint.replicated import parts_of, read
from ampguard.engine.checkpoint.seal import seal_of
from ampguard.errors import CheckpointError


@pytest.fixture(autouse=True)
def without_ranks() -> None:
    """PyTorch says that it assumes a single process."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")


def test_tensors_and_what_holds_them_come_back(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {
        "state": {0: {"m": torch.randn(3, 2)}, "0": {"m": torch.arange(4)}},
        "groups": [{"betas": (0.9, 0.999), "params": [0, 1], "lr": 1e-3, "fused": None}],
        "empty": {"nothing": [], "number": torch.tensor(2.5), "half": torch.ones(2, dtype=torch.bfloat16)},
    }
    save(parts_of(state), checkpoint_id=tmp_path)
    found = read(tmp_path)
    assert seal_of(found) == seal_of(state)
    assert found["groups"] == state["groups"]
    assert torch.equal(found["state"][0]["m"], state["state"][0]["m"])  # type: ignore[index]
    assert torch.equal(found["state"]["0"]["m"], state["state"]["0"]["m"])  # type: ignore[index]


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
def test_low_weights_go_on_as_if_nothing_had_happened(tmp_path: Path, precision: str) -> None:
    def made(seed: int) -> tuple[nn.Module, ampguard.Amp]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        options = {"rounding": "kahan"} if precision == "bf16-true" else {}
        return model, ampguard.Amp(model, torch.optim.Adam(model.parameters(), lr=0.1), precision, **options)

    def steps(model: nn.Module, amp: ampguard.Amp) -> list[float]:
        losses = []
        for step in range(3):
            with amp.autocast():
                loss = model(torch.full((2, 4), 0.3 + 0.1 * step)).float().square().mean()
            amp.backward(loss)
            amp.step()
            losses.append(float(loss.detach()))
        return losses

    model, amp = made(0)
    steps(model, amp)
    amp.save_sharded(tmp_path / "kept")
    expected = steps(model, amp)
    again, other = made(1)
    other.load_sharded(tmp_path / "kept")
    assert steps(again, other) == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    plain = nn.Linear(4, 3)
    with pytest.raises(CheckpointError, match="it was made with precision"):
        ampguard.Amp(plain, torch.optim.Adam(plain.parameters()), "bf16").load_sharded(tmp_path / "kept")
