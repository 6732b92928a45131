"""The engine on two ranks: the true norm, one verdict for all, and checkpoints for another number of ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, WITHIN_S, Ranks

import warm

SCRIPT = str(Path(__file__).parent / "engine_of_two.py")


def test_two_ranks_step_as_one_process_does(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(SCRIPT, "several")
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    first, second = (json.loads(one.out.splitlines()[-1]) for one in ended)
    assert first == second
    assert first["timeout"] == 50.0
    assert first["partly sharded"] == [False, True, False]
    assert all("is not what was saved: it was altered" in said for said in first["altered"]), first["altered"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, "one"]
    alone = warm.run(command, cwd=tmp_path, env=paths, timeout=WITHIN_S, modules=warm.RANKS)
    assert alone.returncode == 0, alone.stderr
    one = json.loads(alone.stdout.splitlines()[-1])
    for precision in ("fp32", "fp16"):
        truth = one[f"one {precision}"]
        assert [step[0] for step in truth[:6]] == [False, False, False, True, False, False]
        for kind, sent in (("ddp", 0), ("fsdp", 1)):
            run = first[f"{kind} {precision}"]
            same_steps(run[:9], truth[:9], sent)
            assert run[9] == pytest.approx(truth[9], rel=2e-4)
            resumed = first[f"{kind} {precision} resumed"]
            assert resumed == run[6:]
            on_one = one[f"{kind} {precision} on one rank"]
            same_steps(on_one[:3], run[6:9], 0)
            assert on_one[3] == pytest.approx(run[9], rel=2e-4)
    same_low_weights(first, one)
    same_policies(first)
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["last-good-rank-0.pt", "last-good-rank-1.pt"]


def same_low_weights(two: dict[str, Any], one: dict[str, Any]) -> None:
    """Steps with cast weights are those of one process, and go on from a checkpoint with either number of ranks."""
    for precision in ("O2", "bf16-true"):
        same_steps(two[precision], one[precision], 0)
        assert [step[0] for step in two[precision][:4]] == [False, False, True, False]
        assert two[f"{precision} weights"] == pytest.approx(one[f"{precision} weights"], rel=2e-3)
        assert two[f"{precision} resumed"] == two[precision][4:]
        same_steps(one[f"{precision} resumed"], two[precision][4:], 0)
    assert two["O2 accumulated"] == pytest.approx(one["O2 accumulated"], rel=2e-2)
    assert len(two["refused"]) == 6
    assert all("do    make Amp first" in text or "do    let FSDP cast" in text for text in two["refused"])


def same_policies(two: dict[str, Any]) -> None:
    """The batch of one rank was bad, and its loss alone: all go back together, or raise."""
    for kind in ("ddp rollback", "fsdp rollback", "wrapped later"):
        steps = two[kind]
        assert [(skipped, made) for skipped, made, _ in steps] == [
            *((False, made) for made in (1, 2, 3, 4)),
            (True, 3),
            (False, 4),
        ]
        assert steps[4][2] == steps[2][2]
    assert [two[kind][4:] for kind in ("ddp raise", "fsdp raise")] == [["raised"], ["raised"]]


def same_steps(run: list[Any], truth: list[Any], sent: int) -> None:
    """Skipped alike, at the same scale, with the same norm; `sent`: collectives in a step of the engine's."""
    assert [(step[0], step[2]) for step in run] == [(step[0], step[2]) for step in truth]
    assert {step[3] for step in run} == {sent}
    for step, expected in zip(run, truth, strict=True):
        assert step[1] == pytest.approx(expected[1], rel=2e-2)
