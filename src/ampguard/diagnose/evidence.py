"""Evidence: the numbers from which a cause is decided.

It is gathered by replays: the operator at the chain's head with its operands, the same operator in float32 and float64
on those operands, and the same operator in the whole step computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ampguard import compat, numerics
from ampguard.capture.events.operands import held_in, refs_in
from ampguard.capture.record import BadResult, Event, GlueOp, Held, Line, Ref
from ampguard.diagnose.attempts import attempt
from ampguard.diagnose.givens.named_arguments import named_leaves
from ampguard.diagnose.locate.chain import Chain, Given, Link
from ampguard.diagnose.locate.contributions import contributing
from ampguard.errors import ReplayError
from ampguard.incident import Fix
from ampguard.numerics import KIND_NAMES, NAN, TensorStats, stats
from ampguard.replay.operators import facts_of
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.trace import Trace, TracedOp
from ampguard.replay.variants import Captured, CodePlace, Variant, converted


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor operand of the operator that is accused, and what of it went into the bad element."""

    values: Tensor
    contributing: Tensor
    stats: TensorStats

    @property
    def value(self) -> float | None:
        """The single number that went in, for operators that work element by element."""
        if self.contributing.numel() != 1:
            return None
        number = self.contributing[0]
        return float(number.abs()) if number.is_complex() else float(number)


LITTLE = 1e-2
"""In the place of a factor of 0."""


