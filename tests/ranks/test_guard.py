"""The guard under two real ranks: nothing changes, each failure is told once with its rank, and nobody waits for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, Ranks

from ampguard.report.store import read_report

TRAIN = str(ROOT / "bench" / "ranks" / "train.py")
SEVERAL = str(Path(__file__).parent / "one_after_another.py")
GUARD = ("-m", "ampguard", "run", "--out", "out")
PATIENT = ("--timeout", "250")
"""Seconds that a collective may take: the other rank's process may begin late."""


def told(folder: Path) -> list[tuple[Any, ...]]:
    """(cause, step, rank) of each incident of the merged report."""
    return [(i.cause, i.step, i.rank) for i in read_report(folder).incidents if i.severity != "info"]


def test_healthy_trainings_stay_bitwise_the_same_and_silent(two_ranks: Ranks, tmp_path: Path) -> None:
    names = [
        "--steps 10",
        "--steps 10 --accumulate 2 --amp",
        "--engine fsdp --steps 10",
        "joined",
        "independent",
        "buffers",
        "empty_shards",
    ]
    plain = [f"plain:{name}" for name in names[:3]]
    ended = two_ranks(SEVERAL, *plain, *names)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    for one in ended:
        ends = json.loads(one.out.splitlines()[-1])
        assert [ends[name] for name in names[:3]] == [ends[f"plain:{name}"] for name in names[:3]]
        assert "a fault of its own" not in one.err
    for number in range(3, 3 + len(names)):
        report = read_report(tmp_path / f"out-{number}")
        assert [i.cause for i in report.incidents] == [], names[number - 3]
        assert report.ranks == {"reported": 2, "missing": [], "missing_count": 0}


def test_a_failure_of_one_rank_is_told_once_with_its_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    faults = {
        "--fault nan-batch": [("nonfinite-input", 5, 1)],
        "--fault log": [("domain-error", 5, 1)],
        "--fault overflow --amp --on 0": [("fp16-overflow", 5, 0)],
        "--fault drift": [("rank-divergence", 5, 1)],
        "--fault scale --amp": [("rank-divergence", 5, 1)],
        "skip:--fault log": [("domain-error", 5, 1)],
        "heal:--fault log": [("domain-error", 5, 1)],
        "heal:--fault overflow --amp --times 3": [("fp16-overflow", 5, 1)],
        "--engine fsdp --fault nan-batch": [("nonfinite-input", 5, 1)],
        "skip:--engine fsdp --fault log": [("domain-error", 5, 1)],
        "heal:--engine fsdp --fault overflow --amp --times 3": [("fp16-overflow", 5, 1)],
        "--engine fsdp --fault overflow --amp": [("fp16-overflow", 5, 1)],
        "--engine fsdp --fault inside": [("domain-error", 5, 1)],
        "--fault rate": [("rank-divergence", 5, 1)],
    }
    ended = two_ranks(SEVERAL, *(f"{name} --steps 9" for name in faults))
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "a fault of its own" not in ended[0].err + ended[1].err
    for number, (name, expected) in enumerate(faults.items()):
        assert told(tmp_path / f"out-{number}") == expected, name
    first = read_report(tmp_path / "out-0").incidents[0]
    assert first.evidence["samples"] == [3]
    assert (first.evidence["ranks"], first.evidence["reached_ranks"]) == ([1], [0])
    drift = read_report(tmp_path / "out-3").incidents[0]
    assert drift.evidence["parameters"] == ["blocks.1.0.weight"]
    assert drift.evidence["last_equal_step"] == 4
    scale = read_report(tmp_path / "out-4").incidents[0]
    assert (scale.evidence["differs"], scale.evidence["here"], scale.evidence["there"]) == ("scale", 512.0, 1024.0)
    ends = [json.loads(one.out.splitlines()[-1]) for one in ended]
    rate = read_report(tmp_path / f"out-{len(faults) - 1}").incidents[0]
    assert rate.evidence["setting"] == {"name": 'AdamW.param_groups[0]["lr"]', "here": 5e-4, "there": 1e-3}
    assert "same learning rate" in rate.fixes[0].how
    inside = read_report(tmp_path / f"out-{len(faults) - 2}").incidents[0]
    assert (inside.op, inside.evidence["rung"], inside.evidence["reached_ranks"]) == ("aten.log.default", "replay", [0])
    assert any(fix.verified for fix in inside.fixes)
    for name in ("skip:--fault log", "heal:--fault log", "heal:--fault overflow --amp --times 3"):
        assert ends[0][f"{name} --steps 9"] == ends[1][f"{name} --steps 9"]  # held off on all ranks or none
    healed = [read_report(tmp_path / f"out-{list(faults).index(name)}" / f"rank-{rank}.json").run for rank in (0, 1)]
    fixes = [(fix["step"], fix["action"], fix["target"]) for fix in healed[0]["healed"]]
    assert fixes == [(5, "force-fp32", "stem")]
    assert [(fix["step"], fix["action"], fix["target"]) for fix in healed[1]["healed"]] == fixes
    assert [run["steps_held_off"] for run in healed] == [1, 1]


