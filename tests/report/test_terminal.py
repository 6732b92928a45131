"""The card and the summary, as they are read: compared whole, at 80 columns, without and with a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
from rich.console import Console

from ampguard.incident import Environment, Fix, Incident, Location, Report, status_of
from ampguard.report.console import stderr_console
from ampguard.report.summary import print_summary, short_path
from ampguard.report.terminal import incident_card, print_incident

OVERFLOW = Incident(
    step=41,
    rank=0,
    mode="train",
    phase="forward",
    severity="error",
    cause="fp16-overflow",
    module="encoder.layers.3.attention",
    op="aten.bmm.default",
    dtype="float16",
    location=Location("model.py", 57, "forward", "        scores = q @ k.transpose(-2, -1)", "Attention.forward"),
    explanation="The product of queries and keys does not fit float16: it reaches 81920; float16 ends at 65504. "
    "Softmax then made NaN of it.",
    evidence={"max_abs_fp32": 81920.0, "limit": 65504.0, "operands": [{"max": 3.5}]},
    fixes=(
        Fix(
            "force-fp32",
            "encoder.layers.3.attention",
            "leave autocast in encoder.layers.3.attention:\nwith torch.autocast('cuda', enabled=False):\n    ...",
            True,
            "the replayed step is finite; the loss is 2.31",
        ),
        Fix("clamp", None, "clamp the scores", False, "the loss is still NaN"),
        Fix("lower-learning-rate", None, "halve the learning rate"),
    ),
)


def rendered(incident: Incident, width: int = 80) -> str:
    out = io.StringIO()
    print_incident(incident, Console(file=out, width=width))
    return out.getvalue()


def test_the_whole_card() -> None:
    assert rendered(OVERFLOW) == dedent(
        """
        error[fp16-overflow] step 41, forward: the product of queries and keys does not
          fit float16
          --> model.py:57 in Attention.forward
              (module encoder.layers.3.attention, aten.bmm, float16)
        57 |         scores = q @ k.transpose(-2, -1)
           |                  ^^^^^^^^^^^^^^^^^^^^^^^
           |                  it reaches 81920; float16 ends at 65504
        Softmax then made NaN of it.
        fix, verified: leave autocast in encoder.layers.3.attention:
            with torch.autocast('cuda', enabled=False):
                ...
            -> the replayed step is finite; the loss is 2.31
        fix, not enough: clamp the scores
            -> the loss is still NaN
        fix, untried: halve the learning rate
        more: ampguard explain fp16-overflow

        """
    )


@pytest.mark.parametrize(
    ("rung", "said"),
    [
        ({"rung": "live-trace", "not_replayed_because": "an open file"}, "could not be replayed (an open file), so no"),
        ({"rung": "replay-inexact"}, "not bit for bit"),
        ({"rung": "module"}, "This rests on: module."),
    ],
)
def test_the_rung_is_said_where_it_is_not_a_replay(rung: dict[str, str], said: str) -> None:
    assert said in rendered(msgspec.structs.replace(OVERFLOW, evidence=rung), 100)
    usual = rendered(msgspec.structs.replace(OVERFLOW, evidence={"rung": "replay", "limit": 1.0}))
    assert "Softmax then made NaN of it.\nfix" in usual


@pytest.mark.parametrize(
    ("explanation", "headline", "beside_the_mark", "below"),
    [
        ("A b.c of 1.5 is 0 (e.g. d): f is 3. G: h.", "a b.c of 1.5 is 0 (e.g. d)", "f is 3", "G: h."),
        ("log was given -1e+09, outside.", "log was given -1e+09, outside", "other value 7", None),
        ("", "a result is beyond the low precision's", "operand value -999999744, other value 7", None),
    ],
)
def test_each_part_of_the_explanation_is_said_once(
    explanation: str, headline: str, beside_the_mark: str, below: str | None
) -> None:
    facts = {"kind": "nan", "operand_value": -999999744.0, "other_value": 7.0, "rung": "replay", "last_step": 9}
    incident = msgspec.structs.replace(OVERFLOW, explanation=explanation, evidence=facts, fixes=())
    lines = rendered(incident, 100).splitlines()
    assert lines[1].removeprefix("error[fp16-overflow] step 41, forward: ").startswith(headline)
    mark = next(i for i, line in enumerate(lines) if "^^^" in line)
    assert lines[mark].partition("^ ")[2] == beside_the_mark
    assert lines[mark + 1] == (below or "more: ampguard explain fp16-overflow")


def test_code_in_a_fix_has_its_own_line() -> None:
    long = "one_long_name " * 3
    fixes = (
        Fix("force-fp32", None, f"in {long}: with a(): b; in {long}: with c(): d"),
        Fix("clamp", None, f"bound it in: x = {long}+ {long}+ y"),
        Fix("fix-mask", None, f"no code follows: {long * 2}"),
        Fix("clamp", None, "x: y = f(x)"),
    )
    lines = rendered(msgspec.structs.replace(OVERFLOW, fixes=fixes)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fix"))
    assert lines[at : at + 3] == [f"fix, untried: in {long}:", "    with a(): b", f"    in {long}: with c(): d"]
    assert lines[at + 3 : at + 5] == ["fix, untried: bound it in:", f"    x = {long}+ {long}+ y"]
    assert lines[at + 5].startswith("fix, untried: no code follows: one_long_name")
    assert lines[-3:] == ["fix, untried: x: y = f(x)", "more: ampguard explain fp16-overflow", ""]


def test_the_place_of_a_statement_stays_beside_it() -> None:
    how = 'with torch.autocast("cpu", enabled=False): features = backbone(images)  # train.py:8'
    lines = rendered(msgspec.structs.replace(OVERFLOW, fixes=(Fix("force-fp32", None, how, True),))).splitlines()
    first = lines.index('fix, verified: with torch.autocast("cpu", enabled=False):')
    assert lines[first + 1] == "    features = backbone(images)  # train.py:8"


def test_a_colon_in_code_that_a_sentence_quotes_begins_no_code() -> None:
    how = "keep the weights that are loaded in `model.load_state_dict({key: v.float()})` (ema.py:24) in float32"
    lines = rendered(msgspec.structs.replace(OVERFLOW, fixes=(Fix("force-fp32", None, how),))).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("fix, untried:"))
    assert lines[first : first + 3] == [
        "fix, untried: keep the weights that are loaded in `model.load_state_dict({key:",
        "    v.float()})` (ema.py:24) in float32",
        "more: ampguard explain fp16-overflow",
    ]


def test_what_fits_stands_on_one_line_and_what_does_not_is_folded() -> None:
    lines = rendered(OVERFLOW, width=100).splitlines()
    assert "  --> model.py:57 in Attention.forward   (module encoder.layers.3.attention, aten.bmm, float16)" in lines
    narrow = rendered(OVERFLOW, width=70).splitlines()
    numbers = narrow.index("   |                  it reaches 81920; float16 ends at 65504")
    assert narrow[numbers - 1].endswith("^^^")
    narrower = rendered(OVERFLOW, width=50).splitlines()
    assert "   | it reaches 81920; float16 ends at 65504" in narrower


def test_colours_on_a_terminal_and_the_same_words() -> None:
    out = io.StringIO()
    print_incident(OVERFLOW, Console(file=out, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b[1;31merror[fp16-overflow]" in out.getvalue()
    plain = out.getvalue()
    while "\x1b[" in plain:
        start = plain.index("\x1b[")
        plain = plain[:start] + plain[plain.index("m", start) + 1 :]
    assert plain == rendered(OVERFLOW)


def test_the_card_is_a_rich_renderable() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(incident_card(OVERFLOW))
    assert out.getvalue() in rendered(OVERFLOW)


@pytest.mark.parametrize(
    ("code", "marked"),
    [
        ("    return x / (x.sum() + eps)", "x / (x.sum() + eps)"),
        ("loss = crit(é, 'ü').mean()", "crit(é, 'ü').mean()"),
        ("x += y.log()", "y.log()"),
        ("\tmodel(x)", "model(x)"),
        ("q, k = f(x), g(x)", "f(x), g(x)"),
        ("for x in loader:", "loader"),
        ("    if loss.isnan().any():", "loss.isnan().any()"),
        ("if step == 3: loss = loss.log()", "loss.log()"),
        ("with autocast(): return f(x)", "f(x)"),
        ("torch.einsum('bij,bjk', a,", "torch.einsum('bij,bjk', a,"),
        ("        torch.save(", "torch.save("),
        ("    loss = criterion(", "criterion("),
        ("    return F.softmax(", "F.softmax("),
        ("    y[:, 1] += warp(a,", "warp(a,"),
        ("    criterion(weight=w,", "criterion(weight=w,"),
        ("    )", ")"),
        ("return", "return"),
        ("w = a * b; s = q @ k; p = s / c", "q @ k"),
        ("w = a * b; p = s / c", "w = a * b; p = s / c"),
        ("q = a @ b; k = c @ d", "q = a @ b; k = c @ d"),
        ("def forward(self, q, k): return q @ k.t()", "q @ k.t()"),
        ("def scores(q, k): q = q / 8; return torch.bmm(q, k)", "torch.bmm(q, k)"),
    ],
)
def test_the_mark_is_under_what_the_line_computes(code: str, marked: str) -> None:
    incident = msgspec.structs.replace(OVERFLOW, location=Location("m.py", 7, "f", code), evidence={})
    lines = rendered(incident).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("7 | "))
    start, length = lines[at + 1].index("^"), lines[at + 1].count("^")
    assert lines[at][start : start + length] == marked


def test_markup_in_code_is_text() -> None:
    code = "x = y[bold]; z[/red] [link=1]"
    incident = msgspec.structs.replace(OVERFLOW, location=Location("m.py", 7, "f", code), explanation="[/bold] :smile:")
    assert f"7 | {code}" in rendered(incident)
    assert "[/bold] :smile:" in rendered(incident)


def test_nothing_known_but_the_cause() -> None:
    incident = Incident(
        step=3,
        rank=2,
        mode="eval",
        phase="loss",
        severity="warning",
        cause="empty-reduction",
        module=None,
        op=None,
        dtype=None,
        location=None,
        explanation="",
        occurrences=4,
    )
    assert rendered(incident, 100) == (
        "\nwarning[empty-reduction] step 3, eval, loss, rank 2, seen 4 times: a mean, a loss or a norm over no\n"
        "  elements; a standard deviation over one\nmore: ampguard explain empty-reduction\n\n"
    )
    assert "ranks 0, 2" in rendered(msgspec.structs.replace(incident, evidence={"ranks": [0, 2]}))


def test_long_paths_and_code_are_never_broken() -> None:
    place = Location("/opt/" + "deep/" * 30 + "model.py", 7, "forward", "x = " + "very_long_name + " * 20 + "1")
    text = rendered(msgspec.structs.replace(OVERFLOW, location=place))
    assert f"  --> {place.file}:7 in forward\n" in text
    assert f"7 | {place.code}\n" in text


def test_paths_inside_the_working_directory_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "src" / "model.py")) == "src/model.py"
    assert short_path("/usr/lib/x.py") == "/usr/lib/x.py"
    assert short_path("<generated>") == "<generated>"


def a_report(*incidents: Incident, steps: int = 120) -> Report:
    return Report(status_of(incidents), Environment("2.13.0", "3.11.7", "cpu", 1), steps, incidents)


def summary(report: Report, path: Path | None) -> str:
    out = io.StringIO()
    print_summary(report, path, Console(file=out, width=80))
    return out.getvalue()


def test_the_whole_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    glue = msgspec.structs.replace(
        OVERFLOW, step=0, severity="info", cause="loss-scale-overflow", module=None, occurrences=3
    )
    assert summary(a_report(OVERFLOW, glue), tmp_path / "ampguard-runs" / "r" / "report.json") == dedent(
        """\
        ampguard: 120 steps, 1 error, 1 note
          error   fp16-overflow         step 41     encoder.layers.3.attention
          info    loss-scale-overflow   step 0      model.py:57 (seen 3 times)
        report: ampguard-runs/r/report.json
        """
    )


def test_a_module_of_a_list_is_told_from_a_number() -> None:
    first = msgspec.structs.replace(OVERFLOW, module="0.2")
    assert summary(a_report(first), None).splitlines()[1].endswith(" module 0.2")


def test_a_clean_summary_is_one_line() -> None:
    assert summary(a_report(steps=1), None) == "ampguard: 1 step, no incident\n"


def test_a_summary_of_a_guard_that_went_off() -> None:
    report = msgspec.structs.replace(a_report(steps=9), status="incidents", off_since_step=9)
    expected = "ampguard: 9 steps, no incident until the guard went off in step 9; nothing after that was watched\n"
    assert summary(report, None) == expected


def test_a_long_summary_is_cut() -> None:
    lines = summary(a_report(*[OVERFLOW] * 50), None).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 30 more"


def test_everything_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    print_incident(OVERFLOW)
    print_summary(a_report(OVERFLOW), None)
    out, err = capfd.readouterr()
    assert out == ""
    assert "error[fp16-overflow]" in err
    assert "\x1b" not in err


def test_a_closed_stderr_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    print_incident(OVERFLOW, stderr_console())
    print_summary(a_report(OVERFLOW), None)


def test_card_is_plain_text_in_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where rich would show each line as an output of its own."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    print_incident(OVERFLOW)
    assert "error[fp16-overflow]" in capsys.readouterr().err
