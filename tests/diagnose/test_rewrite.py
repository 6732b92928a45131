"""A fix in the user's line: only the operand changes, the rest of the line stays as it was written."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from ampguard.capture.record import Line
from ampguard.diagnose.code import rewrite
from ampguard.diagnose.code.rewrite import clamped, literal, plus
from ampguard.diagnose.code.source import LineOfCode, line_of_code, line_of_text
from ampguard.diagnose.code.text import without_comment


def changed(
    line: LineOfCode | None, operator: str, argument: int, change: rewrite.Change, in_place: bool = False
) -> str | None:
    """Every expression of the line that runs the operator, changed; None where there is none."""
    if line is None:
        return None
    found = [
        (e, o) for e in line.expressions(operator, in_place) if (o := e.operand(operator, argument, None)) is not None
    ]
    return rewrite.with_changes(line, found, change) if found else None


EPSILON = plus(1e-6)
POSITIVE = clamped(1e-6, None)


@pytest.mark.parametrize(
    ("code", "operator", "change", "expected"),
    [
        ("x[:, :3].sqrt_()", "sqrt", EPSILON, "x[:, :3].add_(1e-6).sqrt_()"),
        ("x.log_()", "log", POSITIVE, "x.clamp_(min=1e-6).log_()"),
        ("torch.sqrt_(x)", "sqrt", EPSILON, "torch.sqrt_(x.add_(1e-6))"),
        ("x **= 0.5", "pow", POSITIVE, "x.clamp_(min=1e-6); x **= 0.5"),
    ],
)
def test_what_is_written_to_is_changed_in_place(
    code: str, operator: str, change: rewrite.Change, expected: str
) -> None:
    assert changed(line_of_text(code), operator, 0, change, in_place=True) == expected


@pytest.mark.parametrize(
    ("code", "operator", "argument", "change", "expected"),
    [
        # divisors
        ("x = a / b.sum()", "div", 1, EPSILON, "x = a / (b.sum() + 1e-6)"),
        ("x = a / (b + c)", "div", 1, EPSILON, "x = a / (b + c + 1e-6)"),
        ("x = torch.div(a, b)", "div", 1, EPSILON, "x = torch.div(a, b + 1e-6)"),
        ("x = a.true_divide(b)", "div", 1, EPSILON, "x = a.true_divide(b + 1e-6)"),
        ("x = a / (b if k else c)", "div", 1, EPSILON, "x = a / ((b if k else c) + 1e-6)"),
        ("x = a / -b", "div", 1, EPSILON, "x = a / (-b + 1e-6)"),
        ("x = 1 / b", "reciprocal", 0, EPSILON, "x = 1 / (b + 1e-6)"),
        ("x = torch.reciprocal(b)", "reciprocal", 0, EPSILON, "x = torch.reciprocal(b + 1e-6)"),
        ("x = torch.rsqrt(v)", "rsqrt", 0, EPSILON, "x = torch.rsqrt(v + 1e-6)"),
        ("x = v.rsqrt()", "rsqrt", 0, EPSILON, "x = (v + 1e-6).rsqrt()"),
        ("x = b ** -1", "pow", 0, EPSILON, "x = (b + 1e-6) ** -1"),
        ("x = a / b / c", "div", 1, EPSILON, "x = a / (b + 1e-6) / (c + 1e-6)"),
        ("x = a / (b / c)", "div", 1, EPSILON, "x = a / (b / (c + 1e-6) + 1e-6)"),
        ("x = a / b", "div", 1, POSITIVE, "x = a / b.clamp(min=1e-6)"),
        ("x = a / (b - c)", "div", 1, POSITIVE, "x = a / (b - c).clamp(min=1e-6)"),
        ("x = a // b", "floor_divide", 1, EPSILON, "x = a // (b + 1e-6)"),
        ("x = a * b", "div", 1, EPSILON, None),
        ("x = 1 / 2 * y", "div", 1, EPSILON, None),
        # functions of one operand
        ("loss = -(t * torch.log(p)).mean()", "log", 0, POSITIVE, "loss = -(t * torch.log(p.clamp(min=1e-6))).mean()"),
        ("x = log(p) + log(1 - p)", "log", 0, POSITIVE, "x = log(p.clamp(min=1e-6)) + log((1 - p).clamp(min=1e-6))"),
        ("x = (a + b).log().sum()", "log", 0, POSITIVE, "x = (a + b).clamp(min=1e-6).log().sum()"),
        ("x = x ** 0.5", "pow", 0, POSITIVE, "x = x.clamp(min=1e-6) ** 0.5"),
        ("y = torch.special.xlogy(a, b)", "xlogy", 1, POSITIVE, "y = torch.special.xlogy(a, b.clamp(min=1e-6))"),
        ("y = log(p)", "log", 0, POSITIVE, "y = log(p.clamp(min=1e-6))"),
        # what only looks like it
        ('self.log("loss", p)', "log", 0, POSITIVE, None),
        ("y = np.log(p)", "log", 0, POSITIVE, None),
        ("y = math.log(p)", "log", 0, POSITIVE, None),
        ('wandb.log({"loss": p})', "log", 0, POSITIVE, None),
        ("y = exp(p)", "log", 0, POSITIVE, None),
        # what is there already
        ("y = a / (d + 1e-8)", "div", 1, plus(1e-3, lambda value: value < 1e-7), "y = a / (d + 0.001)"),
        ("y = a / (1e-8 + d)", "div", 1, plus(1e-3, lambda value: value < 1e-7), "y = a / (0.001 + d)"),
        ("y = a / (d + 1e-4)", "div", 1, plus(1e-3, lambda value: value < 1e-7), "y = a / (d + 1e-4 + 0.001)"),
        ("y = p.clamp(min=1e-12).log()", "log", 0, POSITIVE, "y = p.clamp(min=1e-6).log()"),
        ("y = p.clamp(1e-12, 1.0).log()", "log", 0, POSITIVE, "y = p.clamp(1e-6, 1.0).log()"),
        ("y = p.clamp_min(1e-12).log()", "log", 0, POSITIVE, "y = p.clamp_min(1e-6).log()"),
        ("y = p.clamp(min=0.5).log()", "log", 0, POSITIVE, "y = p.clamp(min=0.5).clamp(min=1e-6).log()"),
        # the rest of the line
        ("y = a*b / d; z = 1e-8", "div", 1, EPSILON, "y = a*b / (d + 1e-6)"),
        ("y = a / d  # 0 at first", "div", 1, EPSILON, "y = a / (d + 1e-6)"),
        ("y = 'é' and a / d, 1e-8,  0x1F", "div", 1, EPSILON, "y = 'é' and a / (d + 1e-6), 1e-8,  0x1F"),
        ("if x:", "log", 0, POSITIVE, None),
        ("y = torch.log(", "log", 0, POSITIVE, None),
    ],
)  # fmt: skip
def test_changed_line(code: str, operator: str, argument: int, change: rewrite.Change, expected: str | None) -> None:
    assert changed(line_of_text(code), operator, argument, change) == expected


@pytest.mark.parametrize(
    ("code", "operator", "change", "expected"),
    [
        ("x.div_(d)", "div", EPSILON, "x.div_(d + 1e-6)"),
        ("x /= d", "div", EPSILON, "x /= d + 1e-6"),
        ("x /= d", "div", POSITIVE, "x /= d.clamp(min=1e-6)"),
        ("x = a / d", "div", EPSILON, None),
    ],
)
def test_in_place_operators_are_told_from_the_others(
    code: str, operator: str, change: rewrite.Change, expected: str | None
) -> None:
    assert changed(line_of_text(code), operator, 1, change, in_place=True) == expected


FILE = """\
import math
import torch
from math import exp
from torch import log as ln
import torch.nn.functional as nnf

