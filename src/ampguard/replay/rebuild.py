"""Running a recorded step again."""

from __future__ import annotations

import contextlib
import inspect
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampguard import compat, numerics
from ampguard.capture.record import (
    BadResult,
    GlueOp,
    Held,
    HeldGenerator,
    Ref,
    RootCall,
    StepRecord,
    held_in,
    leaves,
    map_tensors,
    refs_in,
    tensors_in,
)
from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import ChangedSinceError, ReplayError
from ampguard.replay.names import module_names
from ampguard.replay.sandbox import ModuleSandbox, modes_of, neutral_thread, quiet, set_streams
from ampguard.replay.trace import Trace, identical
from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import AS_IT_RAN, Captured, CodePlace, Variant


@dataclass(slots=True)
class Outcome:
    """What a replay came to.

    `is_bad`: the result that was bad is bad again. `is_exact`: every result that can still be compared is bitwise the
    one of the step itself. `loss` is the first target where it is a single number.
    """

    is_bad: bool
    is_exact: bool
    trace: Trace
    targets: list[tuple[str, Tensor]] = field(default_factory=list)
    loss: float | None = None
    seconds: float = 0.0
    error: BaseException | None = None
    captured: dict[int, Captured] = field(default_factory=dict)
    stand_ins: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Storage of a clone that the replay used, to (the clone, the script's own tensor)."""


class Replayer:
    """Replays the events that lead to one bad result, as often as asked."""

    def __init__(self, bad: BadResult, recorder: FlightRecorder, as_it_is_now: bool = False) -> None:
        """`as_it_is_now`: replay although a given was changed since, with its present value."""
        self.bad = bad
        self.is_exact = not as_it_is_now
        self.events = events_behind(bad)
        self.names: dict[int, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self._recorder = recorder
        self._hidden: dict[tuple[CodePlace, int], int] = {}
        self._sought = [
            held.tensor
            for event in self.events
            if isinstance(event, GlueOp)
            for held in held_in((event.args, event.kwargs))
            if held.copy is None and is_computed(held.tensor)
        ]
        for event in self.events:
            if isinstance(event, RootCall):
                names = module_names(event.module, event.prefix)
                self.names |= {k: v for k, v in names.items() if k not in self.names}
        self.check()

    def check(self) -> None:
        """Raise ReplayError where the step's givens are no longer what they were."""
        if not self.events:
            raise ReplayError("nothing that led to the bad result was recorded")
        for event in self.events:
            state = event.swapped_state if isinstance(event, RootCall) else {}
            for held in held_in((event.args, event.kwargs, state)):
                if self.is_exact and not held.is_intact:
                    raise ChangedSinceError("a tensor that the step started from was changed in place since")
            if isinstance(event, RootCall):
                self._check_parameters(event)
                if any(not is_replayable(value) for value in leaves((event.args, event.kwargs))):
                    raise ReplayError("an argument of the module is used up by the call (a generator or an open file)")

    def _check_parameters(self, root: RootCall) -> None:
        stepped = self._recorder.stepped_since(root.updates_before)
        if not stepped or not self.is_exact or root.swapped_state:
            return
        updated = {id(p) for o in stepped for group in o.param_groups for p in group["params"] if p.grad is not None}
        if any(id(p) in updated for p in root.module.parameters()):
            raise ChangedSinceError("an optimizer has changed the parameters since the module was called")

    def name_in_batch(self, tensor: Tensor) -> str | None:
        """`batch[1]`, `batch['labels']`: where a tensor stood in the batch that the DataLoader gave last."""
        stack: list[tuple[str, Any]] = [("batch", self._recorder.last_batch)]
        while stack:
            name, item = stack.pop()
            if isinstance(item, weakref.ref):
                live = item()
                if live is tensor or (live is not None and compat.storage_key(live) == compat.storage_key(tensor) != 0):
                    return name
            elif isinstance(item, dict):
                stack.extend((f"{name}[{key!r}]", value) for key, value in item.items())
            elif isinstance(item, (list, tuple)):
                stack.extend((f"{name}[{position}]", value) for position, value in enumerate(item))
        return None

    def run(self, variant: Variant = AS_IT_RAN, traced: bool = True) -> Outcome:
        """Replay once. Raises what the replay raises, except what PyTorch refuses to convert."""
        started = time.perf_counter()
        trace = Trace()
        mode = ReplayMode(variant, trace if traced else None, self.names)
        mode.boundary = Replayer._run_root.__code__
        mode.hidden = dict(self._hidden)
        if traced and variant is AS_IT_RAN:
            mode.sought = self._sought
        values: dict[Ref, Tensor] = {}
        stand_ins: dict[int, Tensor] = {}
        exact = self.is_exact
        ran: list[tuple[RootCall | GlueOp, list[Tensor]]] = []
        error: BaseException | None = None
        grad_dropped = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _never_unpacked)
        with (
            neutral_thread(),
            quiet(),
            compat.force_eager(),
            grad_dropped,
            self._paused(),
            traced_modules(mode),
            autocast_in(variant.convert),
        ):
            for event in self.events:
                mode.event = event
                try:
                    if isinstance(event, RootCall):
                        outputs = self._run_root(event, mode, values, variant, stand_ins)
                    else:
                        outputs = self._run_glue(event, mode, values, variant)
                except RuntimeError as refusal:
                    if self.bad.kind == "raised" and "without overflow" in str(refusal):
                        error = refusal
                        break
                    raise
                for position, tensor in enumerate(outputs):
                    values[Ref(event.index, position)] = tensor
                ran.append((event, outputs))
        if traced and variant is AS_IT_RAN:  # only now: a result may have been written to later, as in the step itself
            exact = exact and all(self._is_same_as_before(event, outputs) for event, outputs in ran)
        outcome = self._outcome(values, stand_ins, trace, exact, error, time.perf_counter() - started)
        outcome.captured = mode.captured
        self._hidden = mode.hidden
        outcome.stand_ins = mode.stand_ins
        return outcome

    def _is_same_as_before(self, event: RootCall | GlueOp, outputs: list[Tensor]) -> bool:
        """Whether the replayed results are bitwise those of the step, as far as those are still there, unchanged."""
        if len(event.outputs) != len(outputs):
            return False
        for position, (ref, new) in enumerate(zip(event.outputs, outputs, strict=True)):
            old = ref()
            if old is not None and self._recorder.log.lookup(old) == Ref(event.index, position) and not identical(old, new):
                return False
        return True

    def _outcome(
        self,
        values: dict[Ref, Tensor],
        stand_ins: dict[int, Tensor],
        trace: Trace,
        exact: bool,
        error: BaseException | None,
        seconds: float,
    ) -> Outcome:
        targets: list[tuple[str, Tensor]] = []
        for position, target in enumerate(self.bad.targets):
            name = self.bad.names[position] if position < len(self.bad.names) else ""
            if isinstance(target, Ref):
                if target in values:
                    targets.append((name, values[target]))
            else:
                targets.append((name, stand_ins.get(id(target.tensor), target.tensor)))
        bad = error is not None or any(not numerics.is_finite(t) for _, t in targets)
        loss = None
        if targets and targets[0][1].numel() == 1:
            loss = float(targets[0][1].detach())
        return Outcome(bad, exact, trace, targets, loss, seconds, error)

    def _run_root(
        self,
        root: RootCall,
        mode: ReplayMode,
        values: dict[Ref, Tensor],
        variant: Variant,
        stand_ins: dict[int, Tensor],
    ) -> list[Tensor]:
        module = root.module
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            module = compat.unwrapped(module)
        sandbox = ModuleSandbox(root, module)
        sandbox.enter()
        training = module.training
        try:
            self._swap_state(sandbox, module, variant)
            self._swap_called_state(sandbox, root, mode, values, variant)
            for saved in root.buffers:
                now = saved.owner.get(saved.name)
                if now is not None and now is not saved.tensor:
                    mode.stand_ins[compat.storage_key(now)] = (now, saved.tensor)
            args = substituted(root.args, values, variant.tensors, mode, grad=root.modes.grad)
            kwargs = substituted(root.kwargs, values, variant.tensors, mode, grad=root.modes.grad)
            if variant.convert is not None:
                args, kwargs = (map_tensors(tree, lambda t: low_to(t, variant.convert)) for tree in (args, kwargs))
            if training != root.training:
                module.train(root.training)
            set_streams(root.rng)
            with modes_of(root.modes), mode:
                output = module(*args, **kwargs)
            for identity, (owner, name) in sandbox.stand_ins.items():
                tensor = owner.get(name)
                if tensor is not None:
                    stand_ins[identity] = tensor
            return tensors_in(output)
        finally:
            if training != root.training:
                module.train(training)
            sandbox.leave()

    def _swap_called_state(
        self,
        sandbox: ModuleSandbox,
        root: RootCall,
        mode: ReplayMode,
        values: dict[Ref, Tensor],
        variant: Variant,
    ) -> None:
        """The parameters and buffers that `torch.func.functional_call` ran the module on."""
        state = substituted(root.swapped_state, values, variant.tensors, mode, grad=root.modes.grad)
        for path, value in state.items():
            owner_path, _, name = path.rpartition(".")
            owner = root.module.get_submodule(owner_path)
            value = low_to(value, variant.convert)
            if name in owner._parameters:
                sandbox.swap_parameter(owner, name, value)
            elif name in owner._buffers:
                sandbox.swap_buffer(owner, name, value)

    def _swap_state(self, sandbox: ModuleSandbox, module: nn.Module, variant: Variant) -> None:
        """Give the module the parameters and buffers that the variant asks for."""
        if variant.convert is None and not variant.tensors and not variant.force_fp32:
            return
        forced = {
            id(inner) for outer in module.modules() if id(outer) in variant.force_fp32 for inner in outer.modules()
        }
        for owner in module.modules():
            if isinstance(owner, torch.jit.ScriptModule):
                continue
            wide = torch.float32 if id(owner) in forced else variant.convert
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                value: Tensor = variant.tensors.get(id(parameter), parameter)
                value = low_to(value, wide)
                if value is not parameter:
                    sandbox.swap_parameter(
                        owner, name, nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
                    )
            for name, buffer in list(owner._buffers.items()):
                if buffer is None:
                    continue
                other = low_to(variant.tensors.get(id(buffer), buffer), wide)
                if other is not buffer:
                    sandbox.swap_buffer(owner, name, other)

    def _run_glue(self, op: GlueOp, mode: ReplayMode, values: dict[Ref, Tensor], variant: Variant) -> list[Tensor]:
        replacements: dict[int | Ref, Tensor] = {**dict(mode.found.items()), **variant.tensors}
        args = glue_arguments(op.args, values, replacements)
        kwargs = glue_arguments(op.kwargs, values, replacements)
        for held in held_in((op.args, op.kwargs)):
            mode.stand_ins.setdefault(compat.storage_key(held.value), (held.value, held.tensor))
        overwritten = self._recorder.tape.overwritten(op.func)
        if overwritten:
            args = tuple(
                map_tensors(a, lambda t: t.clone()) if i in overwritten and fresh_copy_needed(op.args[i]) else a
                for i, a in enumerate(args)
            )
        if op.rng is not None:
            set_streams(op.rng)
        with torch.no_grad(), mode:
            output = op.func(*args, **kwargs)
        if isinstance(output, Tensor):
            return [output]
        return [t for t in output if isinstance(t, Tensor)] if isinstance(output, (tuple, list)) else []

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        paused, self._recorder.paused = self._recorder.paused, True
        try:
            yield
        finally:
            self._recorder.paused = paused


def events_behind(bad: BadResult) -> list[RootCall | GlueOp]:
    """The events that the bad result was made from, in order, with every event that wrote in place to one of them."""
    record: StepRecord = bad.record
    wanted: set[int] = set()
    for target in bad.targets:
        if isinstance(target, Ref):
            wanted.add(target.event)
        else:
            wanted |= {
                event.index
                for event in record.events
                if isinstance(event, RootCall) and any(s.owner.get(s.name) is target.tensor for s in event.buffers)
            }
    by_index = {event.index: event for event in record.events}
    pending = sorted(wanted)
    while pending:
        event = by_index.get(pending.pop())
        if event is None:
            continue
        state = event.swapped_state if isinstance(event, RootCall) else {}
        if isinstance(event, GlueOp) and any(h.tensor.grad_fn is not None for h in held_in((event.args, event.kwargs))):
            pending += [e.index for e in record.events if isinstance(e, RootCall) and e.index < event.index]
            wanted |= set(pending)
        more = {ref.event for ref in refs_in((event.args, event.kwargs, state))} | set(
            record.writers.get(event.index, ())
        )
        pending += sorted(more - wanted)
        wanted |= more
    return [event for event in record.events if event.index in wanted]


def is_computed(tensor: Tensor) -> bool:
    """Whether a tensor that no recorded event made was computed somewhere (inside a module that did not return it)."""
    return tensor.is_floating_point() and (tensor.grad_fn is not None or not numerics.is_finite(tensor))


def is_replayable(value: Any) -> bool:
    """Whether an argument can be given to a second call: generators and open files are used up by the first."""
    return not (
        inspect.isgenerator(value) or (hasattr(value, "read") and hasattr(value, "seek")) or _is_iterator(value)
    )


def _is_iterator(value: Any) -> bool:
    return hasattr(value, "__next__") and hasattr(value, "__iter__") and not isinstance(value, (Tensor, nn.Module))


def substituted(
    tree: Any, values: dict[Ref, Tensor], tensors: dict[int | Ref, Tensor], mode: ReplayMode, grad: bool
) -> Any:
    """A root call's arguments: clones of earlier events' results as replayed (traced, so that the chain of values is
    not cut) and of what was held."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            if leaf in tensors:
                return tensors[leaf].clone()
            if leaf not in values:
                raise ReplayError("a tensor that the module was given was made by an operator that was not recorded")
            with torch.no_grad(), mode:
                return values[leaf].clone()
        if isinstance(leaf, Held):
            stand_in = tensors.get(id(leaf.tensor))
            source = leaf.value if stand_in is None else stand_in
            if isinstance(source, nn.Parameter):
                return source
            copy = source.detach().clone()
            mode.stand_ins[compat.storage_key(copy)] = (copy, leaf.tensor)
            return copy.requires_grad_() if grad and source.requires_grad and copy.is_floating_point() else copy
        return leaf

    return map_leaves(tree, value)


def glue_arguments(tree: Any, values: dict[Ref, Tensor], tensors: dict[int | Ref, Tensor]) -> Any:
    """A taped operator's arguments."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            if leaf not in values:
                raise ReplayError("an operand was made by an operator that was not recorded")
            return values[leaf].detach()
        if isinstance(leaf, Held):
            return tensors.get(id(leaf.tensor), leaf.value).detach()
        return leaf.restored() if isinstance(leaf, HeldGenerator) else leaf

    return map_leaves(tree, value)


def map_leaves(tree: Any, visit: Any) -> Any:
    """Like `map_tensors`, for trees whose tensors have been replaced by Ref and Held."""
    if isinstance(tree, (Ref, Held, HeldGenerator)):
        return visit(tree)
    if isinstance(tree, list):
        return [map_leaves(item, visit) for item in tree]
    if isinstance(tree, tuple):
        items = [map_leaves(item, visit) for item in tree]
        return tree._make(items) if hasattr(tree, "_make") else tuple(items)
    if type(tree) is dict:
        return {key: map_leaves(item, visit) for key, item in tree.items()}
    if isinstance(tree, dict):
        import copy

        clone = copy.copy(tree)
        for key in list(clone):
            item = map_leaves(dict.__getitem__(tree, key), visit)
            dict.__setitem__(clone, key, item)
            if isinstance(key, str) and key in getattr(clone, "__dict__", ()):
                clone.__dict__[key] = item
        return clone
    if hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        import copy

        clone = copy.copy(tree)
        for name in tree.__dataclass_fields__:
            if hasattr(tree, name):
                object.__setattr__(clone, name, map_leaves(getattr(tree, name), visit))
        return clone
    return tree


def fresh_copy_needed(argument: Any) -> bool:
    """An operand that the operator overwrites and that belongs to the script must not be the script's own."""
    return isinstance(argument, Held) or any(isinstance(leaf, Held) for leaf in leaves(argument))


def low_to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A low-precision tensor in `dtype`; any other as it is."""
    if dtype is None or not numerics.is_low_precision(tensor.dtype) or tensor.dtype == dtype:
        return tensor
    return tensor.detach().to(dtype)


@contextlib.contextmanager
def traced_modules(mode: ReplayMode) -> Iterator[None]:
    """Every module call of the replay goes through the mode, so that it knows where it is."""
    current = nn.Module.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return mode.call_module(current, self, args, kwargs)

    nn.Module.__call__ = __call__  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = current  # type: ignore[method-assign]


@contextlib.contextmanager
def autocast_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Let every autocast region cast to `dtype`, where that is a low precision (autocast refuses a mixture of two)."""
    if dtype is None or not numerics.is_low_precision(dtype):
        yield
        return
    original, wanted = torch.set_autocast_dtype, dtype

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        original(device_type, wanted if numerics.is_low_precision(dtype) else dtype)

    torch.set_autocast_dtype = set_autocast_dtype
    try:
        yield
    finally:
        torch.set_autocast_dtype = original


def _never_unpacked(_: Any) -> Any:
    raise ReplayError("a forward pass looked at a tensor saved for backward")
