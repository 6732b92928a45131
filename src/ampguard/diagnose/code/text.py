"""Pieces of source text: spliced with edits, joined into one line, without their comments."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tokenize
from typing import Any

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
    """One statement with two changes, each of which was written alone; None where they touch the same place.

    >>> merged("y = a / exp(x)", "y = a / (exp(x) + 1e-6)", "y = a / exp(x.clamp(max=80))")
    'y = a / (exp(x.clamp(max=80)) + 1e-6)'
    """
    first, second = sorted((_change(original, one), _change(original, other)))
    if first[0] == 0:
        return None
    try:
        both = _merged_tree(*(ast.parse(text) for text in (original, one, other)))
    except (
        SyntaxError,
        _ConflictError,
    ):  # words about a change and not the statement, or two changes of one expression
        return None
    if first[1] <= second[0]:
        text = original[: first[0]] + first[2] + original[first[1] : second[0]] + second[2] + original[second[1] :]
        with contextlib.suppress(SyntaxError):
            if ast.dump(ast.parse(text)) == ast.dump(both):
                return text
    return re.sub(r"(?<=\de-)0(?=\d\b)", "", ast.unparse(ast.fix_missing_locations(both)))  # 1e-06


class _ConflictError(ValueError):
    """Both have changed the same expression."""


def _merged_tree(base: Any, one: Any, other: Any) -> Any:
    """A tree with what two others change in it. Raises _ConflictError."""
    if _is_same(one, base):
        return other
    if _is_same(other, base):
        return one
    if isinstance(base, ast.expr):
        is_around = [any(_is_same(part, base) for part in ast.walk(tree)) for tree in (one, other)]
        if all(is_around):
            raise _ConflictError
        if any(is_around):  # one change is around the other
            outer, inner = (one, other) if is_around[0] else (other, one)
            return _With(base, inner).visit(outer)
    if isinstance(base, list) and len(base) == len(one) == len(other):
        return [_merged_tree(*parts) for parts in zip(base, one, other, strict=True)]
    if not isinstance(base, ast.AST) or not type(base) is type(one) is type(other):
        raise _ConflictError
    fields = {name: _merged_tree(*(getattr(tree, name, None) for tree in (base, one, other))) for name in base._fields}
    return type(base)(**fields)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, ast.AST) and isinstance(other, ast.AST):
        return ast.dump(one) == ast.dump(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


class _With(ast.NodeTransformer):
    """Puts another expression in the place of the first that is the same as one given."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new, self._is_done = old, new, False

    def visit(self, node: ast.AST) -> Any:
        if not self._is_done and _is_same(node, self._old):
            self._is_done = True
            return self._new
        return self.generic_visit(node)


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
