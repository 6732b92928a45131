"""Modes, transforms and tracing: what is on just now."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._python_dispatch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_current_graph_task_id: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)

_dispatch_depth: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)

_function_depth: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)

_tracing_state: Callable[[], object | None] | None = getattr(torch._C, "_get_tracing_state", None)

_without_modes: Callable[[], Any] | None = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)

_functorch = getattr(torch._C, "_functorch", None)

_peek_interpreter: Callable[[], object | None] | None = getattr(_functorch, "peek_interpreter_stack", None)

_push: Callable[[Any], None] | None = getattr(torch._C, "_push_on_torch_dispatch_stack", None)

_pop: Callable[[Any], Any] | None = getattr(torch._C, "_pop_torch_dispatch_stack", None)

_top_mode: Callable[[int], Any] | None = getattr(torch._C, "_get_dispatch_stack_at", None)

_mode_of_kind: Callable[[Any], Any] | None = getattr(torch._C, "_get_dispatch_mode", None)

_KINDS = getattr(torch._C, "_TorchDispatchModeKey", None)

_TRACING = [getattr(_KINDS, kind) for kind in ("PROXY", "FUNCTIONAL") if hasattr(_KINDS, kind)]

_push_function: Callable[[Any], None] | None = getattr(torch._C, "_push_on_torch_function_stack", None)

_pop_function: Callable[[], Any] | None = getattr(torch._C, "_pop_torch_function_stack", None)

_top_function: Callable[[int], Any] | None = getattr(torch._C, "_get_function_stack_at", None)

_forced_keys: Callable[[Any, Any], Any] | None = getattr(torch._C, "_ForceDispatchKeyGuard", None)

_as_called: Callable[[], Any] | None = getattr(torch._C, "_RestorePythonTLSSnapshot", None)

_AUTOCAST_ON = ("cpu", "cuda")
"""The devices whose regions of autocast are known."""

_KEYS_OUTSIDE = tuple(
    ask() if (ask := getattr(torch._C, f"_dispatch_tls_local_{kind}_set", None)) is not None else None
    for kind in ("include", "exclude")
)
"""As a thread has them that computes nothing yet."""

DYNAMO = "torch._dynamo.eval_frame"


def dynamo_is_loaded() -> bool:
    """Whether anything can have been compiled yet."""
    return DYNAMO in sys.modules


def may_compile() -> bool:
    """Whether `torch.compile` was ever asked for: what it compiles depends on the function modes that are on."""
    frames = sys.modules.get(DYNAMO)
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", None)
    return backends is None or any(map(callable, backends.values()))


HAS_CUDA = torch.backends.cuda.is_built()
"""Whether this PyTorch could use CUDA at all: if not, it need not be asked in every step."""


def cuda_is_in_use() -> bool:
    """Whether this process has initialised CUDA."""
    return bool(getattr(torch.cuda, "_initialized", False)) and torch.cuda.is_initialized()


def cuda_is_capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream: then nothing may be waited for."""
    return HAS_CUDA and cuda_is_in_use() and torch.cuda.is_current_stream_capturing()


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return _current_graph_task_id is not None and _current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether autograd's engine or a functorch transform is running on this thread."""
    return graph_task() != -1 or in_functorch()


def dispatch_depth() -> int:
    """How many TorchDispatchModes are active on this thread."""
    return _dispatch_depth() if _dispatch_depth is not None else 0


def is_top_dispatch_mode(mode: TorchDispatchMode) -> bool:
    """Whether `mode` is the innermost active dispatch mode, so that leaving it does not disturb another."""
    depth = dispatch_depth()
    if depth == 0 or _top_mode is None:
        return False
    return _top_mode(depth - 1) is mode


def is_region_on(region: Any) -> bool:
    """Whether a region of autocast casts anything (`enabled`)."""
    return bool(getattr(region, "_enabled", False))


