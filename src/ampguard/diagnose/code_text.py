"""Pieces of source text: spliced with edits, joined into one line, without their comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize

Edit = tuple[int, int, str]
"""Bytes `start` to `end` of the source become a text; `start == end` where it is added."""


def spliced(text: bytes, start: int, end: int, edits: list[Edit]) -> str:
    """`text[start:end]` with the edits made, those of inner expressions first: what they add at one place nests."""

    def order(numbered: tuple[int, Edit]) -> tuple[int, bool, int]:
        number, (first, _, new) = numbered
        opens = new.startswith("(")
        return first, opens, -number if opens else number

    pieces, position = [], start
    for _, (first, last, new) in sorted(enumerate(edits), key=order):
        pieces += [text[position:first], new.encode()]
        position = last
    return b"".join([*pieces, text[position:end]]).decode()


def merged(original: str, one: str, other: str) -> str | None:
    """One statement with two changes, each of which was written alone; None where they touch the same place."""
    first, second = sorted((_change(original, one), _change(original, other)))
    if first[0] == 0 or first[1] > second[0] or first[:2] == second[:2]:
        return None
    text = original[: first[0]] + first[2] + original[first[1] : second[0]] + second[2] + original[second[1] :]
    try:
        ast.parse(text)
    except SyntaxError:  # words about a change, and not the statement
        return None
    return text


def _change(original: str, changed: str) -> Edit:
    """The one piece of a text in which another differs."""
    start = _shared(original, changed)
    end = _shared(original[start:][::-1], changed[start:][::-1])
    return start, len(original) - end, changed[start : len(changed) - end]


def _shared(one: str, other: str) -> int:
    """How long the beginning is that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def without_comment(line: str) -> str:
    """One line of code, complete or not, without the comment at its end.

    >>> without_comment("if a / b > 0:  # really?")
    'if a / b > 0:'
    """
    return _uncommented(line, line)


def joined_lines(text: str) -> str:
    """An expression over several lines as one line, without its comments."""
    if "\n" not in text:
        return text
    lines = _uncommented(text, f"({text}\n)", shift=1).splitlines()
    joined = " ".join(part for line in lines if (part := line.strip().removesuffix("\\").strip()))
    return re.sub(r"(?<=[(\[{]) | (?=[)\]}])|(?<=[\w)\]]) (?=\.\w)", "", joined)


def _uncommented(text: str, tokenized: str, shift: int = 0) -> str:
    lines = text.splitlines()
    try:
        for token in tokenize.generate_tokens(io.StringIO(tokenized).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][: column - shift * (row == 1)].rstrip()
    except (tokenize.TokenError, SyntaxError):
        pass  # an unfinished statement: the comments before its end were seen
    return "\n".join(lines)
