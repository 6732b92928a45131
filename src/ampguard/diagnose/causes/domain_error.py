"""domain-error: a function outside its domain.

What happens   log of 0 is -Inf and of a negative number NaN; sqrt of a negative number is NaN (a variance computed as
               E[x^2] - E[x]^2 can be slightly below 0); acos and asin beyond 1, a fractional power of a negative number.
               torch.logdet of a matrix whose determinant is negative is NaN, and -Inf of one that is singular.
               In evaluation a BatchNorm takes the root of its running variance: a checkpoint may hold a negative one.
Why it hurts   the operand is off by a rounding error, the result is NaN. A later `* 0` does not help: NaN * 0 is NaN.
Instead        clamp the operand into the domain, or use the stable form (log_softmax, logsigmoid, logsumexp,
               binary_cross_entropy_with_logits).
Not this       an operand that only low precision flushed to 0: see fp16-underflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.record import Ref, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.causes.division_by_zero import divisor_position
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.diagnose.fixes import stable
from ampguard.diagnose.fixes.determinants import negative_determinant, singular_matrix
from ampguard.diagnose.fixes.one_sample import left_out
from ampguard.diagnose.fixes.proposals import clamp_fix, precision_fixes, spelled
from ampguard.diagnose.locate import lineage
from ampguard.replay.variants import Variant

EDGE = 1e-6
DOMAINS: dict[str, tuple[float | None, float | None, bool]] = {
    "log": (0.0, None, True), "log2": (0.0, None, True), "log10": (0.0, None, True), "log1p": (-1.0, None, True),
    "sqrt": (0.0, None, False), "rsqrt": (0.0, None, True), "acos": (-1.0, 1.0, False), "asin": (-1.0, 1.0, False),
    "acosh": (1.0, None, False), "atanh": (-1.0, 1.0, True), "logit": (0.0, 1.0, True), "erfinv": (-1.0, 1.0, True),
    "special_logit": (0.0, 1.0, True), "xlogy": (0.0, None, True), "lgamma": (0.0, None, True),
    "digamma": (0.0, None, True), "special_ndtri": (0.0, 1.0, True), "pow": (0.0, None, False),
}  # fmt: skip
"""Lower end, upper end, and whether the ends themselves are outside."""

SUMS = frozenset({"sum", "mean", "mm", "mv", "bmm", "dot"})

NO_TERM = "every term that is summed up for it is 0 (no path of it is possible; where it is long, compute in log space)"

TRAINING_POSITION = 5
EPS_POSITION = {
    "native_batch_norm": 7,
    "batch_norm": 7,
    "cudnn_batch_norm": 7,
    "miopen_batch_norm": 7,
    "_native_batch_norm_legit": 7,
    "_native_batch_norm_legit_no_training": 6,
}
"""Where the arguments of a BatchNorm hold eps; where training is told, it is the sixth."""


@cause("domain-error")
def domain_error(evidence: Evidence) -> Finding | None:
    if evidence.given is not None or evidence.intended or evidence.op.refused or evidence.is_finite_in_float32:
        return None
    determinant = negative_determinant(evidence) or singular_matrix(evidence)
    if determinant is not None:
        return determinant
    variance = negative_variance(evidence)
    if variance is not None:
        return of_variance(evidence, *variance)
    if divisor_position(evidence) is not None or not evidence.float_operands:
        return None
    found = outside_domain(evidence)
    if found is None:
        return None
    position, value, low, high = found
    name = words.operator(evidence)
    span = domain_in_words(low, high, DOMAINS.get(evidence.op.short_name, (None, None, False))[2])
    proposals: list[Proposal] = list(stable.proposals(evidence))
    if low is not None or high is not None:
        least, most = inside_of(low, high, evidence.precision)
        if low == 0 and least is not None and (others := _least_beside_a_pole(evidence, position)) is not None:
            least = max(least, others)
        proposals.append(clamp_fix(evidence, position, least, most))
    if evidence.is_cured_by_float32:
        proposals += precision_fixes(evidence)
    filtering = left_out(evidence, NO_TERM) if _sums_up_zeros(evidence, position, value) else None
    if filtering is not None:
        proposals.append(filtering)
    return Finding(
        "domain-error",
        f"{name} {words.place(evidence)} was given {spelled_out(value, low, high)}, outside its domain{span}, and gives "
        f"{spelled(evidence.kind)} {_in_which_precision(evidence)}.",
        weight=50,
        evidence={"operand_value": value, "operand": evidence.operands[position].stats.as_dict()},
        proposals=tuple(proposals),
    )


def inside_of(low: float | None, high: float | None, dtype: torch.dtype | None) -> tuple[float | None, float | None]:
    """Limits just inside a domain: `dtype` (a low precision, or None) has numbers between each of them and the end.

    >>> inside_of(-1.0, 1.0, torch.bfloat16), inside_of(0.0, None, None)
    ((-0.99, 0.99), (1e-06, None))
    """
    edge = EDGE if dtype is None else 1e-3
    coarse = edge if dtype is None else max(edge, 10.0 ** math.ceil(math.log10(torch.finfo(dtype).eps)))
    least = None if low is None else low + (coarse if low else edge)
    return least, None if high is None else high - (coarse if high else edge)


def _in_which_precision(evidence: Evidence) -> str:
    if not evidence.is_cured_by_float32:
        return "in any precision"
    return "of it in any precision; in a step that computes in float32 it is given another number, and is finite"


def _least_beside_a_pole(evidence: Evidence, position: int) -> float | None:
    """Of a power that is infinite at 0, the power of ten below what it was given within its domain.

    Next to the pole a finite result is larger than all others by far. None of other functions, and without other values.
    """
    op = evidence.op
    exponent = evidence.scalars[0] if op.short_name == "pow" and evidence.scalars else 0.0
    values = evidence.operands[position].values
    inside = values[(values > 0) & values.isfinite()]
    if not (exponent < 0 or op.short_name == "rsqrt") or not inside.numel():
        return None
    return float(min(1.0, 10.0 ** math.floor(math.log10(float(inside.min())))))


def _sums_up_zeros(evidence: Evidence, position: int, value: float) -> bool:
    """Whether the 0 that was given is a sum in which every term is 0: a total probability, say."""
    made_by = lineage.maker(evidence.trace, evidence.op, position) if value == 0 else None
    call = evidence.capture(made_by.index) if made_by is not None and made_by.short_name in SUMS else None
    if call is None:
        return False
    terms = [a.abs() if isinstance(a, Tensor) else a for a in call.args]
    return bool((call.func(*terms, **call.kwargs) == 0).any())


def negative_variance(evidence: Evidence) -> tuple[int, float, float] | None:
    """(channel, running variance, eps) where a BatchNorm in evaluation takes the root of a number that is not above 0."""
    op = evidence.op
    if op.short_name not in EPS_POSITION or evidence.flat is None or not op.outputs or not evidence.float_operands:
        return None
    plain, shape, variances = op.plain, op.outputs[0].shape, evidence.operands[-1].values
    at = EPS_POSITION[op.short_name]
    is_training = at > TRAINING_POSITION + 1 and len(plain) > at and bool(plain[TRAINING_POSITION])
    if is_training or len(plain) <= at or len(shape) < 2 or variances.shape != shape[1:2] or not variances.numel():
        return None
    channel = evidence.flat // math.prod(shape[2:]) % shape[1]
    value, eps = float(variances[channel]), float(plain[at])
    return (channel, value, eps) if math.isfinite(value) and value + eps <= 0 else None


def of_variance(evidence: Evidence, channel: int, value: float, eps: float) -> Finding:
    """A running statistic that no batch can have made."""
    variances = evidence.operands[-1].values
    low = int((variances.double() + eps <= 0).sum())
    name = f"{evidence.op.module}.running_var" if evidence.op.module else "running_var"
    return Finding(
        "domain-error",
        f"The running variance {words.place(evidence)} is {words.number(value)} in channel {channel}, and evaluation takes the "
        f"root of it: {low} of {variances.numel()} channels are not above 0 with eps {eps:g}. No batch has a negative "
        f"variance: it came from a checkpoint, an average of weights, or a write of the script's.",
        weight=60,
        evidence={"name": name, "channel": channel, "operand_value": value, "eps": eps, "channels": low},
        proposals=(
            Proposal(
                "initialise-parameter",
                name,
                "clamp it (running_var.clamp_(min=0)), or call reset_running_stats() and run some batches in training mode",
                trial=lambda e: Variant(tensors=clamped_variances(e)),
            ),
            Proposal("load-weights", name, "load a checkpoint whose running variances are not negative"),
        ),
        phase="parameters",
    )


def clamped_variances(evidence: Evidence) -> dict[int | Ref, Tensor]:
    """Every running variance of the step with 0 in place of what is below, by identity."""
    clamped: dict[int | Ref, Tensor] = {}
    for root in evidence.events():
        for module in compat.all_modules(root.module) if isinstance(root, RootCall) else ():
            variance = getattr(module, "running_var", None)
            if isinstance(variance, Tensor) and bool((variance < 0).any()):
                clamped[id(variance)] = variance.detach().clamp(min=0)
    return clamped


def outside_domain(evidence: Evidence) -> tuple[int, float, float | None, float | None] | None:
    """(operand, its value at the bad element, lower end, upper end) where a finite operand has no finite image."""
    name = evidence.op.short_name
    if name == "pow" and not _has_fractional_exponent(evidence):
        return None
    position = 1 if name == "xlogy" and len(evidence.operands) > 1 else 0
    if position >= len(evidence.operands):
        return None
    value = evidence.operands[position].value
    if value is None or not math.isfinite(value):
        return None
    low, high, open_ends = DOMAINS.get(name, (None, None, False))
    if name in DOMAINS:
        below = low is not None and (value <= low if open_ends else value < low)
        above = high is not None and (value >= high if open_ends else value > high)
        return (position, value, low, high) if below or above else None
    wide = evidence.element(evidence.in_float64)
    if any(math.isinf(s) for s in evidence.scalars):
        return None
    if wide is not None and math.isnan(wide) and len(evidence.float_operands) == 1:
        return position, value, None, None
    return None


def _has_fractional_exponent(evidence: Evidence) -> bool:
    """A negative base is outside the domain of a fractional power only, whose result is then NaN."""
    if evidence.kind != "nan" or evidence.op.name == "aten.pow.Scalar":
        return evidence.kind == "nan"
    exponent = evidence.scalars[0] if evidence.scalars else evidence.operands[-1].value if evidence.operands else None
    return exponent is not None and math.isfinite(exponent) and exponent != int(exponent)


def domain_in_words(low: float | None, high: float | None, open_ends: bool) -> str:
    """Where a function has a value, in parentheses; "" where that is not known.

    >>> domain_in_words(0.0, None, True), domain_in_words(0.0, None, False), domain_in_words(-1.0, 1.0, True)
    (' (above 0)', ' (0 or more)', ' (between -1 and 1)')
    """
    if low is None:
        return ""
    if high is None:
        return f" (above {low:g})" if open_ends else f" ({low:g} or more)"
    return f" (between {low:g} and {high:g})" if open_ends else f" ({low:g} to {high:g})"


def spelled_out(value: float, low: float | None, high: float | None) -> str:
    """A number as a person would write it, with so many digits that it can be told from the ends of the domain.

    >>> spelled_out(1.0000001, -1.0, 1.0), spelled_out(0.0, 0.0, None), spelled_out(-1.24, 0.0, None)
    ('1.0000001', '0', '-1.24')
    """
    ends = [end for end in (low, high) if end is not None and end != value]
    text = words.number(value)
    return f"{value:.9g}" if any(float(text) == end for end in ends) else text
