"""Numerically stable forms, recognised by what made the operand and tried in the replay.

log(softmax(x)) is log_softmax(x); log(sigmoid(x)) is logsigmoid(x); log(1 - sigmoid(x)) is logsigmoid(-x);
log(sum(exp(x))) is logsumexp(x), log(mean(exp(x))) that less log(n), log(cumsum(exp(x))) is logcumsumexp(x);
exp(x) / sum(exp(x)) is softmax(x); log(det(x)) is logdet(x), and log(abs(det(x))) is slogdet(x)[1]: the determinant of a
matrix of ten rows leaves float32's range long before its logarithm does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ampguard.diagnose import words
from ampguard.diagnose.code import accused
from ampguard.diagnose.code.stable_forms import with_stable_form
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Proposal, Trial
from ampguard.diagnose.locate import lineage
from ampguard.numerics import is_low_precision
from ampguard.replay.trace import TracedOp
from ampguard.replay.variants import Intervention, RunKey, Variant

EPSILONS = 1e-2
SUMS = ("sum", "mean", "cumsum")
GIVEN_TO = {"log_softmax": "softmax", "logsigmoid": "sigmoid", "logdet": "det", "slogdet": "det"}
"""Whose operand is `x` in a form that the line itself does not name; in the others that of exp."""
BEHIND: dict[str, tuple[tuple[tuple[str, ...], ...], ...]] = {"exp": ((SUMS,),), "_linalg_det": ((), (("abs",),))}
"""What may lie between an operator that overflows and the logarithm of it."""
Compute: TypeAlias = Callable[[Tensor, tuple[Any, ...]], Tensor]
"""The stable form, from the source's operand and arguments."""


def proposals(evidence: Evidence) -> tuple[Proposal, ...]:
    """The stable form of the accused operator's line, if it has one."""
    found = _logs_of_the_line(evidence) if evidence.op.short_name == "log" else None
    old: str | None = None
    at = evidence.op
    if evidence.op.short_name in BEHIND:
        ways = (_log_behind(evidence, way) for way in BEHIND[evidence.op.short_name])
        log = next((log for log in ways if log is not None), None)
        form = _log_form(evidence, log) if log is not None else None
        if log is not None and form is not None:
            found, old, at = (form[0], _from_sources([(log, form[1], form[2])])), words.code_at(log.line), log
        elif evidence.op.short_name == "exp":
            found, old = _softmax_by_hand(evidence), _code_of_quotient(evidence)
    if found is None:
        return ()
    how, trial = found
    written = with_stable_form(at.line, how)
    if written is not None:
        written = words.marked(written, at, evidence.op)
    old = old or accused.accused_expression(evidence) or accused.statement(evidence)
    return (Proposal("stable-form", words.region(evidence), written or _in_words(how, old), trial=trial),)


def _in_words(how: str, old: str) -> str:
    """A form whose operand has no name in the statement: a script may well call something else `x`."""
    function = how.partition("(")[0].rpartition(".")[2]
    given = GIVEN_TO.get(function, "exp")
    return f"{re.sub(r'^F[.]', 'torch.nn.functional.', how)} in place of: {old}\n# x is what {given} is given"


def _logs_of_the_line(evidence: Evidence) -> tuple[str, Trial] | None:
    """The stable form of the accused logarithm, tried on every run of its line that has the same form."""
    form = _log_form(evidence, evidence.op)
    if form is None:
        return None
    how, accused_source, compute = form
    same = [(evidence.op, accused_source, compute)]
    for op in evidence.trace.ops:
        if op is not evidence.op and op.place == evidence.op.place:
            other = _log_form(evidence, op)
            if other is not None and other[0] == how:
                same.append((op, other[1], other[2]))
    return how, _from_sources(same)