def _is_single_zero(value: Any) -> bool:
    """Whether a factor is the number 0, also as a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point() and bool((value == 0).all())
    return isinstance(value, (int, float)) and value == 0


class Evidence:
    """What is known about the operator where the failure begins. Costly facts are computed when first asked for."""

    phase = "forward"
    called: str | None = None
    """What made the bad value, in words, where that is not the operator."""

    def __init__(self, bad: BadResult, chain: Chain, outcome: Outcome, replayer: Replayer | None) -> None:
        self.bad = bad
        self.chain = chain
        self.outcome = outcome
        self.replayer = replayer
        self.trace: Trace = outcome.trace
        converted_at = chain.conversion() if chain.intended else None
        self.link: Link = converted_at or chain.head
        self.given: Given | None = chain.given
        self.intended = chain.intended
        self.converts = converted_at is not None
        self.half_cured: list[tuple[Variant, str]] = []
        """Changes that leave a finite loss and gradients that are not, and how they are written."""
        self.still_bad: list[tuple[Variant, Fix]] = []
        """Changes that were not enough, and the fixes that they are."""
        self.changing: list[Fix] = []
        """Fixes that work and make another loss of one that was finite."""
        self.losses_with: dict[str, float] = {}
        """The loss of the failing step with each fix that was seen to work, by its action."""
        self.results_with: dict[str, float] = {}
        """The largest |value| of what a call in evaluation returns with a fix, by its action."""
        self.all_in_float32 = Variant(convert=torch.float32)
        """Everything that ran in low precision computed in float32."""
        self.seen_in_float32: Outcome | None = None
        """What that came to, once it has been replayed."""
        self.own_casts: tuple[Line, ...] = ()
        """Lines of modules that are to leave autocast which cast to low precision by themselves, and have to lose that too."""
        self.mended: set[CodePlace] = set()
        """Other places of the step that fail, and that a fix which was seen to work mends as well."""
        self.is_of_nothing = False
        """Whether another place of the step has shown that there is nothing in it to be counted: 0 of 0 was divided there."""
        self.finite_gradients: dict[Variant, bool | None] = {}
        """With which changes all gradients of the loss are finite, as far as that was asked."""

    # --- where --------------------------------------------------------------------------------------------------------

    @property
    def op(self) -> TracedOp:
        return self.link.op

    @property
    def remark(self) -> str:
        """More to be said of what made the bad value."""
        return ""

    @property
    def kind(self) -> str:
        """What the bad element is: "nan", "+inf" or "-inf"."""
        return KIND_NAMES[self.link.kind]

    @property
    def result_dtype(self) -> torch.dtype:
        return self.op.outputs[self.link.result].dtype

    @property
    def precision(self) -> torch.dtype | None:
        """The low precision that the operator works in (its result's or an operand's type), or None."""
        types = [self.result_dtype, *(t.dtype for t in self.op.inputs if t.dtype.is_floating_point and t.shape)]
        return next((t for t in types if numerics.is_low_precision(t)), None)

    @cached_property
    def low_precision_in_use(self) -> torch.dtype | None:
        """The low precision of the step: the operator's own, or the first that any operator of the step worked in."""
        if self.precision is not None:
            return self.precision
        results = (out.dtype for op in self.trace.ops for out in op.outputs)
        return next((dtype for dtype in results if numerics.is_low_precision(dtype)), None)

    @property
    def ran_in_low_precision(self) -> bool:
        return self.low_precision_in_use is not None

    @property
    def is_in_module(self) -> bool:
        return self.op.root is not None

    # --- the operator's numbers ---------------------------------------------------------------------------------------

    @cached_property
    def call(self) -> Captured | None:
        """The accused operator's operands, as they were."""
        if self.op.args is not None:
            return Captured(self.op.func, self.op.args, self.op.kwargs or {}, None)
        return self.capture(self.op.index)

    def capture(self, index: int) -> Captured | None:
        """Operands and result of any operator of the step as it ran. One replay."""
        if self.replayer is None:
            return None
        outcome = self.replayer.run(Variant(capture=frozenset({index})), traced=False)
        return outcome.captured.get(index)

    @cached_property
    def flat(self) -> int | None:
        """Flat position of the element that is followed."""
        if self.link.flat is not None:
            return self.link.flat
        bad = self.op.outputs[self.link.result].bad
        if bad is None:
            return None
        hits = (bad.kinds == self.link.kind).nonzero()
        return int(bad.flat[hits[0, 0]]) if hits.numel() else int(bad.flat[0])

    @cached_property
    def operands(self) -> list[Operand]:
        """The operator's tensor operands, with the part of each that went into the bad element."""
        if self.call is None:
            return []
        found = []
        for position, tensor in enumerate(self.call.tensors):
            values = tensor.detach()
            values = (values if compat.is_dense(values) else compat.stored_values(values)).reshape(-1)
            test = contributing(self.op, position, self.link.result, self.flat)
            if test is not None:
                everywhere = torch.arange(values.numel(), device=values.device)
                part = values[test(everywhere)]
            else:
                part = values
            found.append(Operand(tensor.detach(), part, stats(tensor)))
        return found

    @property
    def float_operands(self) -> list[Operand]:
        return [o for o in self.operands if o.values.is_floating_point()]

    @property
    def scalars(self) -> list[float]:
        return self.op.scalars

    def recomputed(self, dtype: torch.dtype) -> Tensor | None:
        """The operator's result on the same operands, computed in `dtype`."""
        if self.call is None:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(self.call.func, "tags", ()):
            return None
        args, kwargs = converted(self.call.func, self.call.args, self.call.kwargs, dtype)
        args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        try:
            with torch.no_grad():
                output = self.call.func(*args, **kwargs)
        except RuntimeError:
            return None
        result = result_of(output, self.link.result, written(self.call.func, args))
        return result if isinstance(result, Tensor) else None

    @cached_property
    def in_float32(self) -> Tensor | None:
        """The operator's result on the same operands in float32."""
        return self.recomputed(torch.float32)

    @cached_property
    def in_float64(self) -> Tensor | None:
        """The operator's result on the same operands in float64."""
        return self.recomputed(torch.float64)

    def element(self, result: Tensor | None) -> float | None:
        """The followed element in another computation of the result."""
        if result is None or self.flat is None or self.flat >= result.numel():
            return None
        number = result.reshape(-1)[self.flat]
        return float(number.abs()) if number.is_complex() else float(number)

    @property
    def is_finite_in_float32(self) -> bool:
        """Whether the same operator on the same operands is finite in float32, at the followed element."""
        value = self.element(self.in_float32)
        return value is not None and math.isfinite(value)

    @property
    def largest_in_float32(self) -> float | None:
        """Largest finite magnitude that the operator gives in float32 where it is bad as it ran."""
        bad = self.op.outputs[self.link.result].bad
        result = self.in_float32
        if bad is None or result is None:
            return None
        flat = bad.flat[bad.flat < result.numel()].to(result.device)
        values = result.reshape(-1)[flat]
        values = values[torch.isfinite(values)].abs()
        return float(values.max()) if values.numel() else None

    # --- the loss scale -----------------------------------------------------------------------------------------------

    @cached_property
    def loss_scale_given(self) -> tuple[int | Ref, Tensor] | None:
        """GradScaler's scale among what the step was made from, by which it is replaced in a replay, and its value."""
        scale = self.replayer.loss_scale if self.replayer is not None else None
        for event in self.events() if scale is not None else ():
            if not isinstance(event, GlueOp):
                continue
            for held in held_in(event.args):
                if held.tensor is scale:
                    return id(scale), held.value
            for ref in refs_in(event.args):  # the scaler's first use makes it
                if scale is not None and self.made(ref) is scale:
                    return ref, scale
        return None

    def with_loss_scale(self, scale: float) -> Variant:
        """The step with another loss scale, where the loss itself is what is not finite."""
        if self.loss_scale_given is None:
            return Variant()
        key, value = self.loss_scale_given
        return Variant(tensors={key: torch.full_like(value, scale)})

    @cached_property
    def is_finite_beside_zero(self) -> bool:
        """Whether an infinity became NaN only because it was multiplied by a single 0: by a small number in its place the
        step is finite, so something behind it consumes infinities (a softmax, an exponential)."""
        call = (
            self.call if self.op.short_name == "mul" and self.link.kind == NAN and self.replayer is not None else None
        )
        if call is None or not any(map(_is_single_zero, call.args)):
            return False

        def by_little(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return func(*(a + LITTLE if _is_single_zero(a) else a for a in args), **kwargs)

        assert self.replayer is not None
        return not attempt(self.bad, self.replayer, Variant(at_places={self.op.place: by_little})).is_bad

    @cached_property
    def usual_loss(self) -> float | None:
        """The largest of the losses before, as far as that is known."""
        return self.replayer.usual_loss() if self.replayer is not None else None

    # --- the step in float32 ------------------------------------------------------------------------------------------

    @cached_property
    def step_in_float32(self) -> Outcome | None:
        """The whole step with everything that ran in low precision computed in float32."""
        if self.replayer is None:
            return None
        try:
            self.seen_in_float32 = attempt(self.bad, self.replayer, self.all_in_float32, is_traced=True)
        except ReplayError:
            raise
        except Exception:  # refused by PyTorch, or by the script's own code (`assert x.dtype == torch.float16`)
            return None
        return self.seen_in_float32

    @cached_property
    def call_in_float32_step(self) -> Captured | None:
        """The accused operator's operands and result in the float32 step."""
        outcome = self.step_in_float32
        if outcome is None or self.replayer is None or not self.op.key:
            return None
        twin = outcome.trace.aligned(self.op)
        if twin is None:
            return None
        again = self.replayer.run(Variant(convert=torch.float32, capture=frozenset({twin.index})), traced=False)
        return again.captured.get(twin.index)

    @property
    def is_finite_in_float32_step(self) -> bool:
        """Whether the accused operator's element is finite in the float32 step, and not only it of those that end the step."""
        call = self.call_in_float32_step
        if call is None:
            return False
        output = call.output
        result = result_of(output, self.link.result)
        value = self.element(result) if isinstance(result, Tensor) else None
        return value is not None and math.isfinite(value) and not self._fails_beside_it(result)

    def _fails_beside_it(self, result: Tensor) -> bool:
        """Whether the step fails in float32 as well, by other elements of this very result."""
        bad = self.op.outputs[self.link.result].bad
        if bad is None or self.step_in_float32 is None or not self.step_in_float32.is_bad:
            return False
        others = bad.flat[(bad.kinds == self.link.kind) & (bad.flat < result.numel())]
        return not bool(result.detach().reshape(-1)[others.to(result.device)].isfinite().all())

    @property
    def is_cured_by_float32(self) -> bool:
        """Whether low precision had a part in it: the element is finite once the step is computed in float32."""
        return self.ran_in_low_precision and self.is_finite_in_float32_step

    # --- givens -------------------------------------------------------------------------------------------------------

    @property
    def given_tensor(self) -> Tensor | None:
        """The script's own tensor (or what a replay read in its place) at which the chain ends."""
        if self.given is None:
            return None
        stand_in = self.outcome.stand_ins.get(self.given.tensor.storage)
        if stand_in is not None:
            return stand_in[1]
        live = self.given.tensor.live() if self.given.tensor.live is not None else None
        if live is not None:
            return live
        call = self.capture(self.given.reader.index)
        return call.tensors[self.given.operand] if call is not None else None

    @cached_property
    def given_by_script(self) -> list[Tensor]:
        """The script's own tensors at which the chain may end: `given_tensor`; what a copy of it stands for, where the operator
        that reads it also writes to it; or any that is bad, where that is a number that the step has computed from it."""
        given = self.given_tensor
        if given is None or self.given is None:
            return []
        held = self.held()
        if any(h.tensor is given for _, _, h in held):
            return [given]
        reader = self.given.reader.event
        alike = [h.tensor for event, _, h in held if event.index == reader and h.copy is not None]
        alike = [t for t in alike if (t.shape, t.dtype) == (given.shape, given.dtype) and not numerics.is_finite(t)]
        computed = [h.tensor for _, _, h in held if given.numel() == 1 and not numerics.is_finite(h.value.detach())]
        return [given, *alike[:1], *computed]

    @cached_property
    def given_values(self) -> Tensor | None:
        """The values of `given_tensor` when the step read it: the script may have overwritten its own tensor since."""
        given = self.given_tensor
        copies = [held.value for _, _, held in self.held() if held.tensor is given]
        bad = (copy for copy in copies if not numerics.is_finite(copy))  # one buffer may have held several batches
        values = next(bad, copies[0] if copies else given)
        return values.detach() if values is not None else None

    def events(self) -> list[Event]:
        return list(self.replayer.events) if self.replayer is not None else list(self.bad.record.events)

    def made(self, ref: Ref) -> Tensor | None:
        """What a recorded event returned, where it is still there."""
        event = next((e for e in self.events() if e.index == ref.event), None)
        return event.outputs[ref.output]() if event is not None and ref.output < len(event.outputs) else None

    def held(self) -> list[tuple[Event, str, Held]]:
        """Every tensor that the step was given, by the argument that holds it."""
        found: list[tuple[Event, str, Held]] = []
        for event in self.events():
            for name, value in named_leaves(event):
                if isinstance(value, Held):
                    found.append((event, name, value))
        return found

    def numbers(self) -> dict[str, Any]:
        """Statistics of the operator for the report."""
        facts: dict[str, Any] = {"kind": self.kind}
        if self.operands:
            facts["operands"] = [o.stats.as_dict() for o in self.operands[:4]]
        if self.in_float32 is not None:
            facts["result_fp32"] = stats(self.in_float32).as_dict()
        if self.link.kind == NAN and self.flat is not None:
            facts["element"] = self.flat
        return facts


def result_of(output: Any, position: int, hidden: Sequence[Tensor] = ()) -> Any:
    """One of an operator's results, behind which stands what it wrote without returning it, where that is at hand."""
    results = (*(output if isinstance(output, (tuple, list)) else (output,)), *hidden)
    return results[position] if position < len(results) else None


def written(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """What an operator that has run wrote to its operands without its schema saying so: BatchNorm's running statistics."""
    return [args[i] for i in facts_of(func).hidden_writes if i < len(args) and isinstance(args[i], Tensor)]
