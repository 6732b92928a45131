"""What a diagnosis says: the report, its incidents, and the words they are written in.

These are plain values (no torch): a report can be read on any machine. The JSON form is the schema
`ampguard.report/1`; docs/diagnosis.md describes it field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

SCHEMA = "ampguard.report/1"

WAS_SENT = "what another rank sent"
"""How the reason begins why a step is not run again whose failure began on another rank."""

Mode = Literal["train", "eval"]
Phase = Literal["data", "parameters", "forward", "loss", "backward", "optimizer", "protocol"]
Severity = Literal["info", "warning", "error"]

CAUSES: dict[str, str] = {
    "nonfinite-input": "the batch (inputs or targets) already holds NaN or Inf",
    "nonfinite-parameter": "a parameter or buffer was NaN or Inf before the step",
    "fp16-overflow": "a result is beyond the low precision's largest number (65504 for float16)",
    "fp16-underflow": "an operand or an epsilon was flushed to zero in low precision, and what divides by it is not finite",
    "mask-overflow": "a mask constant does not fit the low precision and became -Inf",
    "division-by-zero": "x/0 or 0/0, in any precision",
    "domain-error": "a function outside its domain: log of zero or less, sqrt of a negative, acos beyond 1",
    "overflow": "a result is beyond float32 too: exp, pow, a product",
    "empty-reduction": "a mean, a loss or a norm over no elements; a standard deviation over one",
    "masked-softmax": "a softmax or log-softmax row whose entries are all -Inf",
    "infeasible-target": "this sample's loss is infinite in any precision because its target cannot be produced",
    "indeterminate": "Inf - Inf or 0 * Inf, from an infinity that the code meant to have",
    "loss-scale-overflow": "gradients overflow only because of the loss scale; normal while the scaler settles",
    "gradient-overflow": "gradients overflow the low precision even without a loss scale",
    "singular-gradient": "the loss is finite and its derivative is not",
    "gradient-underflow": "a large share of gradients is flushed to zero; learning is silently lost",
    "divergence": "weights or activations grew step after step until they overflowed",
    "scale-collapse": "the loss scale fell and fell and nearly every step is skipped",
    "lost-update": "updates are below the spacing of the weights' own low precision",
    "optimizer-underflow": "gradients are finite and the optimizer's own arithmetic is not",
    "no-gradients": "an optimizer is stepped and none of its parameters has a gradient",
    "stale-parameters": "the tensors that an optimizer holds are not those that receive gradients",
    "unscaled-backward": "the scaler is asked to unscale or step and the loss was never scaled",
    "bypassed-scaler": "an optimizer is stepped directly on gradients that are still scaled",
    "clip-before-unscale": "gradients are clipped, or their norm is read, while still scaled",
    "double-unscale": "gradients are unscaled twice between updates",
    "missing-update": "the scaler's update is not called, or not once an iteration",
    "accumulation-broken": "within one accumulation window the scale changed, or gradients were unscaled too early",
    "fp16-parameters": "the scaler meets float16 gradients because the parameters themselves are float16",
    "scheduler-on-skipped-step": "a learning-rate scheduler moves on although the optimizer's step was skipped",
    "missing-zero-grad": "gradients of earlier iterations are never cleared and pile up",
    "autocast-cache": "a weight's cast was cached in an autocast region and reused where it no longer serves",
    "unused-parameters": "parameters that should train never receive a gradient",
    "scaler-not-saved": "a checkpoint carries the model and the optimizer and not the scaler",
    "needless-scaler": "gradient scaling with bfloat16 or float32, where it does nothing useful",
    "backend-fault": "finite in another backend, bad in this one: no user line is at fault",
    "quantizer-scale": "an FP8/FP4 scale is zero, stale, saturated or reduced over the wrong group",
    "unexplained": "a bad result whose step could not be run again and did not come back while operators were watched",
    "rank-divergence": "ranks disagree about found-inf, scale, weights or gradients",
}
"""Every cause code and what it means, in one line."""

ACTIONS: frozenset[str] = frozenset(
    [
        "force-fp32",
        "use-bf16",
        "disable-amp",
        "lower-loss-scale",
        "raise-loss-scale",
        "clamp",
        "add-epsilon",
        "stable-form",
        "mask-value",
        "guard-empty",
        "fix-mask",
        "fix-data",
        "filter-sample",
        "initialise-parameter",
        "lower-learning-rate",
        "clip-gradients",
        "call-order",
        "gate-scheduler",
        "rebuild-optimizer",
        "keep-grad-buffers",
        "fp32-parameters",
        "master-weights",
        "stochastic-rounding",
        "load-weights",
        "change-backend",
        "save-scaler-state",
        "remove-scaler",
        "wait",
    ]
)
"""Every fix action."""


class Location(msgspec.Struct, frozen=True):
    """A line of the user's code: the innermost frame that belongs neither to PyTorch nor to ampguard.

    `function` is the bare name; `qualname` has the class and the functions around it, where Python keeps that (3.11).
    """

    file: str
    line: int
    function: str
    code: str
    qualname: str = ""

    @property
    def full_name(self) -> str:
        """The function's name as far as it is known: `Attention.forward`."""
        return self.qualname or self.function


