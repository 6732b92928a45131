"""Every private PyTorch name that ampguard touches, each detected by asking, never by version number.

A name that is missing gives the harmless answer: ampguard then sees less, the training goes on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.utils._python_dispatch
import torch.utils._pytree
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
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)
_next_sequence_number: Callable[[], int] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_sequence_nr", None
)
_flatten: Callable[[Any], torch.Tensor] | None = getattr(torch._C._nn, "flatten_dense_tensors", None)
_top_mode: Callable[[int], Any] | None = getattr(torch._C, "_get_dispatch_stack_at", None)
_push_function: Callable[[Any], None] | None = getattr(torch._C, "_push_on_torch_function_stack", None)
_pop_function: Callable[[], Any] | None = getattr(torch._C, "_pop_torch_function_stack", None)
_top_function: Callable[[int], Any] | None = getattr(torch._C, "_get_function_stack_at", None)


HAS_CUDA = torch.backends.cuda.is_built()
"""Whether this PyTorch could use CUDA at all: if not, it need not be asked in every step."""


def cuda_is_in_use() -> bool:
    """Whether this process has initialised CUDA."""
    return bool(getattr(torch.cuda, "_initialized", False)) and torch.cuda.is_initialized()


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return _current_graph_task_id is not None and _current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether autograd's engine or a functorch transform is running on this thread."""
    if _current_graph_task_id is not None and _current_graph_task_id() != -1:
        return True
    return _peek_interpreter is not None and _peek_interpreter() is not None


def dispatch_depth() -> int:
    """How many TorchDispatchModes are active on this thread."""
    return _dispatch_depth() if _dispatch_depth is not None else 0


def is_top_dispatch_mode(mode: TorchDispatchMode) -> bool:
    """Whether `mode` is the innermost active dispatch mode, so that leaving it does not disturb another."""
    depth = dispatch_depth()
    if depth == 0 or _top_mode is None:
        return False
    return _top_mode(depth - 1) is mode


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


def _none_active() -> int:
    return 0


dispatch_modes_on: Callable[[], int] = _dispatch_depth or _none_active
"""How many dispatch modes are active on this thread. PyTorch's own function, as it is asked at every edge of a step."""


def _no_task() -> int:
    return -1


def _no_interpreter() -> None:
    return None


graph_task: Callable[[], int] = _current_graph_task_id or _no_task
"""Number of the backward pass that runs on this thread, -1 where none does; PyTorch's own function."""

interpreter: Callable[[], object | None] = _peek_interpreter or _no_interpreter
"""The functorch transform that is active on this thread, None where none is; PyTorch's own function."""

tracing_state: Callable[[], object | None] = _tracing_state or _no_interpreter
"""What `torch.jit.trace` records into, None where it does not; PyTorch's own function."""

function_modes_on: Callable[[], int] = _function_depth or _none_active
"""How many function modes are active on this thread."""


def in_functorch() -> bool:
    """Whether a functorch transform (`vmap`, `torch.func.grad`) is active: its tensors cannot be replayed."""
    return _peek_interpreter is not None and _peek_interpreter() is not None


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that neither imports Dynamo at its first operator nor keeps `torch.compile` from compiling."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

        self._is_plainly_pushed = False

    def begin(self) -> None:
        """Make this the innermost mode of the thread.

        What `__enter__` does beside that is there for compiled code to ask, and can be left out before anything is compiled.
        """
        self._is_plainly_pushed = _push is not None and _pop is not None and "torch._inductor" not in sys.modules
        if _push is not None and self._is_plainly_pushed:
            _push(self)
        else:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Take this mode off; it must be the innermost."""
        if _pop is not None and self._is_plainly_pushed:
            _pop(None)
        else:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class FunctionMode(TorchFunctionMode):
    """A function mode that is put on the stack and taken off without a frame of PyTorch's own."""

    is_available = _push_function is not None and _pop_function is not None and _top_function is not None

    @property
    def is_innermost(self) -> bool:
        """Whether this is the mode that would see a call."""
        depth = function_modes_on()
        return depth > 0 and _top_function is not None and _top_function(depth - 1) is self


def _nothing(*_: Any) -> None:
    return None


