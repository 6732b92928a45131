"""Running a recorded step again."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat, numerics
from ampguard.capture.compiled.functions import CompiledFunction
from ampguard.capture.events.operands import held_by, held_in, refs_in
from ampguard.capture.glue.before_training import BeforeTraining
from ampguard.capture.raised import is_same_error, refused_values
from ampguard.capture.record import BackwardCall, BadResult, Event, GlueOp, Line, Ref, RootCall, root_around
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.root_calls.surroundings import casting_for, is_autocast_on, modes_of
from ampguard.capture.root_calls.trees import map_tensors
from ampguard.errors import ReplayError
from ampguard.replay import preconditions
from ampguard.replay.arguments import Values, fresh_copy_needed, low_to
from ampguard.replay.backward import Gradients, run_backward
from ampguard.replay.batch import name_in
from ampguard.replay.behind import events_behind, is_computed, updated_leaves
from ampguard.replay.casts import WeightCasts, autocast_in
from ampguard.replay.collecting import collecting_seldom
from ampguard.replay.forgiving import forgiving_hooks
from ampguard.replay.forward_mode import ChangedOperands, differentiated_in, tangents_in
from ampguard.replay.keeping import StateKeeper
from ampguard.replay.names import names_of_called, parameter_names
from ampguard.replay.operators import flat_tensors
from ampguard.replay.other_ranks import answered, check_what_was_sent
from ampguard.replay.outcome import Outcome
from ampguard.replay.roots import run_root, swap_state, traced_modules
from ampguard.replay.sandbox import ModuleSandbox, neutral_thread, quiet, set_streams
from ampguard.replay.sharded import after_sharded_calls
from ampguard.replay.thawed import thawed
from ampguard.replay.trace import Trace, identical
from ampguard.replay.tracer import ReplayMode, Unwatching, in_groups
from ampguard.replay.variants import AS_IT_RAN, CodePlace, RunKey, Variant
from ampguard.replay.written import GivenWrittenError, not_given

MOST_VIEWS = 8
"""Of views of views that are followed to what they show a part of."""


class Replayer:
    """Replays the events that lead to one bad result, as often as asked."""

    def __init__(
        self,
        bad: BadResult,
        recorder: FlightRecorder,
        as_it_is_now: bool = False,
        forgives_hooks: bool = False,
        given: Mapping[Ref, Tensor] | None = None,
        remakes_weights: bool = False,
    ) -> None:
        """`as_it_is_now`: replay although a given was changed since, with its present value.

        `forgives_hooks`: replay although hooks of the script refuse to run twice. `given`: results that are not made again.
        `remakes_weights`: those that the script's own update has made bad are made again, from gradients that are given.
        """
        self.bad = bad
        self._recorder = recorder
        self._tangents = tangents_in(bad.record, recorder.log.tangents)
        self._forgives_hooks = forgives_hooks
        self.is_exact = not as_it_is_now
        leaves = updated_leaves(bad.record, only_finite=remakes_weights) | dict(given or {})
        self.events, self._given = after_sharded_calls(events_behind(bad, leaves, self._tangents), recorder.log)
        self._given = leaves | self._given
        self.is_autocast_used = recorder.uses_autocast or is_autocast_on()
        """Whether the script has been within a region of autocast: calls outside modules do not say whether they were."""
        self._sandboxes = contextlib.ExitStack()
        self._casts = WeightCasts()
        self._ran_in: dict[int, torch.dtype] = {}
        """By event: the low precision that operators outside modules were given, which autocast may cast to."""
        self.keeps_graph = any(isinstance(event, BackwardCall) for event in self.events)
        self._wanting_from = self._begin_to_want()
        self._differentiates_within = False
        """Whether a module takes derivatives in its own forward pass: what that saves is needed then."""
        self.scale_factor = 1.0
        """By which the loss scale of every variant is multiplied (not that of the step as it ran)."""
        self.base = (
            Variant(tensors={id(parameter): value for parameter, value in bad.weights}) if bad.weights else AS_IT_RAN
        )
        """A change that every replay has."""
        self.names: dict[int, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self._hidden: dict[tuple[CodePlace, int], int] = {}
        self._written: set[int] = set()
        """What the record holds and the step writes to through views (a batch that is a slice of the data), by identity."""
        self._differentiated: dict[RunKey, RunKey] = {}
        """For operators that compute derivatives outside autograd: the one that each of them differentiates."""
        self._sought = [
            held.tensor
            for event in self.events
            if isinstance(event, GlueOp)
            for held in held_by(event)
            if held.copy is None and is_computed(held.tensor)
        ]
        roots = [event for event in self.events if isinstance(event, RootCall)]
        for event in roots:
            if isinstance(event.module, CompiledFunction):
                event.is_function = not compat.children_of(event.module)
        prefixes = {id(event.module): event.prefix for event in reversed(roots) if event.prefix}
        called = [event.module for event in roots if not event.is_function]
        called += [root for event in self.events if (root := root_around(event)) is not None]
        self.names |= names_of_called(called, prefixes)
        self.check()

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale of the scaler that the script uses, where it lies."""
        return compat.loss_scale(self._recorder.scaling.scaler) if self._recorder.scaling.scaler is not None else None

    @property
    def ends_steps_with_backward(self) -> bool:
        """Whether the loop has no optimizer: what it updates its weights by belongs to the step before."""
        return self._recorder.steps.counts_backwards

    def check(self) -> None:
        """Raise ReplayError where the step's givens are no longer what they were."""
        graph = self.bad.graph
        if graph is not None and not self.events:
            raise ReplayError("no pass like that of the graph was recorded before the capture")
        if graph is not None and graph.changes_weights:
            raise ReplayError(
                "an optimizer steps in the graph, and the weights are no longer those that its pass began with"
            )
        bad = self.bad
        known = {id(parameter) for parameter, _ in bad.weights}
        preconditions.check(
            self.events, self._recorder, self.keeps_graph, self.is_exact, bad.record.complete, bad.is_late, known
        )
        check_what_was_sent(self.events, self._recorder.collectives)

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """`id(parameter)` to the name that tells it apart from every other parameter of the step."""
        return parameter_names(self.events, self.names)

    def lowest_before(self, name: str, buffer: Tensor) -> float | None:
        """The lowest value that a buffer had while it was kept in float32; None where it never was."""
        return self._recorder.context.buffers.lowest_before(name, buffer.shape)

    @property
    def has_batch(self) -> bool:
        """Whether a DataLoader has given the step its batch."""
        return self._recorder.preprocessing.last_batch is not None

    @property
    def last_batch(self) -> Any:
        """What the DataLoader gave last, with weak references in the place of tensors; None where there is none."""
        return self._recorder.preprocessing.last_batch

    def brought(self) -> list[tuple[Tensor, str]]:
        """What other ranks have sent lately, and the name of the collective; the latest first."""
        return self._recorder.collectives.brought()

    def usual_loss(self) -> float | None:
        """The largest of the losses lately; None where there were too few."""
        return self._recorder.judge.usual_loss()

    def loaded_at(self, tensor: Tensor) -> Line | None:
        """Where `load_state_dict` gave a parameter or buffer the values that it holds."""
        return self._recorder.loaded.line_of(tensor)

    def loader_of(self, tensor: Tensor) -> Any:
        """The iterator of the DataLoader that gave the step this tensor; None where it is none of its batch."""
        loader = self._recorder.preprocessing.last_loader
        return loader() if loader is not None and self.is_of_batch(tensor) else None

    def is_of_batch(self, tensor: Tensor) -> bool:
        """Whether a DataLoader gave it, last or right before.

        Accelerate asks for the next batch ahead, and a loss that is thrown away is looked at when the next step begins.
        """
        given = self._recorder.preprocessing
        return any(name_in(batch, tensor) is not None for batch in (given.last_batch, given.batch_before))

    def name_in_batch(self, tensor: Tensor) -> str | None:
        """`batch[1]`, `batch['labels']`: where a tensor stood in the batch that the DataLoader gave last."""
        return name_in(self._recorder.preprocessing.last_batch, tensor)

    @property
    def before_training(self) -> BeforeTraining:
        """What the script has computed before its first step."""
        return self._recorder.before_training

    def beside(self, bad: BadResult) -> Replayer:
        """A replayer of another result of the same run."""
        return Replayer(bad, self._recorder)

    def run(self, variant: Variant = AS_IT_RAN, traced: bool = True) -> Outcome:
        """Replay once. Raises what the replay raises, except what PyTorch refuses to convert."""
        with thawed(self.bad.parameters):
            while True:
                try:
                    return self._run_or_differentiate(variant, traced)
                except GivenWrittenError as found:
                    self._written.add(id(found.given))

    def _run_or_differentiate(self, variant: Variant, traced: bool) -> Outcome:
        try:
            return self._run(variant, traced)
        except (RuntimeError, ReplayError):
            if self._saves_for_backward or variant.compiled is not None:
                raise
        self._differentiates_within = True  # perhaps
        return self._run(variant, traced)

    @property
    def _saves_for_backward(self) -> bool:
        return self.keeps_graph or self._differentiates_within

    def _run(self, variant: Variant, traced: bool) -> Outcome:
        started = time.perf_counter()
        if self.base is not AS_IT_RAN:
            variant = variant.with_base(self.base)
        trace = Trace()
        compiled = variant.compiled
        mode = (ReplayMode if compiled is None else Unwatching)(variant, trace if traced else None, self.names)
        mode.retains_graph = compiled is None or compiled.retains_graph
        mode.boundary = run_root.__code__
        mode.hidden = dict(self._hidden)
        mode.transformed.tangents = self._tangents
        mode.changed_operands = ChangedOperands(self._differentiated)
        if traced and variant is AS_IT_RAN:
            mode.sought = in_groups(self._sought)
        values = Values(mode, {**variant.tensors}, self.keeps_graph, written=self._written)
        for ref, given in self._given.items():
            copy = low_to(given, variant.convert).detach().clone()
            values.made[ref] = copy.requires_grad_(given.requires_grad)
        values.stand_ins |= {id(t): values.made[ref] for ref, t in self._given.items() if t.is_leaf and t.requires_grad}
        gradients = Gradients(self.bad.parameters)
        exact = self.is_exact and not self._recorder.gradients.hooks.are_lost_since(self.events[0].index)
        ran: list[tuple[Event, list[Tensor]]] = []
        error: BaseException | None = None
        with (
            neutral_thread(),
            quiet(),
            collecting_seldom(),
            compat.force_eager() if compiled is None else compiled.running(),
            variant.within() if variant.within is not None else contextlib.nullcontext(),
            contextlib.ExitStack() as self._sandboxes,
            forgiving_hooks(self.events) if self._forgives_hooks else contextlib.nullcontext(),
            self._graph(compiled is not None),
            self._paused(),
            self._weight_casts(),
            traced_modules(mode) if compiled is None else contextlib.nullcontext(),
            autocast_in(variant.convert),
            answered(self._recorder.collectives, mode, self._factor_of(variant)),
        ):
            self._keep_reach_of_hooks()
            for event in self.events:
                mode.event = event
                try:
                    outputs = self._run_event(event, values, variant, gradients)
                except Exception as refusal:
                    if self.bad.kind == "raised" and is_same_error(refusal, self.bad.error):
                        error = refusal
                        break
                    raise
                values.made |= {Ref(event.index, position): tensor for position, tensor in enumerate(outputs)}
                for ref in self._wanting_from.get(event.index, ()):
                    replaced = values.replaced.pop(ref, None)
                    tensor = values.made.get(ref) if replaced is None else replaced
                    if tensor is not None and not tensor.requires_grad:  # as the script did, after it was made
                        is_written = replaced is None and ref.event != event.index  # which is known of this very one
                        values.made[ref] = (tensor if is_written else tensor.detach()).requires_grad_()
                self._put_on_hooks(event, outputs)
                ran.append((event, outputs))
        mode.tangents.tell(trace)
        if traced and variant is AS_IT_RAN:
            self._differentiated = differentiated_in(trace, self.events)
        if (
            traced and variant is AS_IT_RAN
        ) or compiled is not None:  # only now: a result may have been written to later, as in the step itself
            exact = exact and all(self._is_same_as_before(event, outputs) for event, outputs in ran)
        exact = exact and self.bad.graph is None  # what ran in a graph left no results to compare
        exact = (
            exact and not values.is_approximate and not (self.keeps_graph and self._casts.differ(trace, self.events))
        )
        outcome = self._outcome(values, gradients, trace, exact, error, time.perf_counter() - started)
        outcome.captured = mode.captured()
        trace.forget_overwritten()
        self._hidden = mode.hidden
        outcome.stand_ins = mode.stand_ins
        outcome.own_casts = tuple(mode.own_casts.values())
        outcome.zero_shares = mode.zero_shares
        outcome.has_true_derivatives = mode.changed_nodes.are_known
        outcome.output_names = values.names
        return outcome

    def _begin_to_want(self) -> dict[int, list[Ref]]:
        """By event: what is differentiated with respect to and wants its gradient from there on, once nothing more is written to
        it in place (`x[mask] = 0; x.requires_grad_()`)."""
        found: dict[int, list[Ref]] = {}
        known: set[Ref] = set()
        for call in self.events:
            for ref in refs_in(call.args[2]) if isinstance(call, BackwardCall) else ():
                if ref not in known:
                    known.add(ref)
                    writes = [e.index for e in self.events if e.index < call.index and self._writes_to(e, ref)]
                    found.setdefault(max((ref.event, *writes)), []).append(ref)
        return found

    def _writes_to(self, event: Event, made: Ref) -> bool:
        """Whether an operator writes to the memory of what another event made, itself or a view of it."""
        tape = self._recorder.tape
        if not isinstance(event, GlueOp) or 0 not in tape.overwritten(event.func) or not event.args:
            return False
        target = event.args[0]
        for _ in range(MOST_VIEWS):
            if target == made or not isinstance(target, Ref):
                break
            by = self.bad.record.event(target.event)
            if not isinstance(by, GlueOp) or not by.args or not tape.shares_memory(by.func):
                break
            target = by.args[0]
        return bool(target == made)

    def _put_on_hooks(self, event: Event, outputs: list[Tensor]) -> None:
        """The script's hooks on what an event made, outside modules."""
        for output, hook in self._recorder.gradients.hooks.of(event.index) if self.keeps_graph else ():
            if output < len(outputs) and outputs[output].requires_grad:
                outputs[output].register_hook(hook)

    def _keep_reach_of_hooks(self) -> None:
        """Those hooks run once more: what they write to is put back after the replay."""
        keeper = StateKeeper()
        for event in self.events:
            for _, hook in self._recorder.gradients.hooks.of(event.index):
                keeper.keep(hook)
        self._sandboxes.callback(keeper.restore)

    def _run_event(self, event: Event, values: Values, variant: Variant, gradients: Gradients) -> list[Tensor]:
        if isinstance(event, RootCall):
            return run_root(event, values, variant, self._casts, self._sandboxes, self.keeps_graph, self._swap_state)
        if isinstance(event, BackwardCall):
            factor = self._factor_of(variant)
            with self._casts.of_backward(event.modes), modes_of(event.modes):
                return run_backward(event, values, gradients, factor, variant.differentiate, self.bad.loss_scale)
        return self._run_glue(event, values)

    def _factor_of(self, variant: Variant) -> float:
        """By how much a variant multiplies the loss scale of the step."""
        return variant.loss_scale_factor * (1.0 if variant is AS_IT_RAN else self.scale_factor)

    def _weight_casts(self) -> contextlib.AbstractContextManager[Any]:
        self._casts = WeightCasts()
        return self._casts.used()

    def _graph(self, is_compiled: bool) -> contextlib.AbstractContextManager[Any]:
        """Without gradients to compute, nothing need be saved for them. Compiled code has decided that already."""
        if self._saves_for_backward or is_compiled:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _never_unpacked)

    def _is_same_as_before(self, event: Event, outputs: list[Tensor]) -> bool:
        """Whether the replayed results are bitwise those of the step, as far as those are still there, unchanged."""
        if isinstance(event, BackwardCall):
            return True
        if len(event.outputs) != len(outputs):
            return False
        for position, (ref, new) in enumerate(zip(event.outputs, outputs, strict=True)):
            old = ref()
            is_known = old is not None and self._recorder.log.lookup(old) == Ref(event.index, position)
            if old is not None and is_known and not identical(old, new):
                return False
        return True

    def _outcome(
        self,
        values: Values,
        gradients: Gradients,
        trace: Trace,
        exact: bool,
        error: BaseException | None,
        seconds: float,
    ) -> Outcome:
        targets = gradients.results()
        if self.bad.is_of_gradients and not targets and not self.bad.targets:
            returned = {e.index for e in self.events if isinstance(e, BackwardCall) and not e.create_graph}
            targets = [("", tensor) for ref, tensor in values.made.items() if ref.event in returned]
        for position, target in enumerate(self.bad.targets):
            name = self.bad.names[position] if position < len(self.bad.names) else ""
            if isinstance(target, Ref):
                if target in values.made:
                    targets.append((name, values.made[target]))
            else:
                targets.append((name, values.stand_ins.get(id(target.tensor), target.tensor)))
        if error is not None:
            targets = [("", tensor) for tensor in refused_values(error)]
        bad = error is not None or any(not numerics.is_finite(t) for _, t in targets)
        loss = gradients.loss
        if (
            self.bad.kind in ("loss", "output")
            and not (self.bad.is_of_weights or self.bad.is_of_state)
            and targets
            and targets[0][1].numel() == 1
        ):
            loss = float(targets[0][1].detach())  # and not a loss inside of it that the step took the gradients of
        if loss is not None and math.isfinite(loss) and self.bad.loss_scale is not None:
            loss /= self.bad.loss_scale
        outcome = Outcome(bad, exact, trace, targets, loss, seconds, error)
        outcome.gradients = [(p, g) for p, (_, g) in zip(gradients.owners(), gradients.results(), strict=True)]
        return outcome

    def _swap_state(self, sandbox: ModuleSandbox, module: nn.Module, variant: Variant, values: Values) -> None:
        swap_state(sandbox, module, variant, values)

    def _run_glue(self, op: GlueOp, values: Values) -> list[Tensor]:
        mode = values.mode
        values.replaced.update(
            (identity, found) for identity, found in mode.found.items() if identity not in values.replaced
        )
        args = values.for_operator(op.args)
        kwargs = values.for_operator(op.kwargs)
        for held in held_in((op.args, op.kwargs)):
            mode.stand_ins.setdefault(compat.storage_key(held.value), (held.value, held.tensor))
            values.kept.add(id(held.value))
        overwritten = self._recorder.tape.overwritten(op.func)
        if overwritten:
            args = tuple(
                map_tensors(a, lambda t: t.clone()) if i in overwritten and fresh_copy_needed(op.args[i]) else a
                for i, a in enumerate(args)
            )
            args = tuple(
                not_given(a, mode.stand_ins, values.kept) if i in overwritten else a for i, a in enumerate(args)
            )
        if op.rng is not None:
            set_streams(op.rng)
        with torch.set_grad_enabled(op.grad and self.keeps_graph), casting_for(op.casts_for), mode:
            if op.may_be_cast:
                args = self._cast_again(op, args, mode)
            output = _computed(op, args, kwargs)
        if isinstance(output, Tensor):
            return [output]
        return [t for t in output if isinstance(t, Tensor)] if isinstance(output, (tuple, list)) else []

    def _cast_again(self, op: GlueOp, args: tuple[Any, ...], mode: ReplayMode) -> tuple[Any, ...]:
        """What autocast does to operands that were low when the step ran, and are float32 in a variant of it.

        There is no cast in the record then: a module that leaves autocast hands on float32 to an operator that has not left it.
        """
        if mode.is_as_it_ran:
            types = {t.dtype for t in flat_tensors(args, {}) if t.is_floating_point()}
            if len(types) == 1 and types <= numerics.LOW_PRECISION:
                self._ran_in[op.index] = types.pop()
        dtype = self._ran_in.get(op.index)
        if dtype is None or mode.computes_in_other(op):
            return args
        return tuple(map_tensors(a, lambda t: t.to(dtype) if t.dtype == torch.float32 else t) for a in args)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        paused, self._recorder.paused = self._recorder.paused, True
        try:
            yield
        finally:
            self._recorder.paused = paused


def _computed(op: GlueOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator returns, as the class of its tensors computes it; past one that knows only the function that the
    script called, and not the operators that it is made of."""
    try:
        with compat.asking_classes():
            return op.func(*args, **kwargs)
    except Exception:
        given = [tensor for tensor in flat_tensors(args, kwargs) if compat.is_asked(type(tensor))]
        if not given:
            raise
    return map_tensors(op.func(*args, **kwargs), lambda made: compat.in_class_of(made, given[0]))


def _never_unpacked(_: Any) -> Any:
    raise ReplayError("a forward pass looked at a tensor saved for backward")
