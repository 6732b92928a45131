"""The logarithm of a determinant that is negative, or 0.

`torch.logdet` is composed of `slogdet` and a `where` that puts a NaN in place of the result where the sign is -1: the
first bad value is that constant, and no operand of it tells anything. Of a singular matrix both give -Inf.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from ampguard.diagnose import words
from ampguard.diagnose.code import accused, rewrite
from ampguard.diagnose.code.source import called_name, line_of_code
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal
from ampguard.diagnose.fixes.proposals import OperandFix
from ampguard.diagnose.locate import lineage
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import CodePlace, Variant

EPSILON = 1e-6


def negative_determinant(evidence: Evidence) -> Finding | None:
    """What there is to say where the accused constant is `torch.logdet`'s answer to a negative determinant."""
    found = _parts_of_logdet(evidence)
    if found is None:
        return None
    chosen, determinant = found
    call = evidence.capture(determinant.index)
    if call is None or not isinstance(call.output, (tuple, list)) or len(call.output) < 2:
        return None
    signs, logarithms = (part.detach().double().reshape(-1) for part in call.output[:2])
    is_negative = signs < 0
    if not bool(is_negative.any()):
        return None
    logarithm = float(logarithms[is_negative][0])
    count = f"{int(is_negative.sum())} of {signs.numel()} are; " if signs.numel() > 1 else ""
    size = "x".join(str(n) for n in determinant.inputs[0].shape[-2:])
    statement = accused.statement(evidence)
    where = f" in: {statement}" if statement else ""
    return Finding(
        "domain-error",
        f"torch.logdet {words.place(evidence)} was given a {size} matrix whose determinant is negative ({count}the logarithm "
        f"of its size is {words.number(logarithm)}): that has no logarithm in any precision.",
        weight=60,
        evidence={"log_of_its_size": logarithm, "negative": int(is_negative.sum()), "matrices": signs.numel()},
        proposals=(
            Proposal(
                "stable-form",
                words.region(evidence),
                _with_slogdet(evidence)
                or f"torch.linalg.slogdet(x)[1], the logarithm of its size, in place of torch.logdet(x){where}",
                trial=lambda e: Variant(at_places={chosen: _the_logarithm}),
            ),
        ),
    )


def _with_slogdet(evidence: Evidence) -> str | None:
    """The statement with `slogdet` in place of its one `logdet`."""
    line = line_of_code(evidence.op.line) if evidence.op.line is not None else None
    if line is None:
        return None
    calls = line.calls(lambda n: called_name(n) == "logdet" and isinstance(n.func, ast.Attribute))
    if len(calls) != 1:
        return None
    (call, statement), source = calls[0], line.source
    assert isinstance(call.func, ast.Attribute)
    is_function = ast.unparse(call.func.value).partition(".")[0] in source.torch_names
    given = call.args[0] if is_function and len(call.args) == 1 else call.func.value
    if len(call.args) != is_function or call.keywords:
        return None
    return line.edited(call, statement, [(*source.span(call), f"torch.linalg.slogdet({source.written(given)})[1]")])


def singular_matrix(evidence: Evidence) -> Finding | None:
    """What there is to say where `slogdet` was given a matrix whose determinant is exactly 0."""
    if evidence.op.short_name != "_linalg_slogdet" or evidence.call is None or evidence.kind != "-inf":
        return None
    matrix = evidence.call.tensors[0].detach()
    signs = torch.linalg.slogdet(matrix)[0].reshape(-1)
    count, rows = int((signs == 0).sum()), matrix.shape[-1]
    empty = int((matrix == 0).all(-1).sum())
    if not count or not bool(torch.isfinite(matrix).all()):
        return None
    some = f"{count} of {signs.numel()} matrices is" if count == 1 else f"{count} of {signs.numel()} matrices are"
    what = f"a {rows}x{rows} matrix that is" if signs.numel() == 1 else f"{rows}x{rows} matrices, and {some}"
    why = "" if not empty else " (1 row of it is all 0)" if empty == 1 else f" ({empty} rows are all 0)"
    eye = torch.eye(rows, dtype=matrix.dtype, device=matrix.device) * EPSILON
    term = f"{rewrite.literal(EPSILON)} * torch.eye({rows}{rewrite.on_device(matrix.device.type)})"
    return Finding(
        "domain-error",
        f"{words.operator(evidence)} {words.place(evidence)} was given {what} singular{why}: its determinant is 0, which has "
        f"no logarithm in any precision.",
        weight=60,
        evidence={"singular": count, "matrices": signs.numel(), "empty_rows": empty},
        proposals=(
            OperandFix(
                "add-epsilon",
                0,
                rewrite.plus(term),
                lambda t: t + eye,
                lambda t: True,
                f"keep the matrix from being singular: x + {term}",
            ).proposal(evidence),
        ),
    )


def _parts_of_logdet(evidence: Evidence) -> tuple[CodePlace, TracedOp] | None:
    """(where the `where` of the call runs, its `slogdet`) around an accused constant that is NaN."""
    parts = lineage.logdet_around(evidence.trace, evidence.op) if evidence.kind == "nan" else None
    return (parts[0].place, parts[1]) if parts is not None else None


def _the_logarithm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`where(sign == -1, nan, logarithm)` without the choice."""
    other = args[2] if len(args) > 2 else None
    return other.clone() if isinstance(other, torch.Tensor) else func(*args, **kwargs)