push_function_mode: Callable[[FunctionMode], Any] = _push_function or _nothing
"""Make a mode the innermost of the thread."""

pop_function_mode: Callable[[], Any] = _pop_function or _nothing
"""Take the innermost mode off."""


def may_compile() -> bool:
    """Whether `torch.compile` was ever asked for: what it compiles depends on the function modes that are on."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", None)
    return backends is None or any(callable(backend) for backend in backends.values())


def loader_iterators() -> list[type]:
    """The classes whose `__next__` fetches a batch."""
    base = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
    return [base] if base is not None else []


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind `tensor`; 0 where it has none (sparse, meta of a subclass)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there are numbers to look at: not so for meta and fake tensors, and for empty ones."""
    if tensor.is_meta or tensor.numel() == 0:
        return False
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is None or not isinstance(tensor, fake.FakeTensor)


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own parameters by name: the dictionary itself, not a copy. Empty for a ScriptModule, whose is in C++."""
    return _own(module, "_parameters")


def buffers_of(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own buffers by name: the dictionary itself. Empty for a ScriptModule."""
    return _own(module, "_buffers")


def children_of(module: torch.nn.Module) -> dict[str, Any]:
    """The module's own children by name: the dictionary itself. Empty for a ScriptModule."""
    return _own(module, "_modules")


def _own(module: torch.nn.Module, name: str) -> dict[str, Any]:
    found = module.__dict__.get(name)
    return found if isinstance(found, dict) else {}


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Every hook of the module, and those on its parameters' gradients."""
    places = [
        getattr(module, n, None)
        for n in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ]
    places += [getattr(p, "_backward_hooks", None) for p in parameters_of(module).values() if p is not None]
    return [hook for hooks in places if hooks for hook in list(hooks.values())]


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter; -1 for inference tensors, which keep none."""
    return -1 if tensor.is_inference() else tensor._version


plain_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""`version_of` for the hot path; raises RuntimeError for an inference tensor."""


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in one call where PyTorch has one."""
    together = getattr(torch, "_foreach_norm", None)
    return list(together(tensors)) if together is not None else [torch.linalg.vector_norm(t) for t in tensors]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of the module run compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


class Paused(Protocol):
    """Something that is out of the way at times."""

    paused: bool


def call_while_paused(watcher: Paused, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """An `nn.Module.__call__` that does what PyTorch's own does while `watcher` is paused, without a second frame.

    A call inside another module then costs nothing. Every other call goes to `otherwise(module, *args, **kwargs)`.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if watcher.paused:
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        return otherwise(self, *args, **kwargs)

    return __call__


def functional_call() -> tuple[Any, str] | None:
    """Where `torch.func.functional_call` runs a module on other parameters than its own."""
    from torch.nn.utils import stateless

    return (stateless, "_functional_call") if hasattr(stateless, "_functional_call") else None


