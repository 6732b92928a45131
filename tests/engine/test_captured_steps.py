"""A step while a CUDA graph is captured: nothing is waited for, and nobody is told. On the CPU, where no step has to wait."""

from __future__ import annotations

import pytest
import torch
from engine_loops import loss_of, made, same, weights

import ampguard
from ampguard import compat
from ampguard.engine.verdicts import Verdict


def step(amp: ampguard.Amp, number: int) -> None:
    torch.manual_seed(number)
    amp.backward(loss_of(amp, number))
    amp.step()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "O2"])
def test_a_captured_step_is_judged_by_nobody(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    amp, plain = made(precision), made(precision)
    for number in range(3):
        step(amp, number)
        step(plain, number)
    waited: list[Verdict] = []
    wait = Verdict.wait
    monkeypatch.setattr(Verdict, "wait", lambda verdict: (waited.append(verdict), wait(verdict))[1])
    monkeypatch.setattr(compat, "cuda_is_capturing", lambda: True)
    step(amp, 3)
    assert not waited
    assert amp.steps == 3
    monkeypatch.setattr(compat, "cuda_is_capturing", lambda: False)
    step(plain, 3)
    assert same(weights(amp), weights(plain))
    step(amp, 4)
    step(plain, 4)
    assert amp.steps == plain.steps - 1 == 4
    assert same(weights(amp), weights(plain))
    assert amp.get_scale() == plain.get_scale()