def is_compiling() -> bool:
    """Whether the compiler is at work on this thread, or AOTAutograd is tracing a graph for it.

    PyTorch 2.11 does not call the second compiling; its tensors have no values then.
    """
    return torch.compiler.is_compiling() or (
        _mode_of_kind is not None and dispatch_modes_on() > 0 and any(map(_mode_of_kind, _TRACING))
    )


def is_tracing() -> bool:
    """Whether `torch.jit.trace` is recording: it compares two runs and must see the script's operators only."""
    return _tracing_state is not None and _tracing_state() is not None


def unseen() -> Any:
    """A context in which the script's own function and dispatch modes do not see our operators."""
    stack = contextlib.ExitStack()
    if _function_depth is not None and _function_depth():
        stack.enter_context(torch._C.DisableTorchFunction())
    if dispatch_depth() and _without_modes is not None:
        stack.enter_context(_without_modes())
    return stack


def outside_dispatch() -> Any:
    """A context in which a call runs as the script makes it, also while a dispatch mode of ours is being told of an operator.

    There autograd and autocast lie behind: an `einsum` would come to the next mode whole, and its product without its casts.
    """
    included, excluded = _KEYS_OUTSIDE
    if _forced_keys is None or included is None or excluded is None or torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return _forced_keys(included, excluded)


def devices_that_cast() -> list[str]:
    """While a dispatch mode of ours is being told of an operator: for which devices autocast is on where it was called.

    There autocast itself lies behind, and says that it is off.
    """
    if _as_called is None:
        return []
    with _as_called():
        return [device for device in _AUTOCAST_ON if torch.is_autocast_enabled(device)]


@contextlib.contextmanager
def casting_within() -> Iterator[None]:
    """A context in which a dispatch mode of ours runs an operator whose own kernel is cast by autocast, as without a mode."""
    devices = devices_that_cast()
    before = [torch.is_autocast_enabled(device) for device in devices]
    for device in devices:
        torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        for device, was_enabled in zip(devices, before, strict=True):
            torch.set_autocast_enabled(device, was_enabled)


def _none_active() -> int:
    return 0


dispatch_modes_on: Callable[[], int] = _dispatch_depth or _none_active
"""How many dispatch modes are active on this thread. PyTorch's own function, as it is asked at every edge of a step."""


def _no_task() -> int:
    return -1


def _no_state() -> None:
    return None


graph_task: Callable[[], int] = _current_graph_task_id or _no_task
"""Number of the backward pass that runs on this thread, -1 where none does; PyTorch's own function."""


def _has_interpreter() -> bool:
    return _peek_interpreter is not None and _peek_interpreter() is not None


in_functorch: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", None) or _has_interpreter
"""Whether a functorch transform (`vmap`, `torch.func.grad`) is active on this thread; PyTorch's own function.

It looks at the dispatch keys. To ask for the transform itself would give the thread a stack of transforms, which
PyTorch from then on copies for each operator that a backward pass differentiates (0.5 % of a launch-bound step).
"""

tracing_state: Callable[[], object | None] = _tracing_state or _no_state
"""What `torch.jit.trace` records into, None where it does not; PyTorch's own function."""


def _may_be_on() -> bool:
    return True


is_any_autocast_on: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", None) or _may_be_on
"""Whether autocast is on for any device on this thread; True where PyTorch does not say."""