def _log_form(evidence: Evidence, log: TracedOp) -> tuple[str, TracedOp, Compute] | None:
    """(how to write it, the operator whose operand is the form's own, the form of that operand) of one logarithm."""
    maker = _past_epsilon(evidence, lineage.maker(evidence.trace, log, 0))
    if maker is None:
        return None
    if maker.short_name in ("_softmax", "softmax"):
        return "torch.log_softmax(x, dim)", maker, lambda x, args: F.log_softmax(x, args[1])
    if maker.short_name == "sigmoid":
        return "F.logsigmoid(x)", maker, lambda x, args: F.logsigmoid(x)
    if maker.short_name in ("rsub", "sub") and _is_from_one(evidence, maker):
        inner = lineage.maker(evidence.trace, maker, 0 if len(maker.inputs) == 1 else len(maker.inputs) - 1)
        if inner is not None and inner.short_name == "sigmoid":
            return "F.logsigmoid(-x)", inner, lambda x, args: F.logsigmoid(-x)
    if maker.short_name in ("_linalg_det", "abs"):
        return _log_of_determinant(evidence, maker)
    return _log_of_exponentials(evidence, maker) if maker.short_name in SUMS else None


def _is_from_one(evidence: Evidence, difference: TracedOp) -> bool:
    """Whether 1 is what is subtracted from: sigmoid(a) - sigmoid(b), the mass of an interval, has no such form."""
    if difference.short_name == "rsub" and len(difference.inputs) == 1:
        return difference.scalars[:1] == [1.0]
    call = evidence.capture(difference.index)
    if call is None or len(call.tensors) != 2:
        return False
    return bool((call.tensors[difference.short_name == "rsub"] == 1).all())


def _log_of_determinant(evidence: Evidence, maker: TracedOp) -> tuple[str, TracedOp, Compute] | None:
    """log(det(x)), log(abs(det(x))): of a matrix that is not singular the logarithm is an ordinary number."""
    of_size = maker.short_name == "abs"
    determinant = lineage.maker(evidence.trace, maker, 0) if of_size else maker
    call = evidence.capture(determinant.index) if determinant is not None else None
    if determinant is None or determinant.short_name != "_linalg_det" or call is None:
        return None
    signs, logarithms = torch.linalg.slogdet(call.tensors[0].detach())
    if not bool((torch.isfinite(logarithms) & ((signs > 0) | of_size)).all()):
        return None
    if of_size:
        return "torch.linalg.slogdet(x)[1]", determinant, lambda x, args: torch.linalg.slogdet(x)[1]
    return "torch.logdet(x)", determinant, lambda x, args: torch.logdet(x)


def _log_of_exponentials(evidence: Evidence, maker: TracedOp) -> tuple[str, TracedOp, Compute] | None:
    """log(sum(exp(x))), log(cumsum(exp(x))), and log(mean(exp(x))): less the logarithm of how many there are."""
    inner = lineage.maker(evidence.trace, maker, 0)
    if inner is None or inner.short_name != "exp":
        return None
    if maker.short_name == "cumsum":
        along = ((evidence.capture(maker.index) or _Nothing).args[1:2] or (0,))[0]
        return f"torch.logcumsumexp(x, {along})", inner, lambda x, args: torch.logcumsumexp(x, along)
    shape = maker.inputs[0].shape
    dims = (evidence.capture(maker.index) or _Nothing).args[1:2]
    keep = len(maker.outputs[0].shape) == len(shape)
    dim = list(dims[0]) if dims and dims[0] else list(range(len(shape)))
    if maker.short_name == "sum":
        return "torch.logsumexp(x, dim)", inner, lambda x, args: torch.logsumexp(x, dim, keepdim=keep)
    count = math.prod(shape[d] for d in dim)
    how = f"torch.logsumexp(x, dim) - math.log({count})"
    return how, inner, lambda x, args: torch.logsumexp(x, dim, keepdim=keep) - math.log(count)


def _log_behind(evidence: Evidence, way: tuple[tuple[str, ...], ...]) -> TracedOp | None:
    """The logarithm at the end of a way from the accused operator, if what it gives goes nowhere else."""
    op: TracedOp | None = evidence.op
    for names in (*way, ("log",)):
        uses = [u for u in evidence.trace.ops if op is not None and any(t.made_by == (op.index, 0) for t in u.inputs)]
        uses = [u for u in uses if u.short_name not in ("detach", "alias")]
        op = uses[0] if len(uses) == 1 and uses[0].short_name in names else None
    return op


def _uses(evidence: Evidence) -> list[TracedOp]:
    """What reads the accused operator's result."""
    return [op for op in evidence.trace.ops if any(t.made_by == (evidence.op.index, 0) for t in op.inputs)]