def loss(p, q, n):
    if (p / n).sum() > 1:  # head
        return 0
    for row in p / n: print(row)
    both = (p
            / n)  # over two lines
    total = torch.stack([
        (p - q)  # left
        / (q
           + n),
        torch.log(p),
    ]).sum()
    y = ln(p) + exp(n)
    def inner(x): return x.sqrt()
    chain = (p
             .sum()
             .log())
    return y
"""


@pytest.mark.parametrize(
    ("number", "operator", "argument", "expected"),
    [
        (8, "div", 1, "p / (n + 1e-6)"),
        (10, "div", 1, "p / (n + 1e-6)"),
        (11, "div", 1, "p / (n + 1e-6)"),
        (12, "div", 1, None),
        (14, "div", 1, "(p - q) / (q + n + 1e-6)"),
        (17, "log", 0, "torch.log(p + 1e-6)"),
        (19, "log", 0, None),
        (19, "exp", 0, None),
        (20, "sqrt", 0, "return (x + 1e-6).sqrt()"),
        (23, "log", 0, "(p.sum() + 1e-6).log()"),
    ],
)
def test_line_is_understood_with_its_statement(
    number: int, operator: str, argument: int, expected: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "script.py"
    file.write_text(FILE)
    linecache.checkcache()
    line = line_of_code(Line(compile(FILE, str(file), "exec"), number))
    assert changed(line, operator, argument, EPSILON) == expected


def test_line_without_a_file_is_not_understood(tmp_path: Path) -> None:
    line = line_of_code(Line(compile("x = a / b", str(tmp_path / "gone.py"), "exec"), 1))
    assert changed(line, "div", 1, EPSILON) is None


@pytest.mark.parametrize("code", ["x = a / (b", "x = 'a # b' / c  # why", "# only this", "x = 1"])
def test_comment_is_left_out(code: str) -> None:
    expected = {"x = 'a # b' / c  # why": "x = 'a # b' / c", "# only this": ""}.get(code, code)
    assert without_comment(code) == expected


@pytest.mark.parametrize("value", [1e-6, 1e-3, 1e-12, 80.0, 700.0, 1e30, -0.999999, 1.000001, 65504.0])
def test_literal_is_the_number(value: float) -> None:
    assert float(literal(value)) == value
    assert "e-0" not in literal(value)


def test_what_is_added_is_made_where_the_tensor_is() -> None:
    assert [f"torch.eye(3{rewrite.on_device(device)})" for device in ("cpu", "cuda")] == [
        "torch.eye(3)",
        'torch.eye(3, device="cuda")',
    ]
