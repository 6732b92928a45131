"""The glue of short steps, kept call by call: what taping costs is told by the number of operators, and a call has many.

A function mode sees what the script calls (`F.cross_entropy`) where a dispatch mode sees each operator that the call is
made of, at several times the cost. Functions that have been seen to do nothing but compute are kept as a single
`TapedCall`, whose operators are found out when they are asked for (see `told`). Every other call, and each function's
first few, run under the operator tape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodWrapperType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.events.log import EventLog
from ampguard.capture.frames import user_line
from ampguard.capture.glue.originals import MetFunctions
from ampguard.capture.record import GlueOp
from ampguard.capture.root_calls.trees import PLAIN_TYPES
from ampguard.compat import function_modes_on, in_functorch, plain_version, pop_function_mode, push_function_mode

LESSONS = 3
"""Calls of a function that must have done nothing but compute before it is kept as one call."""

MAX_KEPT = 1 << 18
"""Elements of an operand beyond which a call's operators are taped: a kept call holds on to its operands."""

PLAIN_KINDS = frozenset({Tensor, nn.Parameter})
NESTED = frozenset({tuple, list})
PARTS_OF_INDICES = PLAIN_TYPES | {slice, type(Ellipsis)}
"""What nested operands may hold that is no tensor: `x[..., 1:]`, a shape."""

READS = (Tensor.item, Tensor.__float__)
"""By which a script gets a number out of a tensor."""

ASKS: Any = Tensor.__bool__
"""By which it gets a yes or no."""

GIVES_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
"""What `p.data = values` calls."""

DRAWING = ("dropout", "rand", "normal", "bernoulli", "multinomial", "poisson", "rrelu", "gumbel", "attention")
"""In the names of functions that draw random numbers in some calls and not in others."""


Handler: TypeAlias = Callable[..., Any]
"""`torch.overrides.handle_torch_function`."""


class Operators(Protocol):
    """The operator tape, as far as the calls' tape knows it."""

    left: int
    """How many more may be taped."""
    reads: int
    """Numbers that the script has read from tensors."""

    is_of_calls: bool
    """Whether calls are kept, not operators."""

    @property
    def is_passing(self) -> bool: ...
    @property
    def may_keep_writes(self) -> bool: ...
    @property
    def is_between_steps(self) -> bool: ...
    @property
    def barrier(self) -> FaultBarrier: ...
    @property
    def log(self) -> EventLog: ...
    def keep_copy(self, target: Tensor, values: Tensor, frame: Any) -> GlueOp | None: ...
    def has_read(self, tensor: Tensor, value: Any) -> None: ...
    def tape_one(self) -> bool: ...
    def untape_one(self) -> None: ...
    def exhausted(self) -> None: ...


