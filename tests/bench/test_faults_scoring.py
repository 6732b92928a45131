"""The fault benchmark's scoring, on made-up reports and truths, and whether every committed truth can be true."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.faults import tables  # noqa: E402
from bench.faults.op_names import same_op  # noqa: E402
from bench.faults.scoring import COLUMNS, Claim, claim_of, score, share  # noqa: E402
from bench.faults.tools import SPEAKS_OF, run_bare, run_tool  # noqa: E402
from bench.faults.truth import CASES, Case, Truth, load_case, load_cases, problems  # noqa: E402

from ampguard.incident import Environment, Fix, Incident, Location, Report, status_of  # noqa: E402

LINE = "scores = q @ k.transpose(-2, -1)"
TRUTH = Truth(
    step=12,
    mode="train",
    cause=["fp16-overflow"],
    module=["blocks.2.attn"],
    op=["aten.bmm.default"],
    file="model.py",
    line=LINE,
    fixes=["force-fp32", "use-bf16"],
)
FAULT = Case(source="https://x.org/1", report="", kind="fault", truth=TRUTH, folder=Path("p-one"))
HEALTHY = Case(source="https://x.org/2", report="", kind="healthy", folder=Path("h-two"))


def incident(**changed: Any) -> Incident:
    right: dict[str, Any] = {
        "step": 12,
        "rank": 0,
        "mode": "train",
        "phase": "forward",
        "severity": "error",
        "cause": "fp16-overflow",
        "module": "blocks.2.attn",
        "op": "aten.bmm.default",
        "dtype": "float16",
        "location": Location(file="/somewhere/else/model.py", line=3, function="forward", code=f"    {LINE}"),
        "explanation": "",
        "fixes": (Fix("force-fp32", "blocks.2.attn", "how", verified=True),),
    }
    return Incident(**right | changed)


def report(*incidents: Incident) -> Report:
    return Report(status_of(incidents), Environment("2", "3", "cpu", 1), 20, incidents)


def test_a_right_report_earns_every_column() -> None:
    row = score(FAULT, claim_of(report(incident())), same_exit=True)
    assert [getattr(row, column) for column in COLUMNS] == [True] * len(COLUMNS)
    assert row.is_perfect


@pytest.mark.parametrize(
    ("column", "changed"),
    [
        ("step", {"step": 11}),
        ("mode", {"mode": "eval"}),
        ("cause", {"cause": "overflow"}),
        ("module", {"module": "blocks.2"}),
        ("module", {"module": None}),
        ("op", {"op": "aten.mm.default"}),
        ("op", {"op": "aten.bmm.out"}),
        ("op", {"op": None}),
        ("line", {"location": Location("model.py", 3, "forward", "scores = scores / 8")}),
        ("line", {"location": Location("other.py", 3, "forward", LINE)}),
        ("line", {"location": None}),
        ("fix", {"fixes": (Fix("force-fp32", None, "how", verified=None),)}),
        ("fix", {"fixes": (Fix("force-fp32", None, "how", verified=False),)}),
        ("fix", {"fixes": (Fix("clamp", None, "how", verified=True),)}),
        ("fix", {"fixes": ()}),
    ],
)
def test_one_wrong_field_costs_its_column_and_no_other(column: str, changed: dict[str, Any]) -> None:
    row = score(FAULT, claim_of(report(incident(**changed))), same_exit=True)
    assert {name for name in COLUMNS if getattr(row, name) is not True} == {column}
    assert not row.is_perfect


def test_only_the_first_incident_answers() -> None:
    row = score(FAULT, claim_of(report(incident(cause="overflow"), incident())))
    assert row.cause is False


def test_an_info_incident_is_not_a_finding() -> None:
    settling = incident(severity="info", cause="loss-scale-overflow")
    assert score(FAULT, claim_of(report(settling))).found is False
    assert score(HEALTHY, claim_of(report(settling))).false_alarm is False


def test_nothing_is_right_about_a_failure_that_was_not_found() -> None:
    row = score(FAULT, claim_of(report()))
    assert [getattr(row, column) for column in COLUMNS] == [False] * len(COLUMNS)


def test_a_warning_on_a_healthy_script_is_a_false_alarm() -> None:
    row = score(HEALTHY, claim_of(report(incident(severity="warning"))))
    assert row.false_alarm is True
    assert row.found is None


def test_alternatives_are_accepted() -> None:
    truth = msgspec.structs.replace(
        TRUTH, step=[12, 13], module=["", None], line=["a = 1", LINE], op=["aten.mm.default", None]
    )
    case = msgspec.structs.replace(FAULT, truth=truth)
    row = score(case, claim_of(report(incident(step=13, module=None, op=None))))
    assert row.is_perfect


@pytest.mark.parametrize(("ranks", "right"), [([1], True), ([0, 1], False), (None, False)])
def test_a_truth_of_several_ranks_asks_which(ranks: list[int] | None, right: bool) -> None:
    case = msgspec.structs.replace(FAULT, truth=msgspec.structs.replace(TRUTH, ranks=[1]))
    evidence = {} if ranks is None else {"ranks": ranks}
    row = score(case, claim_of(report(incident(evidence=evidence))))
    assert row.step is right
    assert score(case, Claim(found=True, step=12)).step is True  # a tool that does not speak of ranks


def test_a_case_of_two_ranks_is_launched_so(tmp_path: Path) -> None:
    script = "import os, sys; sys.exit(0 if os.environ.get('WORLD_SIZE') == '2' else 5)"
    case = write_case(tmp_path / "cases", "h-ranks", script, ranks=2)
    assert run_bare(case, tmp_path / "room", timeout=120).status == 0


def test_a_fix_is_not_asked_for_where_a_replay_cannot_show_one() -> None:
    case = msgspec.structs.replace(FAULT, truth=msgspec.structs.replace(TRUTH, fixes=[]))
    row = score(case, claim_of(report(incident(fixes=()))))
    assert row.fix is None
    assert share([row], "fix") == (0, 0)


def test_a_changed_exit_status_spoils_a_row() -> None:
    assert not score(FAULT, claim_of(report(incident())), same_exit=False).is_perfect


def test_a_tool_is_not_asked_what_its_output_never_names() -> None:
    claim = Claim(found=True, step=12, mode="train", modules=("blocks.2.attn",))
    row = score(FAULT, claim, speaks_of=SPEAKS_OF["hf-debug"])
    assert (row.found, row.step, row.module) == (True, True, True)
    assert (row.cause, row.op, row.line, row.fix) == (None, None, None, None)


@pytest.mark.parametrize(
    ("said", "accepted", "same"),
    [
        ("aten.bmm.default", "aten.bmm.default", True),
        ("aten.div.Scalar", "aten.div.Tensor", False),
        ("BmmBackward0", "aten.bmm.default", True),
        ("LogSoftmaxBackward0", "aten._log_softmax.default", True),
        ("DivBackward0", "aten.div.Tensor", True),
        ("MulBackward0", "aten.div.Tensor", False),
        ("Tensor.__matmul__", "aten.bmm.default", True),
        ("__truediv__", "aten.div.Tensor", True),
        ("Functional.linear", "aten.addmm.default", True),
        ("Linear", "aten.mm.default", True),
        ("softmax", "aten._softmax.default", True),
        ("softmax", "aten._log_softmax.default", False),
        ("exp", "aten.exp.default", True),
    ],
)
def test_names_of_operators(said: str, accepted: str, same: bool) -> None:
    assert same_op(said, accepted) is same


def test_totals_count_only_what_was_asked() -> None:
    rows = [
        score(FAULT, claim_of(report(incident())), same_exit=True),
        score(FAULT, claim_of(report(incident(cause="overflow"))), same_exit=True),
        score(HEALTHY, claim_of(report(incident())), same_exit=False),
    ]
    totals = tables.totals(rows)
    assert totals["cause"] == "50 % (1/2)"
    assert totals["op"] == "100 % (2/2)"
    assert totals["false alarms"] == "1 of 1"
    assert totals["exit status kept"] == "67 % (2/3)"
    text = tables.markdown({"ampguard": rows}, "2.0")
    assert "| p-one | yes | yes | yes | NO |" in text
    assert "false alarms: h-two" in text


def write_case(root: Path, name: str, script: str, **changed: Any) -> Case:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(script, encoding="utf-8")
    truth = {"source": "https://x.org/3", "report": "", "kind": "healthy"} | changed
    (folder / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    return load_case(folder)


def test_impossible_truths_are_named(tmp_path: Path) -> None:
    truth = msgspec.to_builtins(TRUTH) | {"file": "train.py", "cause": ["typo"], "op": ["bmm"], "fixes": ["pray"]}
    case = write_case(tmp_path, "f-bad", f"{LINE}\n{LINE}\n", kind="fault", truth=truth)
    found = "\n".join(problems(case))
    for word in ("typo", "pray", "'bmm'", "2 times"):
        assert word in found


def test_a_truth_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(msgspec.ValidationError, match="sauce"):
        write_case(tmp_path, "f-typo", "", sauce="")


def test_cases_are_found_by_pattern_or_part_of_the_name(tmp_path: Path) -> None:
    for name in ("a-one", "b-two", "b-three"):
        write_case(tmp_path, name, "")
    assert [case.name for case in load_cases("b-*", tmp_path)] == ["b-three", "b-two"]
    assert [case.name for case in load_cases("one", tmp_path)] == ["a-one"]


def test_the_script_cannot_read_the_truth_and_its_status_is_seen(tmp_path: Path) -> None:
    case = write_case(
        tmp_path / "cases", "h-exit", "import os, sys; sys.exit(5 if os.path.exists('truth.json') else 7)"
    )
    assert run_bare(case, tmp_path / "room", timeout=60).status == 7


def test_a_script_that_hangs_is_a_timeout(tmp_path: Path) -> None:
    case = write_case(tmp_path / "cases", "h-hang", "while True: pass")
    assert run_bare(case, tmp_path / "room", timeout=1).status == "timeout"


def test_detect_anomaly_earns_operator_and_line_of_a_nan_gradient(tmp_path: Path) -> None:
    script = """import torch
w = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([w], lr=0.1)
for step in range(3):
    x = w * (0.0 if step == 2 else 1.0)
    loss = torch.sqrt(x.sum()) * 0.0
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    truth = msgspec.to_builtins(TRUTH) | {
        "step": 2,
        "op": ["aten.sqrt.default"],
        "file": "train.py",
        "line": "loss = torch.sqrt(x.sum()) * 0.0",
        "module": [None],
    }
    case = write_case(tmp_path / "cases", "f-sqrt", script, kind="fault", truth=truth)
    row = run_tool("detect-anomaly", case, _room(tmp_path), timeout=120, bare=0)
    assert (row.found, row.step, row.op, row.line) == (True, True, True, True), row.note
    assert row.module is None


def _room(tmp_path: Path) -> Path:
    room = tmp_path / "room"
    room.mkdir()
    return room


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in CASES.glob("*/truth.json")), ids=lambda path: path.name
)
def test_committed_truths_can_be_true(folder: Path) -> None:
    case = load_case(folder)
    if case.missing():
        pytest.skip(f"needs {', '.join(case.missing())}")
    assert problems(case) == []
