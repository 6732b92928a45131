"""What is said to go wrong does go wrong here, as PyTorch itself shows."""

from __future__ import annotations

import pytest
import torch

from ampguard.check.combinations import combinations


def codes() -> set[str]:
    return {finding.code for finding in combinations()}


def test_each_finding_says_what_and_what_to_do() -> None:
    for finding in combinations():
        assert finding.what.endswith(".")
        assert finding.do


@pytest.mark.skipif(torch.cuda.is_available(), reason="here GradScaler() is on")
def test_a_scaler_for_cuda_on_a_machine_without() -> None:
    assert "scaler-for-another-device" in codes()
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not torch.amp.GradScaler().is_enabled()


def test_findings_follow_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair what a trial looks at, and it is silent."""
    assert {"adam-on-float16-weights", "lost-updates", "float-is-undone"} <= codes()
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    assert "adam-on-float16-weights" not in codes()


def test_the_machine_is_left_as_it_was() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    combinations()
    assert torch.equal(torch.rand(2), expected)
    assert not torch.is_autocast_enabled("cpu")


def test_a_recurrent_layer_that_raises_under_autocast() -> None:
    def raises(dtype: torch.dtype) -> bool:
        try:
            with torch.autocast("cpu", dtype=dtype):
                torch.nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
        except RuntimeError:
            return True
        return False

    said = [finding.what for finding in combinations() if finding.code == "recurrent-under-autocast"]
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        assert any("nn.LSTM" in what and f" {name} " in what for what in said) is raises(dtype)