class CallTape(compat.FunctionMode):
    """Keeps the calls that the script makes outside modules while it is on the stack."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators
        self._log, self._barrier = operators.log, operators.barrier
        self.met = MetFunctions()
        self._plain: set[Any] = set()
        """Functions that are kept as one call."""
        self._writing: set[Any] = set()
        """The same of those that write to their first operand, and do nothing else."""
        self.is_alone = True
        """Whether no other function mode was on when this one was put on the stack."""
        self._silent: set[Any] = set()
        """Functions that ran no operator when they were called: they were asked for a shape, or had nothing to convert."""
        self._mixed: set[Any] = set()
        """Those of them that had something to convert in another call."""
        self._lessons: dict[Any, int] = {}
        """How often each other function was seen to do nothing but compute; below 0: never to be kept so."""

    # --- calls --------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operators = self._operators
        if func in self._plain and not operators.is_passing and not in_functorch():
            return self.call(func, args, kwargs, sys._getframe(1))
        if func in self._writing and not operators.is_passing and not in_functorch():
            return self.write(func, args, kwargs or {}, sys._getframe(1))
        if func not in self.met.known:
            func = self.met.meet(func, sys._getframe(1))
        if operators.is_passing:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in READS or func is ASKS:
            return self._read(func, types, args, kwargs)
        if func in self._silent:
            output = func(*args, **kwargs) if kwargs else func(*args)
            if type(func) is MethodWrapperType or _is_nothing_new(output, args):
                return output
            self._silent.discard(func)  # `contiguous` of what is not
            self._mixed.add(func)
            self._lessons[func] = 0
        if func == GIVES_DATA:
            return self._give_data(func, args[0], args[1], sys._getframe(1))
        return self._tape(func, types, args, kwargs or {})

    def scripted(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of what `torch.jit.script` has made, which no function mode is asked about; `run` makes it."""
        if self._operators.is_passing or in_functorch() or not self.step_aside(function_modes_on()):
            return run(func, *args, **kwargs)
        try:
            if func not in self._lessons:
                self._lessons[func] = -1
                if self._barrier.call(compat.only_computes, func):
                    self._plain.add(func)
            if func in self._plain:
                return self.call(func, args, kwargs, sys._getframe(2))
            return self._tape(func, (), args, kwargs)
        finally:
            self.come_back()

    def dispatcher(self, original: Handler) -> Handler:
        """What to put in place of `torch.overrides.handle_torch_function`: the same, the quick way, where only we are asked."""

        def handle_torch_function(public_api: Any, relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
            operators = self._operators
            if (
                function_modes_on() != 1
                or not operators.is_of_calls
                or public_api not in self._plain
                or not self.is_alone
            ):
                return original(public_api, relevant_args, *args, **kwargs)
            for value in relevant_args:
                if value is not None and type(value) not in PLAIN_KINDS:
                    return original(public_api, relevant_args, *args, **kwargs)
            if operators.is_passing or in_functorch():
                return original(public_api, relevant_args, *args, **kwargs)
            pop_function_mode()
            try:
                return self.call(public_api, args, kwargs, sys._getframe(2))
            finally:
                push_function_mode(self)

        return handle_torch_function

    def call(self, func: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        """A call of a function that only computes, while this mode is not on the stack."""
        if kwargs and (("out" in kwargs and kwargs["out"] is not None) or (kwargs.get("inplace"))):
            return self._tape(func, (), args, kwargs)
        versions: list[int] = []
        is_nested = False
        try:
            for value in args:
                kind = type(value)
                if kind in PLAIN_KINDS:
                    if value.numel() > MAX_KEPT:
                        return self._tape(func, (), args, kwargs or {})
                    versions.append(plain_version(value))
                elif isinstance(value, Tensor):
                    return self._tape(func, (), args, kwargs or {})
                else:
                    versions.append(-1)
                    is_nested = is_nested or (kind in NESTED and not PARTS_OF_INDICES.issuperset(map(type, value)))
            output = func(*args, **kwargs) if kwargs else func(*args)
        except Exception:
            return self._tape(func, (), args, kwargs or {})  # raises again, and tells at which operator
        kind = type(output)
        if kind is Tensor:
            for value, version in zip(args, versions, strict=True):
                if value is output:
                    if plain_version(output) != version:
                        self._has_written(func)
                    return output  # else there was nothing to do
        elif kind not in NESTED and not isinstance(output, tuple):
            return output
        self.keep(func, args, kwargs or {}, output, versions, frame)
        if is_nested or kind is not Tensor:
            self._barrier.call(self._log.settle)
        return output

    def _read(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A number is read, or a yes or no: that is no operator to be run again, and only what is bad is looked into."""
        tensor = args[0]
        if type(tensor) not in PLAIN_KINDS or in_functorch() or (func is ASKS and tensor.dtype is not torch.bool):
            return self._tape(func, types, args, kwargs or {})
        self._operators.reads += 1
        value = func(tensor)
        if not (type(value) is float and value - value == 0.0):
            self._barrier.call(self._operators.has_read, tensor, value)
        return value

    def write(self, func: Any, args: Any, kwargs: Any, frame: Any) -> Any:
        """A call of a function that only writes to its first operand, while this mode is not on the stack."""
        operators = self._operators
        written = args[0]
        if not operators.may_keep_writes or not _are_plain_operands((*args, *kwargs.values())):
            return self._tape(func, (), args, kwargs)
        versions = [plain_version(value) if isinstance(value, Tensor) else -1 for value in args]
        before = self._barrier.call(self._log.value_before, written)
        try:
            output = func(*args, **kwargs)
        except Exception:
            return self._tape(func, (), args, kwargs)  # raises again, and tells at which operator
        if output is not written or plain_version(written) != versions[0] + 1:
            self._writing.discard(func)
            self._has_written(func)
            return output
        barrier = self._barrier
        if barrier.tripped:
            return output
        try:
            line, notes = user_line(frame), operators.is_between_steps
            self._log.keep_write(func, args, kwargs, versions, before, line, notes)
            operators.left -= 1
            if operators.left == 0:
                operators.exhausted()
        except Exception as fault:
            barrier.trip(fault)
        return output

    def keep(self, func: Any, args: Any, kwargs: Any, output: Any, versions: list[int], frame: Any) -> None:
        """Keep a call that has returned; called while this mode is not on the stack."""
        operators = self._operators
        barrier = self._barrier
        if barrier.tripped:
            return
        try:
            self._log.keep_call(func, args, kwargs, output, versions, user_line(frame))
            operators.left -= 1
            if operators.left == 0:
                operators.exhausted()
        except Exception as fault:
            barrier.trip(fault)

    def _give_data(self, func: Any, parameter: Any, values: Any, frame: Any) -> None:
        """`p.data = values`, which runs no operator: kept as `p.copy_(values)`, where that is what it comes to."""
        is_copy = _are_alike(parameter, values) and self._operators.is_between_steps
        op = self._barrier.call(self._operators.keep_copy, parameter, values, frame) if is_copy else None
        func(parameter, values)
        if op is not None:
            self._barrier.call(self._log.add_results, op, parameter, True)

    def _has_written(self, func: Any) -> None:
        """A function that only computed so far was told to write (`relu(x, True)`), which only the tape could have followed."""
        self._plain.discard(func)
        self._lessons[func] = -1
        self._barrier.call(self._log.is_incomplete)

    def _tape(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A call of which nothing is known yet, or that does more than compute."""
        if not all(issubclass(kind, Tensor) for kind in types) or not self._operators.tape_one():
            return func(*args, **kwargs)
        operators = self._operators
        began, reads = self._log.next_index, operators.reads
        try:
            output = func(*args, **kwargs)
        finally:
            operators.untape_one()
        if self._lessons.get(func, 0) >= 0 and not in_functorch():  # under `vmap` tensors are not what they seem
            self._barrier.call(self._learn, func, args, kwargs, output, began, operators.reads > reads)
        return output

    def _learn(self, func: Any, args: Any, kwargs: Any, output: Any, began: int, has_read: bool) -> None:
        log = self._log
        if log.is_full:
            return  # what it did was not recorded
        has_run_nothing = log.next_index == began and not has_read
        if has_run_nothing and (type(func) is MethodWrapperType or _is_nothing_new(output, args)):
            if func not in self._mixed:
                self._silent.add(func)  # also `grad`, whose tensor was there before
            return
        if isinstance(output, Tensor):
            log.producers.correct(output, began)
        is_small_enough = is_small(args) and is_small(kwargs)
        if is_small_enough and _may_write(func) and args and output is args[0] and log.is_one_write(began, output):
            lessons = self._lessons[func] = self._lessons.get(func, 0) + 1
            if lessons >= LESSONS:
                self._writing.add(func)
            return
        is_plain = is_small_enough and log.is_one_computation(began, output) and not _may_draw(func)
        lessons = self._lessons[func] = self._lessons.get(func, 0) + 1 if is_plain else -1
        if lessons >= LESSONS:
            self._plain.add(func)


def _are_alike(parameter: Any, values: Any) -> bool:
    """Whether a small weight is given ordinary values of its own shape and type, and not its own, as `p.data /= n` does."""
    return (
        isinstance(parameter, nn.Parameter)
        and type(values) in PLAIN_KINDS
        and values.numel() <= MAX_KEPT
        and (values.shape, values.dtype, values.device) == (parameter.shape, parameter.dtype, parameter.device)
        and values.layout is torch.strided
        and not values.is_inference()
        and values.data_ptr() != parameter.data_ptr()
    )


def is_small(tree: Any) -> bool:
    """Whether every tensor among a call's operands may be held on to."""
    if isinstance(tree, Tensor):
        return type(tree) in PLAIN_KINDS and tree.numel() <= MAX_KEPT
    if isinstance(tree, dict):
        return all(is_small(value) for value in tree.values())
    if isinstance(tree, (tuple, list)):
        return all(is_small(value) for value in tree)
    return not isinstance(tree, torch.Generator)


def _are_plain_operands(values: tuple[Any, ...]) -> bool:
    """Whether a call that writes may be kept: small and ordinary tensors, of which autograd follows none, and numbers."""
    has_grad = torch.is_grad_enabled()
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in PLAIN_KINDS or value.numel() > MAX_KEPT or (has_grad and value.requires_grad):
                return False
            if value.layout is not torch.strided or value.is_inference():
                return False
        elif type(value) in NESTED or type(value) is torch.Generator:
            return False
    return True


def _may_write(func: Any) -> bool:
    """Whether a function is named as those are that write to their first operand: `add_`, `__isub__`."""
    name = getattr(func, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _is_nothing_new(output: Any, args: Any) -> bool:
    """Whether a call returned no tensor, or one that it was given."""
    if isinstance(output, (tuple, list)):
        return not any(isinstance(value, Tensor) for value in output)
    return not isinstance(output, Tensor) or any(output is value for value in args)


def _may_draw(func: Any) -> bool:
    name = getattr(func, "__name__", "").lower()
    return any(part in name for part in DRAWING)