function_modes_on: Callable[[], int] = _function_depth or _none_active
"""How many function modes are active on this thread."""


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that neither imports Dynamo at its first operator nor keeps `torch.compile` from compiling."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

        self._is_plainly_pushed = False

    def begin(self) -> None:
        """Make this the innermost mode of the thread.

        What `__enter__` does beside that is there for compiled code to ask, and can be left out before anything is compiled.
        """
        self._is_plainly_pushed = _push is not None and _pop is not None and not may_compile()
        if _push is not None and self._is_plainly_pushed:
            _push(self)
        else:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Take this mode off; it must be the innermost."""
        if _pop is not None and self._is_plainly_pushed:
            self._is_plainly_pushed = False
            _pop(None)
        else:
            self.__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        """Whoever clears the stack up asks for this."""
        if self._is_plainly_pushed:
            self.end()
        else:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def renamed(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """`after` is what `before` is, under another class of tensors (`as_subclass`): no operator was run for it."""

    def met_tangent(self, tangent: torch.Tensor, is_made: bool) -> None:
        """`tangent` was made that of a dual number, or taken out of one: what is computed from it is a derivative from
        here on, or no longer."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class FunctionMode(TorchFunctionMode):
    """A function mode that is put on the stack and taken off without a frame of PyTorch's own."""

    is_available = _push_function is not None and _pop_function is not None and _top_function is not None

    def __init__(self) -> None:
        super().__init__()
        self._aside = False

    def step_aside(self, depth: int) -> bool:
        """Let what the guard itself computes pass unseen; whether this was the innermost of the thread's modes, which are
        `depth`, and is to come back."""
        if not depth or function_mode_at(depth - 1) is not self:
            return False
        pop_function_mode()
        self._aside = True
        return True

    def come_back(self) -> None:
        """Be on the stack again, if nobody has taken it off in the meantime."""
        if self._aside:
            self._aside = False
            push_function_mode(self)

    def take_off(self) -> bool:
        """Leave the stack; False where something is on top (or a call is running, after which PyTorch puts it back)."""
        if self._aside:
            self._aside = False
            return True
        depth = function_modes_on()
        if not depth or function_mode_at(depth - 1) is not self:
            return False
        pop_function_mode()
        return True


def _nothing(*_: Any) -> None:
    return None


function_mode_at: Callable[[int], Any] = _top_function or _nothing
"""The function mode at a place of the thread's stack, 0 being the outermost."""

push_function_mode: Callable[[FunctionMode], Any] = _push_function or _nothing
"""Make a mode the innermost of the thread."""

pop_function_mode: Callable[[], Any] = _pop_function or _nothing
"""Take the innermost mode off."""


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a functorch transform has wrapped; the stacked one under `vmap`."""
    is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
    unwrap = getattr(_functorch, "get_unwrapped", None)
    while is_wrapped is not None and unwrap is not None and is_wrapped(tensor):
        tensor = unwrap(tensor)
    return tensor


def is_of_transform(tensors: Any) -> bool:
    """Whether a functorch transform has wrapped these (the first of several); one that has ended, perhaps (`vjp`)."""
    is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
    first = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
    return is_wrapped is not None and isinstance(first, torch.Tensor) and bool(is_wrapped(first))


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are on, the innermost last."""
    stack = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", None)
    return list(stack()) if stack is not None else []


@contextlib.contextmanager
def outside_vmap() -> Iterator[bool]:
    """Leaves the one `vmap` that is active for a time. False, and nothing done: PyTorch has no such thing."""
    pop = getattr(_functorch, "pop_dynamic_layer_stack", None)
    push = getattr(_functorch, "push_dynamic_layer_stack", None)
    if pop is None or push is None or not in_functorch():
        yield False
        return
    layer = pop()
    try:
        yield not in_functorch()
    finally:
        push(layer)


def batch_dim(tensor: torch.Tensor) -> int | None:
    """The dimension over which `vmap` has batched a tensor; None where it is not batched, or over several."""
    is_batched = getattr(_functorch, "is_batchedtensor", None)
    unwrap = getattr(_functorch, "get_unwrapped", None)
    dimension = getattr(_functorch, "maybe_get_bdim", None)
    if is_batched is None or unwrap is None or dimension is None or not is_batched(tensor):
        return None
    return None if is_batched(unwrap(tensor)) else int(dimension(tensor))


def top_dispatch_mode() -> Any:
    """The innermost dispatch mode of this thread; None where there is none."""
    depth = dispatch_depth()
    return _top_mode(depth - 1) if depth and _top_mode is not None else None
