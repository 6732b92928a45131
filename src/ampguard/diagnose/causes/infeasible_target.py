"""infeasible-target: this sample's loss is infinite in any precision because its target cannot be produced.

What happens   a CTC target longer than its input (each repeated label needs a blank between) has probability 0; so has a
               class whose logit is masked to -Inf, or a number outside of the support of a distribution (a count of -1,
               of which a likelihood takes lgamma). The loss of that sample is Inf.
Why it hurts   its gradient is NaN, and a sum or mean over the batch takes everybody with it.
Instead        filter such samples (or CTCLoss(zero_infinity=True)); check labels against the mask.
"""

from __future__ import annotations

import ast
import math
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import RootCall
from ampguard.diagnose import words
from ampguard.diagnose.causes.domain_error import domain_in_words, outside_domain, spelled_out
from ampguard.diagnose.code import accused
from ampguard.diagnose.code.source import called_name, line_of_code
from ampguard.diagnose.code.text import joined_lines, spliced
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes.proposals import at_the_head, spelled
from ampguard.diagnose.locate import lineage
from ampguard.diagnose.locate.rows import logsumexps_of_empty_rows
from ampguard.replay.trace import TracedOp
from ampguard.replay.variables import expression_of
from ampguard.replay.variants import Intervention, Variant

NORMALISERS = frozenset({"lgamma"})
"""What the likelihoods of counts take of the data themselves."""

PICKS = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "cross_entropy_loss", "gather", "index"})


@cause("infeasible-target")
def infeasible_target(evidence: Evidence) -> Finding | None:
    if evidence.op.refused or evidence.link.kind == 1:
        return None
    if "ctc_loss" in evidence.op.short_name:
        return _ctc(evidence)
    if evidence.intended and (evidence.converts or evidence.bad.kind == "loss"):
        return _masked_label(evidence)
    return _outside_support(evidence)


def _ctc(evidence: Evidence) -> Finding | None:
    call = evidence.capture(evidence.op.index)
    if call is None or evidence.given is not None:
        return None
    losses = call.result.detach().reshape(-1)
    samples = (losses == math.inf).nonzero().reshape(-1).tolist()
    tensors = call.tensors
    if not samples or not bool(torch.isfinite(tensors[0]).all()):
        return None
    lengths = _lengths(call.args)
    shown = ", ".join(
        f"sample {s}" + (f" ({lengths[1][s]} labels on {lengths[0][s]} frames)" if lengths else "") for s in samples[:4]
    )
    return Finding(
        "infeasible-target",
        f"The CTC loss of {shown} is infinite: the target needs more frames than the input has. The network's output is "
        f"finite, so no precision cures it.",
        weight=85,
        evidence={"samples": samples, "lengths": lengths},
        proposals=(
            Proposal(
                "filter-sample",
                words.region(evidence),
                "drop samples whose target is longer than their input, or let them count as 0: "
                + _with_zeros(evidence),
                trial=at_the_head(_left_out),
            ),
        ),
        phase="loss",
    )


def _with_zeros(evidence: Evidence) -> str:
    """Where the script can say that an infinite loss counts as 0: in its call, of its criterion, in its model's settings."""
    roots = {id(e.module): e.module for e in evidence.events() if isinstance(e, RootCall)}
    modules = [module for root in roots.values() for module in compat.all_modules(root)]
    criterion = next((m for m in modules if isinstance(m, nn.CTCLoss) and id(m) == evidence.op.owner), None)
    if criterion is None:
        criterion = next((m for m in modules if isinstance(m, nn.CTCLoss)), None)
    if criterion is not None:
        return f"{expression_of(criterion) or 'the criterion'}.zero_infinity = True"
    for root in roots.values():
        setting = next(
            (n for n in vars(getattr(root, "config", None) or _Nothing) if n.endswith("zero_infinity")), None
        )
        if setting is not None:
            return f"{expression_of(root) or 'model'}.config.{setting} = True"
    line = evidence.op.line
    code = line_of_code(line) if line is not None and is_script_code(line.code) else None
    parts = code.parts if code is not None else ()
    calls = [n for part, _ in parts for n in ast.walk(part) if isinstance(n, ast.Call) and called_name(n) == "ctc_loss"]
    if code is None or len(calls) != 1 or any(k.arg == "zero_infinity" for k in calls[0].keywords):
        return "zero_infinity=True"
    start, end = code.source.span(calls[0])
    return joined_lines(spliced(code.source.text, start, end, [(end - 1, end - 1, ", zero_infinity=True")]))