def _softmax_by_hand(evidence: Evidence) -> tuple[str, Trial] | None:
    """`exp(x)` whose every use is a quotient by its own sum: subtracting the row's maximum changes nothing else."""
    uses = _uses(evidence)
    names = {op.short_name for op in uses}
    if not names or not names <= {"sum", "div", "log", "view", "mul", "detach"} or "sum" not in names:
        return None
    total = next(op for op in uses if op.short_name == "sum")
    if not any(op.short_name == "div" for op in uses):
        return None
    dims = (evidence.capture(total.index) or _Nothing).args[1:2]
    dim = list(dims[0]) if dims and dims[0] else list(range(len(evidence.op.inputs[0].shape)))

    def trial(e: Evidence) -> Variant:
        return Variant(at_places={e.op.place: lambda f, a, k: f(a[0] - a[0].amax(dim, keepdim=True), **k)})

    return "torch.softmax(x, dim)", trial


def _code_of_quotient(evidence: Evidence) -> str | None:
    """The lines of a softmax by hand, where its quotient is not in the line of its exponentials."""
    quotient = next(
        (op for op in _uses(evidence) if op.short_name == "div" and op.line and op.place[1:] != evidence.op.place[1:]),
        None,
    )
    return f"{accused.statement(evidence)}; {words.code_at(quotient.line)}" if quotient is not None else None


def _past_epsilon(evidence: Evidence, maker: TracedOp | None) -> TracedOp | None:
    """`softmax(x) + 1e-9`: the epsilon is part of the unstable form."""
    is_guard = maker is not None and maker.short_name in ("add", "clamp", "clamp_min") and len(maker.inputs) == 1
    if maker is not None and is_guard and all(abs(s) <= EPSILONS or s == 1.0 for s in maker.scalars):
        return lineage.maker(evidence.trace, maker, 0)
    return maker


def _from_sources(forms: list[tuple[TracedOp, TracedOp, Compute]]) -> Trial:
    """Replay with the stable form of each source's operand in the place of the logarithm's result."""

    def trial(e: Evidence) -> Variant:
        key = e.trace.run_key
        sources = {source.index: _Source() for _, source, _ in forms}
        places: dict[RunKey, Intervention] = {key(index): source for index, source in sources.items()}
        return Variant(interventions=places | {key(log.index): _Stable(sources[s.index], c) for log, s, c in forms})

    return trial


class _Source:
    """Runs the operator that the form begins with as it is, and remembers what it was given.

    In backward what the stable form makes of it goes by it: the way through the operators between is none (0 * Inf).
    """

    def __init__(self) -> None:
        self.given: tuple[Tensor, tuple[Any, ...]] | None = None
        self.arriving: list[tuple[Compute, Tensor]] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.given, self.arriving = (args[0].detach().clone(), args), []
        return func(*args, **kwargs)

    def derivative(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gradient: Tensor | None) -> Tensor:
        operand = args[0].detach().requires_grad_()
        total = torch.zeros_like(operand)
        if gradient is not None and bool((gradient != 0).any()):  # its result is used beside the form as well
            made = func(operand, *args[1:], **kwargs)
            (found,) = torch.autograd.grad(made[0] if isinstance(made, tuple) else made, operand, gradient)
            total = total + found
        for compute, arriving in self.arriving:
            result = compute(_wide(operand), args)
            (found,) = torch.autograd.grad(result, operand, arriving.reshape(result.shape).to(result.dtype))
            total = total + found
        return total


class _Stable:
    """Puts the stable form of what the source was given in the place of the logarithm's result."""

    def __init__(self, source: _Source, compute: Compute) -> None:
        self._source = source
        self._compute = compute

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._source.given is not None
        operand, source_args = self._source.given
        with torch.no_grad():
            result = self._compute(_wide(operand), source_args)
        out = func(*args, **kwargs)
        return result.reshape(out.shape).to(out.dtype)

    def derivative(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gradient: Tensor | None) -> Tensor:
        if gradient is not None:
            self._source.arriving.append((self._compute, gradient))
        return torch.zeros_like(args[0])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if is_low_precision(tensor.dtype) else tensor


class _Nothing:
    args: tuple[Any, ...] = ()
