"""Phrases that several rules use."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ampguard import compat
from ampguard.capture.record import Line, RootCall
from ampguard.diagnose.code.source import whole_statement
from ampguard.diagnose.code.text import without_comment
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.locate.chain import Link
from ampguard.incident import Location
from ampguard.numerics import KIND_NAMES, dtype_name
from ampguard.replay.trace import TracedOp

ROOT = "the root module"
"""What a model is called that has no name in another."""


def number(value: float | None) -> str:
    """A number as a person would write it.

    >>> number(81920.0), number(1.5e-9), number(0.25), number(None)
    ('81920', '1.5e-09', '0.25', 'unknown')
    """
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return str(value)
    if 1e3 <= abs(value) < 1e7 or value == int(value):
        return f"{value:.0f}" if abs(value) < 1e7 else f"{value:.4g}"
    return f"{value:.4g}"


def operator(evidence: Evidence) -> str:
    """The accused operator, in short; else what is accused in its place."""
    return evidence.called or name(evidence.op)


def name(op: TracedOp) -> str:
    """`aten.bmm.default` -> "bmm"."""
    return spelled_out(op.short_name)


def spelled_out(short_name: str) -> str:
    """The short name of an operator for a text.

    >>> spelled_out("_log_softmax"), spelled_out("_to_copy")
    ('log_softmax', 'the cast')
    """
    return "the cast" if short_name == "_to_copy" else short_name.lstrip("_")


def place(evidence: Evidence) -> str:
    """Where the operator ran: "in blocks.3.attn", "in the root module's forward", "in DiceLoss's forward" (a criterion that
    stands beside the model), "outside every module"."""
    name = evidence.op.module if evidence.is_in_module else evidence.op.within
    if name:
        return f"in module {name}" if name.replace(".", "").isdigit() else f"in {name}"
    if not evidence.is_in_module:
        return "outside every module" if name is None else "in the root module's forward"
    roots = [event for event in evidence.events() if isinstance(event, RootCall)]
    own = next((type(root.module).__name__ for root in roots if root.index == evidence.op.event), None)
    of_model = [root.index for root in roots if compat.has_parameters(root.module)]
    is_beside = own is not None and bool(of_model) and evidence.op.event not in of_model
    return f"in {own}'s forward" if is_beside else "in the root module's forward"


def precision(evidence: Evidence) -> str:
    return dtype_name(evidence.precision or evidence.low_precision_in_use) or "float32"


def region(evidence: Evidence) -> str | None:
    """The target of a fix: the module, or `file:line` outside modules."""
    op = evidence.op
    if evidence.is_in_module:
        return op.module
    if op.line is None:
        return None
    location = op.line.location()
    return f"{location.file.rsplit('/', 1)[-1]}:{location.line}"


def code(evidence: Evidence) -> str:
    return code_at(evidence.op.line) or ""


def code_at(line: Line | None) -> str | None:
    """The text of a line of code, without its comment (of a part of a statement: the statement); None without a line."""
    return (whole_statement(line) or without_comment(line.location().code)) if line is not None else None


def place_of(line: Location) -> str:
    """ "train.py:88"."""
    return f"{line.file.rsplit('/', 1)[-1]}:{line.line}"


def line_name(line: Line) -> str:
    """ "train.py:88"."""
    return f"{line.code.co_filename.rpartition('/')[2]}:{line.number}"


def codes_at(lines: Iterable[Line]) -> str:
    """The code of several lines, each once."""
    return "; ".join(dict.fromkeys(code for line in lines if (code := code_at(line))))


def marked(how: str, op: TracedOp, beside: TracedOp) -> str:
    """A changed line of code with where it stands, if that is not the line that is shown above it."""
    line = op.line
    if line is None or (
        beside.line is not None and line.code is beside.line.code and line.number == beside.line.number
    ):
        return how
    return f"{how}  # {line_name(line)}"


def kind(link: Link) -> str:
    """What the bad element of a link of the chain is: "nan", "+inf" or "-inf"."""
    return KIND_NAMES[link.kind]