class _Nothing:
    """Settings of a model that has none."""


def _left_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Infinite losses count as 0, and have no derivative."""
    names = [argument.name for argument in compat.schema_of(func).arguments]
    if "zero_infinity" in names:
        at, given = names.index("zero_infinity"), list(args)
        if at < len(given):
            given[at] = True
        else:
            kwargs = {**kwargs, "zero_infinity": True}
        args = tuple(given)
    output = func(*args, **kwargs)
    losses = output[0] if isinstance(output, (tuple, list)) else output
    finite = torch.where(torch.isinf(losses), torch.zeros_like(losses), losses)
    return finite if losses is output else type(output)([finite, *output[1:]])


def _lengths(args: tuple[object, ...]) -> tuple[list[int], list[int]] | None:
    def listed(value: object) -> list[int] | None:
        if isinstance(value, Tensor):
            return [int(v) for v in value.reshape(-1).tolist()]
        return [int(v) for v in value] if isinstance(value, (list, tuple)) else None

    if len(args) < 4:
        return None
    inputs, targets = listed(args[2]), listed(args[3])
    return (inputs, targets) if inputs is not None and targets is not None else None


def _masked_label(evidence: Evidence) -> Finding | None:
    pick = _pick(evidence)
    if pick is None or next(logsumexps_of_empty_rows(evidence), None) is not None:
        return None  # the second: no class at all was left
    call = evidence.call if pick is evidence.op else evidence.capture(pick.index)
    integers = [t for t in (call.tensors if call is not None else []) if not t.is_floating_point()]
    labels = sorted(set(integers[0].reshape(-1).tolist()))[:8] if integers else []
    return Finding(
        "infeasible-target",
        f"{pick.short_name} {_place(pick)} picks a class whose logit was masked to -Inf: the target has "
        f"probability 0, its loss is infinite in any precision.",
        weight=85,
        evidence={"labels": labels},
        proposals=(
            Proposal(
                "filter-sample",
                words.region(evidence),
                "drop samples whose label is outside the allowed classes (or correct the mask), in:\n"
                + accused.statement(evidence),
                trial=lambda e: Variant(at_places={pick.place: _without_infinities}),
            ),
        ),
        phase="loss",
        op=None if pick is evidence.op else pick,
    )


def _outside_support(evidence: Evidence) -> Finding | None:
    """A likelihood of data that a distribution cannot produce: what it takes of the data alone, of no weight, has no value.

    It is a term of the loss then: what a layer is given of it (a feature) meets a weight on its way there.
    """
    op = evidence.op
    if evidence.given is not None or evidence.intended or (op.short_name not in NORMALISERS and _log_prob(op) is None):
        return None
    outside = outside_domain(evidence)
    if outside is None or evidence.is_finite_in_float32:
        return None
    position, value, low, high = outside
    weights = _memory_of_weights(evidence)
    if any(lineage.reads_any(evidence.trace, link.op, weights) for link in evidence.chain.links if link.op is not op):
        return None
    if math.prod(op.inputs[position].shape) < 2 or not lineage.is_of_data_alone(evidence.trace, op, position, weights):
        return None
    call = _log_prob(op)
    name = ast.unparse(call.args[0]) if call is not None and call.args else None
    called = f"`{name}`" if name is not None else "the target"
    span = domain_in_words(low, high, open_ends=True)
    return Finding(
        "infeasible-target",
        f"The likelihood of a target has no value: {op.short_name} {_place(op)} was given {spelled_out(value, low, high)}, "
        f"outside its domain{span}, and gives {spelled(evidence.kind)} in any precision. No weight went into that: it was "
        f"computed from {called}. A mask behind it leaves 0 * Inf, which is NaN.",
        weight=85,
        evidence={"name": name, "operand_value": value},
        proposals=(
            Proposal(
                "filter-sample",
                words.region(evidence),
                f"drop the values of {called} that the distribution cannot produce, or where a mask leaves them out put one of "
                f"its support in their place, before: {accused.statement(evidence)}",
                trial=lambda e: Variant(at_places={op.place: _within(position, low, high)}),
            ),
        ),
        phase="loss",
    )


def _log_prob(op: TracedOp) -> ast.Call | None:
    """The call of a distribution's `log_prob` at an operator's line."""
    code = line_of_code(op.line) if op.line is not None else None
    parts = code.parts if code is not None else ()
    calls = (n for part, _ in parts for n in ast.walk(part) if isinstance(n, ast.Call))
    return next((call for call in calls if called_name(call) == "log_prob"), None)


def _memory_of_weights(evidence: Evidence) -> set[int]:
    modules = [e.module for e in evidence.events() if isinstance(e, RootCall)]
    weights = [p for module in modules for p in compat.all_parameters(module)]
    leaves = [h.tensor for _, _, h in evidence.held() if h.tensor.requires_grad]
    return {compat.storage_key(t) for t in (*weights, *leaves)}


def _within(position: int, low: float | None, high: float | None) -> Intervention:
    """The operator with 1, or the middle of its domain, in the place of what is outside."""
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    inside = 1.0 if least < 1.0 < most else (least + most) / 2

    def within(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[position]
        is_inside = (given > least) & (given < most)
        other = torch.where(is_inside, given, torch.full_like(given, inside))
        return func(*args[:position], other, *args[position + 1 :], **kwargs)

    return within


def _pick(evidence: Evidence) -> TracedOp | None:
    """The operator that read the label's entry: where only the sign was changed since, it lies further back."""
    if evidence.op.short_name in PICKS:
        return evidence.op
    is_difference = evidence.op.short_name in ("sub", "rsub") and evidence.kind != "nan"  # logsumexp(x) - x[label]
    if evidence.converts and evidence.op.short_name != "neg" and not is_difference:
        return None
    links = evidence.chain.links
    behind = links[links.index(evidence.link) + 1 :] if evidence.converts else links
    picks = (link.op for link in behind if link.op.short_name in PICKS and _reads_labels(link.op))
    if evidence.converts and is_difference:
        return next((pick for pick in picks if _labels_are_given(evidence, pick)), None)
    return next(picks, evidence.op if evidence.converts else None)


def _reads_labels(op: TracedOp) -> bool:
    return any(t.dtype in (torch.int32, torch.int64) for t in op.inputs)


def _labels_are_given(evidence: Evidence, pick: TracedOp) -> bool:
    """Whether the positions that were picked were handed in, and not found by an argmin of computed numbers."""
    makers = (
        lineage.maker(evidence.trace, pick, i) for i, t in enumerate(pick.inputs) if not t.dtype.is_floating_point
    )
    return not any(t.dtype.is_floating_point for made in makers if made is not None for t in made.inputs)


def _without_infinities(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The samples in question count with a loss of 0."""
    entries = args[0]
    return func(torch.where(torch.isinf(entries), torch.zeros_like(entries), entries), *args[1:], **kwargs)


def _place(op: TracedOp) -> str:
    if op.root is None:
        return "outside every module"
    return f"in {op.module}" if op.module else "in the root module's forward"