class Fix(msgspec.Struct, frozen=True):
    """One change that cures the failure.

    `verified` is True only if the failing step was replayed with it and came out finite, False if it was replayed and
    was still bad, None where a replay cannot show it.
    """

    action: str
    target: str | None
    how: str
    verified: bool | None = None
    outcome: str | None = None


class Incident(msgspec.Struct, frozen=True):
    """One failure: where it began, why, with which numbers, and what cures it."""

    step: int
    rank: int
    mode: Mode
    phase: Phase
    severity: Severity
    cause: str
    module: str | None
    op: str | None
    dtype: str | None
    location: Location | None
    explanation: str
    evidence: dict[str, Any] = {}
    fixes: tuple[Fix, ...] = ()
    occurrences: int = 1


class Environment(msgspec.Struct, frozen=True):
    """Where the run ran."""

    torch: str
    python: str
    device: str
    world_size: int


class Report(msgspec.Struct, frozen=True):
    """One run. The incidents are ordered by importance: the first answers "why did my run break?"."""

    status: Literal["clean", "incidents"]
    environment: Environment
    steps: int
    incidents: tuple[Incident, ...] = ()
    schema: str = SCHEMA
    run: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What the run was made to do otherwise than the script says (docs/overrides.md); absent where nothing was."""
    ranks: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """With several ranks: how many `reported`, and which did not (`missing`, at most 64 of them, and `missing_count`)."""
    off_since_step: int | msgspec.UnsetType = msgspec.UNSET
    """The step in which a fault of the guard's own has switched it off: nothing after that was watched. Absent else."""


def status_of(incidents: tuple[Incident, ...]) -> Literal["clean", "incidents"]:
    """`clean` when no incident is a warning or an error."""
    return "incidents" if any(i.severity != "info" for i in incidents) else "clean"


def importance(incident: Incident) -> tuple[int, int, bool]:
    """The order of a report. Of one step, what PyTorch has refused comes first: it is what ends a run."""
    was_refused = incident.phase == "protocol" and bool(incident.evidence.get("refused"))
    return ("error", "warning", "info").index(incident.severity), incident.step, not was_refused


def training_first(incidents: Sequence[Incident]) -> list[Incident]:
    """Of the same failure of one step in training and in evaluation (an agent's rollout), that of training first."""
    places: dict[object, list[int]] = {}
    for number, i in enumerate(incidents):
        places.setdefault((i.severity, i.step, i.cause, i.module, i.op, i.location), []).append(number)
    ordered = list(incidents)
    for numbers in places.values():
        same = sorted((incidents[number] for number in numbers), key=lambda i: i.mode == "eval")
        for number, incident in zip(numbers, same, strict=True):
            ordered[number] = incident
    return ordered


def to_json(report: Report) -> bytes:
    """The report as indented JSON, field by field as docs/diagnosis.md lists them."""
    try:
        encoded = msgspec.json.encode(report, enc_hook=str)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_in_unicode(msgspec.to_builtins(report, enc_hook=str)))
    return msgspec.json.format(encoded, indent=2)


def _in_unicode(value: Any) -> Any:
    """Without lone surrogates: Python puts them in for bytes of a file's name that the locale does not know."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except UnicodeEncodeError:
            return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_in_unicode(key): _in_unicode(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_unicode(inner) for inner in value]
    return value


def from_json(data: bytes) -> Report:
    """Read a report back. Raises `msgspec.ValidationError` naming the field that does not fit."""
    return msgspec.json.decode(data, type=Report)