def is_wrapper(module: torch.nn.Module) -> str | None:
    """The attribute behind which `module` hides the user's module, or None where it is no wrapper."""
    name = type(module).__name__
    where = type(module).__module__
    if where.startswith("ampguard."):
        return getattr(type(module), "hides", None)
    if not where.startswith("torch."):
        return hidden_from_its_state(module)
    known = {
        "OptimizedModule": "_orig_mod",
        "DistributedDataParallel": "module",
        "DataParallel": "module",
        "AveragedModel": "module",
        "CheckpointWrapper": "_checkpoint_wrapped_module",
        "FullyShardedDataParallel": "_fsdp_wrapped_module",
    }
    return known.get(name)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module behind PyTorch's wrappers (`torch.compile`, DDP, DataParallel, checkpoint wrappers)."""
    while True:
        attribute = is_wrapper(module)
        if attribute is None:
            return module
        inner = getattr(module, attribute, None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def only_forwards_to_call_impl(call: Any) -> bool:
    """Whether `nn.Module.__call__` does nothing but choose between `_compiled_call_impl` and `_call_impl`."""
    code = getattr(call, "__code__", None)
    return code is not None and code.co_names == ("_compiled_call_impl", "_call_impl")


def optimizer_step_hooks() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`register_optimizer_step_pre_hook` and `..._post_hook`, global to all optimizers."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    return register_optimizer_step_pre_hook, register_optimizer_step_post_hook


def force_eager() -> Any:
    """A context in which compiled callables run eagerly, so that a replay sees every operator."""
    return _with_stance("force_eager")


def loss_scale(scaler: object) -> torch.Tensor | None:
    """The scaler's scale where it lies, so that reading it is the caller's decision; None before its first use."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def total_norm_function() -> tuple[Any, str] | None:
    """Where `clip_grad_norm_` looks up the function that measures the gradients."""
    from torch.nn.utils import clip_grad

    return next(((clip_grad, name) for name in ("_get_total_norm",) if hasattr(clip_grad, name)), None)


def has_compiled() -> bool:
    """Whether anything was compiled in this process: operators inside compiled code cannot be watched."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return bool(counters and counters.get("frames", {}).get("total", 0))


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The optimizer's own `step`, without the global hooks that PyTorch wraps around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def held_scale(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The scale that a fused optimizer divides by itself, during the scaler's step."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def held_found_inf(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The flag by which a fused optimizer skips its own step, during the scaler's step."""
    flag = getattr(optimizer, "found_inf", None)
    return flag if isinstance(flag, torch.Tensor) else None


def is_told_to_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler, in its step, told a fused optimizer on the CPU that it found Inf. Elsewhere it would wait."""
    flag = held_found_inf(optimizer)
    return flag is not None and flag.is_cpu and bool(flag.item())


def next_node_number() -> int:
    """The number that autograd will give to the next node of this thread; 0 where it does not say."""
    return int(_next_sequence_number()) if _next_sequence_number is not None else 0


def running_node_number() -> int | None:
    """Inside a backward pass: the number of the node whose derivative is being computed, as given in the forward pass."""
    node = _current_node() if _current_node is not None else None
    if node is None or not hasattr(node, "_sequence_nr"):
        return None
    return int(node._sequence_nr())


def has_gradient_hooks(leaf: torch.Tensor) -> bool:
    """Whether something happens when a gradient has been added to this leaf."""
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None)) or torch.distributed.is_initialized()


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse gradient as they are stored, without adding up what belongs to one place."""
    values = getattr(tensor, "_values", None)
    return values() if tensor.layout == torch.sparse_coo and values is not None else tensor.to_dense()


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All elements of some tensors of one type in one new tensor."""
    with torch.no_grad():
        if _flatten is not None:
            return _flatten(tensors)
        return torch.cat([t.detach().reshape(-1) for t in tensors])


def found_inf(scaler: object, optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the scaler found Inf in an optimizer's gradients since its last update; None where it has not looked."""
    states = getattr(scaler, "_per_optimizer_states", None)
    state = states.get(id(optimizer)) if states is not None else None
    found = state.get("found_inf_per_device") if state else None
    return any(bool(flag.item()) for flag in found.values()) if found else None


def unscales_as_it_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler leaves the division to the optimizer (a fused one)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def clipping_limit() -> float | None:
    """Called from inside `clip_grad_norm_`: its `max_norm`; None where the caller is another function."""
    frame: Any = sys._getframe(1)
    for _ in range(8):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_code.co_name == "clip_grad_norm_" and "max_norm" in frame.f_locals:
            return float(frame.f_locals["max_norm"])
    return None


def norms_in(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The 2-norm of each tensor, of one device and type, summed up in `dtype`."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(t, dtype=dtype) for t in tensors]
    return list(together(tensors, 2, dtype))


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place by a 0-d tensor that lies there, too."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def update_scale_(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> None:
    """One update of a loss scale and of its count of finite steps, in place and without waiting, as GradScaler makes it."""
    torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)


@functools.cache
def has_kernel(operator: str, device_type: str) -> bool:
    """Whether an ATen operator has a kernel of its own for a kind of device: not one made of other operators."""
    ask = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    try:
        return ask is not None and bool(ask(f"aten::{operator}", device_type.upper()))
    except RuntimeError:  # an operator or a device that this PyTorch does not know
        return False


def cast_leaf(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf of which `tensor` is a copy in another type (as autocast makes them); None where it is something else."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or not node.next_functions:
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else None


def hook_attributes(optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's attributes that hold hooks."""
    return [name for name in vars(optimizer) if name.startswith("_optimizer_") and name.endswith("_hooks")]


def scaler_is_watched() -> bool:
    """Whether somebody has wrapped `GradScaler.step`: the guard, or another tool."""
    return hasattr(torch.amp.GradScaler.step, "__wrapped__")


def can_borrow_scaler() -> bool:
    """Whether GradScaler still asks the two methods that `BorrowedScaler` answers."""
    return all(hasattr(torch.amp.GradScaler, name) for name in ("_unscale_grads_", "_maybe_opt_step"))


class BorrowedScaler(torch.amp.GradScaler):
    """A GradScaler whose public calls do what somebody else tells them: so that who watches GradScaler sees it happen."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._told: tuple[torch.Tensor, Callable[[], None]] | None = None
        self._folds = False

    def unscale_as(self, optimizer: torch.optim.Optimizer, found: torch.Tensor) -> None:
        """Announce that the gradients were divided, with this result."""
        self._told = (found, lambda: None)
        self.unscale_(optimizer)

    def rescale_as(self, optimizer: torch.optim.Optimizer) -> None:
        """Announce that gradients which were divided carry the scale again; who listens wraps this."""
        forget_optimizer(self, optimizer)

    def step_by(self, optimizer: torch.optim.Optimizer, found: torch.Tensor, apply: Callable[[], None]) -> None:
        """Announce a step; `apply` makes or skips it."""
        stepped_before = getattr(self._per_optimizer_states[id(optimizer)].get("stage"), "name", "") == "STEPPED"
        if stepped_before:
            del self._per_optimizer_states[id(optimizer)]
        self._told = (found, apply)
        self._folds = unscales_as_it_steps(optimizer)
        if self._folds:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            self.step(optimizer)
        finally:
            if self._folds:
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _unscale_grads_(self, *_: Any) -> dict[torch.device, torch.Tensor]:
        assert self._told is not None
        return {self._told[0].device: self._told[0]}

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        assert self._told is not None
        if self._folds:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._told[1]()


def steps_as(optimizer_class: type, known: type) -> bool:
    """Whether a class updates with the very code of one of PyTorch's optimizers: itself, or a subclass that adds none."""
    return all(
        inspect.unwrap(getattr(optimizer_class, name)) is inspect.unwrap(getattr(known, name))
        for name in ("step", "_init_group")
        if hasattr(known, name)
    )


def is_of_pytorch(optimizer_class: type) -> bool:
    """Whether an optimizer's `step` is one of `torch.optim`'s own: the class itself, or a subclass that adds none."""
    step = inspect.unwrap(getattr(optimizer_class, "step", is_of_pytorch))
    return bool(step.__module__.startswith("torch.optim."))


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply every tensor in place, in one call where PyTorch has one."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def stored_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of a sparse gradient: which rows it holds and their values, as they are stored; None where it is stored otherwise."""
    indices = getattr(tensor, "_indices", None)
    if tensor.layout != torch.sparse_coo or tensor.sparse_dim() != 1 or indices is None:
        return None
    return indices()[0], stored_values(tensor)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything is called around the optimizer's step; also where PyTorch does not say."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    places = [getattr(module, name, None) for name in names]
    places += [getattr(optimizer, name, None) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    return any(hooks is None or hooks for hooks in places)


def functional_gradient() -> tuple[Any, str] | None:
    """What `torch.func.grad` and `grad_and_value` both call, with (func, argnums, has_aux, args, kwargs)."""
    module = sys.modules.get("torch._functorch.eager_transforms")
    return (module, "grad_and_value_impl") if hasattr(module, "grad_and_value_impl") else None


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a functorch transform has wrapped; the stacked one under `vmap`."""
    is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)
    unwrap = getattr(_functorch, "get_unwrapped", None)
    while is_wrapped is not None and unwrap is not None and is_wrapped(tensor):
        tensor = unwrap(tensor)
    return tensor


def unscale_all_(tensors: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply tensors in place by `inverse`, and set `found_inf` to 1 where an element is Inf or NaN: one pass, no waiting."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """`version_of` each; quicker for many."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # an inference tensor
        return [version_of(t) for t in tensors]


def schema_of(func: Any) -> Any:
    """An operator's declaration: its name, arguments and results, with what it writes to or shares."""
    return func._schema


def pass_for(stand_in: Any, func: Any) -> None:
    """Give a stand-in for an operator the operator's declaration."""
    stand_in._schema = func._schema


def positions_written(func: Any) -> frozenset[int]:
    """Positions of the arguments that an operator writes to."""
    declared = enumerate(schema_of(func).arguments)
    return frozenset(i for i, argument in declared if argument.alias_info is not None and argument.alias_info.is_write)


def is_first_move(scheduler: Any) -> bool:
    """Whether a scheduler's `step` is the one that its own construction makes."""
    return bool(getattr(scheduler, "_is_initial", False))


def tree_leaves(tree: Any) -> list[Any]:
    """Everything in nested containers that is no container, as PyTorch's transforms see it."""
    return list(torch.utils._pytree.tree_leaves(tree))


def tree_map(visit: Callable[[Any], Any], tree: Any) -> Any:
    """Nested containers with `visit` applied to everything in them that is no container."""
    return torch.utils._pytree.tree_map(visit, tree)


def keeping_version(tensor: torch.Tensor) -> Any:
    """A context in which writing to a tensor goes unnoticed by the graphs that have kept it; None where PyTorch has none."""
    keep = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    return keep(tensor) if keep is not None else None


def forget_optimizer(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let a scaler take an optimizer's next unscaling for its first since the last update."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states.pop(id(optimizer), None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of a tensor that is spread over several (a DTensor); any other tensor as it is.

    To ask such a tensor itself for a number would make all ranks talk to each other, and wait for those that do not.
    """
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


def needs_other_ranks(module: torch.nn.Module) -> bool:
    """Whether a call of the module gathers parameters from other ranks: FSDP of either kind, tensor parallelism."""
    if "torch.distributed.tensor" not in sys.modules and "torch.distributed.fsdp" not in sys.modules:
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(
        k for name in ("FSDPModule", "FullyShardedDataParallel") if (k := getattr(fsdp, name, None)) is not None
    )
    sharded = any(isinstance(inner, kinds) for inner in module.modules()) if kinds else False
    return sharded or any(hasattr(p, "_local_tensor") for p in module.parameters())


def distributed_is_on() -> bool:
    """Whether this process has joined a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return distributed_is_on() and torch.distributed.get_world_size() > 1


def collective_timeout() -> float | None:
    """Seconds after which the default process group gives a collective up; None where that is not known."""
    if not several_ranks():
        return None
    try:
        group = torch.distributed.group.WORLD
        backend = group._get_backend(torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu"))  # type: ignore[union-attr]
        return float(backend.options._timeout.total_seconds())
    except Exception:  # another backend, another release
        return None


def replicated_by(ddp: torch.nn.parallel.DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]] | None:
    """The parameters that DDP keeps the same on every rank; None where it does not promise to.

    It does not under `join` (ranks that have run out of data fall behind) and with post-local SGD, where ranks go their
    own ways between averages.
    """
    join = getattr(ddp, "_join_config", None)
    hooks = getattr(ddp, "_comm_hooks", ())
    if getattr(join, "enable", False) or any(type(state).__name__ == "PostLocalSGDState" for _, state in hooks):
        return None
    ignored = getattr(ddp, "parameters_to_ignore", ())
    named: Iterator[tuple[str, torch.nn.Parameter]] = ddp.module.named_parameters()
    return [(n, p) for n, p in named if p.requires_grad and n not in ignored and not hasattr(p, "_local_tensor")]


def averaged_last_gradients(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether DDP's last call was followed by an all-reduce: not so under `no_sync()`."""
    return bool(getattr(ddp, "require_forward_param_sync", True))


def hooks_of_leaf(leaf: torch.Tensor) -> Any:
    """The hooks on a leaf's gradient, by the number of their handle; None where there are none."""
    hooks = getattr(leaf, "_backward_hooks", None)
    return hooks if hooks and isinstance(hooks, dict) else None


def fsdp_states(module: torch.nn.Module) -> list[Any]:
    """What `fully_shard` keeps for the modules under one; empty where PyTorch does not say."""
    known = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state_of = getattr(known, "_get_module_fsdp_state", None)
    found = [state_of(inner) for inner in module.modules()] if state_of is not None else []
    return list({id(state): state for state in found if state is not None}.values())


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that are gathered together: each has `wait_for_unshard()` and `is_unsharded`."""
    groups = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None) if groups is None else None
    found = list(groups) if groups is not None else [one] if one is not None else []
    return [group for group in found if hasattr(group, "wait_for_unshard") and hasattr(group, "is_unsharded")]


def fsdp_parameters(group: Any) -> list[tuple[list[tuple[torch.nn.Module, str]], Any]]:
    """Of a group that is gathered now: each parameter in full, with every (module, name) where it hangs."""
    found = []
    for kept in group.fsdp_params:
        info = kept._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        found.append(([(info.module, info.param_name), *shared], kept._unsharded_param))
    return found


def fsdp_trains(group: Any) -> bool:
    """Whether an optimizer may change any parameter of the group."""
    return any(kept.sharded_param.requires_grad for kept in group.fsdp_params)


def fsdp_hooks(state: Any) -> list[tuple[torch.nn.Module, dict[int, Any], int, bool]]:
    """The hooks around forward that gather and cast: module, the dictionary and the key of each, and if it runs before."""
    both = (getattr(state, "_pre_forward_hook_handle", None), getattr(state, "_post_forward_hook_handle", None))
    handles = {id(one): one for handle in both for one in getattr(handle, "handles", (handle,)) if one is not None}
    places = [
        (module, hooks, is_before)
        for module in getattr(state, "_modules", ())
        for hooks, is_before in ((module._forward_pre_hooks, True), (module._forward_hooks, False))
    ]
    return [(m, hooks, h.id, first) for h in handles.values() for m, hooks, first in places if h.id in hooks]


def fsdp_precision(state: Any) -> Any:
    """The `MixedPrecisionPolicy` of a module given to `fully_shard`; None where it is not known."""
    return getattr(state, "_mp_policy", None)


def fsdp_input_device(state: Any) -> torch.device | None:
    """Where the outermost module given to `fully_shard` puts its inputs first; None where it leaves them."""
    device = getattr(state, "_device", None) if getattr(state, "_is_root", False) else None
    return device if device is not None and device.type != "cpu" else None


def before_fully_shard(module: torch.nn.Module) -> type:
    """The class that a module had before `fully_shard` gave it another."""
    kind = type(module)
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is None or not isinstance(module, sharded):
        return kind
    return next((base for base in kind.__bases__ if base is not sharded), kind)


def backward_engine() -> tuple[Any, str] | None:
    """Where `torch.autograd.backward` and `grad` look up the call that runs a backward pass."""
    return (torch.autograd, "_engine_run_backward") if hasattr(torch.autograd, "_engine_run_backward") else None


def flat_weights_of(module: torch.nn.Module) -> dict[str, Any]:
    """The list of its parameters that a recurrent module keeps beside them."""
    return {key: value for key, value in vars(module).items() if key in ("_flat_weights", "_flat_weight_refs")}


def as_compiled() -> Any:
    """A context in which compiled callables run what they have compiled, and raise where they would compile anew."""
    return _with_stance("fail_on_recompile")


@contextlib.contextmanager
def _with_stance(stance: str) -> Iterator[None]:
    """A stance of `torch.compiler`, also where compiled code has stopped and we are called from the middle of it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _outside_compiled_code(), torch.compiler.set_stance(stance):
        yield


@contextlib.contextmanager
def _outside_compiled_code() -> Iterator[None]:
    """Nothing is compiled on this thread for as long, but for what asks for it anew."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    switch = getattr(frames, "set_eval_frame", None)
    if switch is None:
        yield
        return
    before = switch(None)
    try:
        yield
    finally:
        switch(before)


@contextlib.contextmanager
def compiling_through(wrap: Callable[[Any], Any]) -> Iterator[bool]:
    """A context in which compiled callables compile with `wrap(their own backend)`; yields whether that can be.

    What they have compiled stays theirs: Dynamo keeps compiled code by backend.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    chosen = getattr(frames, "_callback_from_stance", None)
    innermost, wrapped = getattr(frames, "innermost_backend", None), getattr(frames, "_create_wrapped_callback", None)
    if frames is None or config is None or chosen is None or innermost is None or wrapped is None:
        yield False
        return

    def callback_from_stance(callback: Any) -> Any:
        backend = wrap(innermost(callback)) if callable(callback) else None
        return callback if backend is None else wrapped(backend)

    frames._callback_from_stance = callback_from_stance  # type: ignore[attr-defined]
    try:
        with (
            _outside_compiled_code(),
            config.patch(recompile_limit=config.recompile_limit + 8),
        ):  # at the limit Dynamo would give the function up
            yield True
    finally:
        frames._callback_from_stance = chosen  # type: ignore[attr-defined]


def has_graphs_of_device(backend: object) -> bool:
    """Whether a backend of `torch.compile` replays CUDA graphs: their results are overwritten by the next run."""
    if not (HAS_CUDA and cuda_is_in_use()):
        return False
    inductor = sys.modules.get("torch._inductor.config")
    everywhere = getattr(getattr(inductor, "triton", None), "cudagraphs", False)
    return bool(getattr(backend, "config", {}).get("triton.cudagraphs", everywhere)) or "cudagraph" in name_of(backend)


def without_device_graphs(backend: Any) -> Any:
    """The backend; a copy of it where it would replay CUDA graphs, which does not."""
    if not has_graphs_of_device(backend):
        return backend
    if not isinstance(getattr(backend, "config", None), dict):
        raise RuntimeError(
            f"the backend {name_of(backend)} replays CUDA graphs, and the next run would overwrite their results"
        )
    plain = copy.copy(backend)
    plain.config = {**backend.config, "triton.cudagraphs": False}
    return plain


def backend_called(name: str) -> Any:
    """The backend of `torch.compile` of this name."""
    return sys.modules["torch._dynamo"].lookup_backend(name)


def name_of(backend: object) -> str:
    """What a backend of `torch.compile` is called: "inductor", "aot_eager", the name of a function of the user's."""
    for attribute in ("compiler_name", "__name__"):
        name = getattr(backend, attribute, None)
        if isinstance(name, str):
            return name
    inner = getattr(backend, "compiler_fn", None)
    return name_of(inner) if inner is not None and inner is not backend else type(backend).__name__


def allow_one_more_compilation() -> None:
    """Let Dynamo keep one more compiled version of each function: one of them is ours, and not the script's."""
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    if config is not None:
        config.recompile_limit += 1


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are on, the innermost last."""
    stack = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", None)
    return list(stack()) if stack is not None else []


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """A context in which the CPU's products and convolutions are PyTorch's own, and not oneDNN's."""
    was_on, switch = getattr(torch._C, "_get_mkldnn_enabled", None), getattr(torch._C, "_set_mkldnn_enabled", None)
    if was_on is None or switch is None:
        yield
        return
    before = was_on()
    switch(False)
    try:
        yield
    finally:
        switch(before)


def hidden_from_its_state(module: torch.nn.Module) -> str | None:
    """The attribute of the only child, where the module's own `state_dict` leaves it out of the names (Fabric's does)."""
    if type(module).state_dict is torch.nn.Module.state_dict or module._parameters or module._buffers:
        return None
    children = {key: child for key, child in module._modules.items() if child is not None}
    if not children or len({id(unwrapped(child)) for child in children.values()}) != 1:
        return None
    key, child = next(iter(children.items()))
    return key if module.state_dict().keys() == unwrapped(child).state_dict().keys() else None


def run_uncompiled(codes: list[Any]) -> None:
    """Let Dynamo run frames of these codes as they are: not compile them where compiled code has stopped and calls them.

    Where it follows a call from inside compiled code it still sees through them.
    """
    skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip is not None:
        for code in codes:
            skip(code)


def communication_hooks(ddp: torch.nn.parallel.DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """What sends DDP's gradients instead of its own all-reduce, each with its state; the C++ hook as its Python twin."""
    hooks = list(getattr(ddp, "_comm_hooks", ()))
    facts: dict[str, Any] = getattr(ddp, "_get_ddp_logging_data", dict)()
    if not hooks and str(facts.get("comm_hook", "")).endswith("FP16_COMPRESS"):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        hooks.append((fp16_compress_hook, ddp.process_group))
    return hooks