def test_a_guard_on_one_rank_alone_sends_nothing(two_ranks: Ranks, tmp_path: Path) -> None:
    names = [
        "plain:--engine fsdp --amp",
        "first:--engine fsdp --amp",
        "first:--fault drift --on 0",
        "first:--engine fsdp",
    ]
    ended = two_ranks(SEVERAL, *(f"{name} --steps 9" for name in names))
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    ends = json.loads(ended[0].out.splitlines()[-1])
    assert len({end for name, end in ends.items() if "--amp" in name}) == 1
    assert [told(tmp_path / f"out-{number}") for number in (1, 2, 3)] == [[], [], []]


def test_a_rank_that_is_killed_while_it_investigates(two_ranks: Ranks, tmp_path: Path) -> None:
    survivor, killed = two_ranks(*GUARD, TRAIN, *PATIENT, "--fault", "kill-late")
    assert killed.status == -9
    assert survivor.status == 1
    assert any(text in survivor.err for text in ("Connection closed by peer", "Connection reset", "Broken pipe"))
    report = read_report(tmp_path / "out")
    assert report.ranks == {"reported": 1, "missing": [1], "missing_count": 1}
    assert report.steps == 5


def test_what_a_rank_saw_before_it_was_killed_is_told(two_ranks: Ranks, tmp_path: Path) -> None:
    survivor, killed = two_ranks(*GUARD, TRAIN, *PATIENT, "--fault", "log-kill")
    assert (survivor.status, killed.status) == (1, -9)
    assert told(tmp_path / "out") == [("domain-error", 5, 1)]
    assert "ampguard: rank 1 saw an error before this rank ended; domain-error in step 5" in survivor.err


def test_a_rank_that_stops_says_why_to_the_others(two_ranks: Ranks, tmp_path: Path) -> None:
    survivor, stopped = two_ranks(*GUARD, "--on-nonfinite", "stop", TRAIN, *PATIENT, "--fault", "log")
    assert (survivor.status, stopped.status) == (1, 3)
    assert "ampguard: rank 1 saw an error before this rank ended; domain-error in step 5" in survivor.err
    assert told(tmp_path / "out") == [("domain-error", 5, 1)]


@pytest.mark.slow
def test_four_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    faults = {
        "--fault nan-batch --on 2": [("nonfinite-input", 5, 2)],
        "--fault drift --on 0": [("rank-divergence", 5, 1)],
        "--engine fsdp --fault inside --on 3": [("domain-error", 5, 3)],
    }
    ended = four_ranks(SEVERAL, *(f"{name} --steps 8" for name in faults))
    assert [one.status for one in ended] == [0, 0, 0, 0], "".join(one.err for one in ended)
    for number, (name, expected) in enumerate(faults.items()):
        assert told(tmp_path / f"out-{number}") == expected, name
    reached = [read_report(tmp_path / f"out-{number}").incidents[0].evidence["reached_ranks"] for number in (0, 2)]
    assert reached == [[0, 1, 3], [0, 1, 2]]
    odd = read_report(tmp_path / "out-1").incidents[0]
    assert odd.evidence["ranks"] == [1, 2, 3]
    assert odd.explanation.endswith("look at rank 0 first.")


def test_sharded_models_are_replayed_from_gathered_weights(two_ranks: Ranks, tmp_path: Path) -> None:
    ways = ["plain", "bfloat16", "float16", "checkpointed", "kept", "frozen", "together", "accumulated", "evaluated"]
    ways.append("evaluated twice")  # then two results wait for the same weights
    ended = two_ranks(str(Path(__file__).parent / "sharded_failures.py"), *ways)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    for one in ended:
        same = json.loads(one.out.splitlines()[-1])
        assert same == dict.fromkeys(ways, True)  # the weights are those of a run without the guard, bit for bit
        assert "a fault of its own" not in one.err
    for way in ways:
        report = read_report(tmp_path / way)
        seen = [(i.cause, i.step, i.rank, i.module, i.evidence["rung"]) for i in report.incidents]
        assert seen == [("domain-error", 4, 1, "blocks.1", "replay")], way


@pytest.mark.slow
def test_bad_gradients_of_sharded_models_are_replayed_from_the_weights_of_the_next_step(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Those that no update uses: a scaler skips it, or the guard holds it off."""
    ways = ["scaled", "scaled float16", "held off"]
    ended = two_ranks(str(Path(__file__).parent / "sharded_failures.py"), *ways)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    for one in ended:
        assert json.loads(one.out.splitlines()[-1]) == dict.fromkeys(ways, True)
        assert "a fault of its own" not in one.err
    for way in ways:
        first = read_report(tmp_path / way).incidents[0]
        seen = (first.cause, first.step, first.rank, first.module, first.evidence["rung"])
        assert seen == ("singular-gradient", 4, 1, "blocks.1", "replay"), way
        assert first.location is not None
        assert ".log()" in first.location.code
        assert first.fixes[0].verified


@pytest.mark.slow
def test_bad_gradients_of_sharded_models_that_an_update_uses(two_ranks: Ranks, tmp_path: Path) -> None:
    ended = two_ranks(str(Path(__file__).parent / "sharded_failures.py"), "unscaled")
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert all("a fault of its own" not in one.err for one in ended)
    first = read_report(tmp_path / "unscaled").incidents[0]
    assert (first.cause, first.step) == ("unexplained", 4)
    assert "bad steps are held off, and run again from the weights that the next one gathers" in first.explanation
