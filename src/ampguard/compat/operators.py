"""Operators, the autograd graph, and trees of operands."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import CodeType
from typing import Any

import torch
import torch.utils._pytree

from ampguard.compat.modes import casting_within

_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)

_increment_version: Callable[[Any], None] | None = getattr(torch.autograd.graph, "increment_version", None)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_next_sequence_number: Callable[[], int] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_sequence_nr", None
)


def next_node_number() -> int:
    """The number that autograd will give to the next node of this thread; 0 where it does not say."""
    return int(_next_sequence_number()) if _next_sequence_number is not None else 0


def running_node_number() -> int | None:
    """Inside a backward pass: the number of the node whose derivative is being computed, as given in the forward pass."""
    node = _current_node() if _current_node is not None else None
    if node is None or not hasattr(node, "_sequence_nr"):
        return None
    return int(node._sequence_nr())


def derivative_number() -> int | None:
    """As `running_node_number`, but -1 where the node is that of a custom `autograd.Function`."""
    if _current_node is None or _current_node() is None:
        return None
    return -1 if is_custom_derivative() else running_node_number()


def is_custom_derivative() -> bool:
    """Inside a backward pass: whether the node that is running is that of a custom `autograd.Function`."""
    node = _current_node() if _current_node is not None else None
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def engine_call() -> CodeType | None:
    """The code of the frame from which autograd's engine runs; None where there is no such frame."""
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    return getattr(run, "__code__", None)


def node_number(node: Any) -> int | None:
    """The number that a node of the graph was given in the forward pass."""
    return int(node._sequence_nr()) if hasattr(node, "_sequence_nr") else None


def functional_gradient() -> tuple[Any, str] | None:
    """What `torch.func.grad` and `grad_and_value` both call, with (func, argnums, has_aux, args, kwargs)."""
    module = sys.modules.get("torch._functorch.eager_transforms")
    return (module, "grad_and_value_impl") if hasattr(module, "grad_and_value_impl") else None


def functional_slope() -> tuple[Any, str] | None:
    """Where the function is that takes the slopes of `torch.func.jvp`; None where there is none."""
    module = sys.modules.get("torch._functorch.eager_transforms")
    return (module, "_jvp_with_argnums") if hasattr(module, "_jvp_with_argnums") else None


def pairs_tangent(func: Any) -> bool:
    """Whether PyTorch runs this operator for nothing but a tensor that is given its tangent: with that, and the tensor."""
    return str(func) == "aten._has_same_storage_numel.default"


def python_kernel(func: Any, args: Iterable[Any]) -> Callable[..., Any] | None:
    """The function behind an operator that the script has declared by `torch.library.custom_op`; None for any other operator."""
    module = sys.modules.get("torch._library.custom_ops")
    declared = getattr(module, "OPDEFS", {}).get(func._schema.name)
    kernels: Mapping[str | None, Callable[..., Any]] = getattr(declared, "_backend_fns", {})
    device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), None)
    return kernels.get(device) or kernels.get(None)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """As the kernel of an operator runs: nothing that it computes is differentiated by itself."""
    guard: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
    return guard() if guard is not None else torch.no_grad()


def schema_of(func: Any) -> Any:
    """An operator's declaration: its name, arguments and results, with what it writes to or shares."""
    return func._schema


def positions_written(func: Any) -> frozenset[int]:
    """Positions of the arguments that an operator writes to; none for a function that is kept in place of its operators."""
    declared = enumerate(schema_of(func).arguments) if hasattr(func, "_schema") else ()
    return frozenset(i for i, argument in declared if argument.alias_info is not None and argument.alias_info.is_write)


def is_view(func: Any) -> bool:
    """Whether an operator gives a view of its first operand; no function that is kept in place of its operators does."""
    shared = schema_of(func).returns[0].alias_info if hasattr(func, "_schema") and schema_of(func).returns else None
    return shared is not None and not shared.is_write


_list_writers: dict[int, tuple[bool, Any]] = {}
"""By identity, each with its operator: PyTorch computes the hash of one in Python."""


def writes_to_lists(func: Any) -> bool:
    """Whether an operator writes to all tensors of a list, each by an operator of its own where there is no kernel for all."""
    known = _list_writers.get(id(func))
    if known is None:
        is_foreach = func.namespace == "aten" and str(func.overloadpacket.__name__).startswith("_foreach_")
        known = _list_writers[id(func)] = is_foreach and bool(positions_written(func)), func
    return known[0]


PYTORCHS = frozenset(
    {"aten", "prim", "prims", "c10d", "_c10d_functional", "quantized", "mkldnn", "inductor", "higher_order"}
)
"""Where PyTorch's own operators are declared."""
CASTS_WITHIN = frozenset(
    {"affine_grid_generator", "affine_grid_generator_backward", "_trilinear", "linalg_pinv", "linalg_lstsq"}
)
"""PyTorch's own whose kernels call matrix products, of which autocast casts the operands, and are not cast themselves."""

_with_casts: dict[int, tuple[bool, Any]] = {}
"""By identity, each with its operator."""


def casts_within(func: Any) -> bool:
    """Whether an operator is not cast by autocast and its kernel is, in what it calls; so may any that a script declares."""
    known = _with_casts.get(id(func))
    if known is None:
        is_one = func.namespace not in PYTORCHS or (
            func.namespace == "aten" and func.overloadpacket.__name__ in CASTS_WITHIN
        )
        known = _with_casts[id(func)] = is_one, func
    return known[0]


_ways_to_run: dict[int, tuple[bool, bool, Any]] = {}
"""By identity, each with its operator: whether its kernel casts, and whether it writes to lists."""


COMPARES_WHOLE = torch.ops.aten.equal.default


def _all_tensors(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The numbers that PyTorch made of tensors as tensors again."""
    known = next((value.dtype for value in values if isinstance(value, torch.Tensor)), None)
    return tuple(
        value if isinstance(value, torch.Tensor) else torch.scalar_tensor(value, dtype=known or _dtype_of(value))
        for value in values
    )


def _dtype_of(number: complex) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.float64 if isinstance(number, float) else torch.complex128


def run_counted(func: Any, args: Any, kwargs: Any, casts: bool = True) -> Any:
    """Run an operator under a dispatch mode as PyTorch does without one.

    Under a mode the operators of which it is made pass by two layers: the one that counts writes to lists of plain CPU
    tensors, and autocast (unless `casts` is False). And they are given a constant of a traced module as a Python number, which
    `equal` does not take: it is asked of each pair of constants when such a module is saved.
    """
    known = _ways_to_run.get(id(func))
    if known is None:
        known = _ways_to_run[id(func)] = casts_within(func), writes_to_lists(func), func
    if func is COMPARES_WHOLE:
        args = _all_tensors(args)
    if known[0] and casts:
        with casting_within():
            return func(*args, **kwargs)
    if not known[1]:
        return func(*args, **kwargs)
    lists = [args[position] for position in positions_written(func) if position < len(args)]
    written = [t for tensors in lists for t in tensors if type(t) in _PLAIN and t.is_cpu and not t.is_inference()]
    before = [t._version for t in written]
    result = func(*args, **kwargs)
    if _increment_version is not None:
        for tensor, version in zip(written, before, strict=True):
            if tensor._version == version:
                _increment_version(tensor)
    return result


def tree_leaves(tree: Any) -> list[Any]:
    """Everything in nested containers that is no container, as PyTorch's transforms see it."""
    return list(torch.utils._pytree.tree_leaves(tree))


def tree_map(visit: Callable[[Any], Any], tree: Any) -> Any:
    """Nested containers with `visit` applied to everything in them that is no container."""
    return torch.utils._pytree.tree_map(visit, tree)


def running_backward() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]] | None:
    """Roots of the backward pass that is running, and the gradients that they were given; None where it is not known.

    On an accelerator a hook runs on another thread than the call.
    """
    for frame in (sys._getframe(1), *sys._current_frames().values()):
        while frame is not None:
            if frame.f_code.co_name == "backward" and frame.f_code.co_filename == torch.autograd.__file__:
                return _roots(frame.f_locals)
            frame = frame.f_back  # type: ignore[assignment]
    return None


def _roots(call: Mapping[str, Any]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]] | None:
    roots, gradients = (_as_tuple(call.get(name)) for name in ("tensors", "grad_tensors"))
    is_known = bool(roots) and all(isinstance(root, torch.Tensor) for root in roots)
    return (roots, gradients) if is_known else None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def backward_engine() -> tuple[Any, str] | None:
    """Where `torch.autograd.backward` and `grad` look up the call that runs a backward pass."""
    return (torch.autograd, "_engine_run_backward") if hasattr(torch.autograd, "_engine_run_backward") else None


_KEEPS_FACTORS = frozenset(
    f"{name}Backward0"
    for name in ("Mul", "Div", "Add", "Sub", "Neg", "Sum", "Mean", "ToCopy", "View", "Squeeze", "Stack")
)
_LOOKED_AT = 16


def tensor_factors(loss: torch.Tensor) -> list[torch.Tensor]:
    """Single float32 numbers on a device, by which a loss (or a term of it) was multiplied last: no Python numbers."""
    found: list[torch.Tensor] = []
    for node in _last_nodes(loss):
        saved = [saved_by(node, name) for name in ("self", "other")]
        found += [f for f in saved if f is not None and not f.dim() and f.dtype == torch.float32 and f.grad_fn is None]
    return found


def is_multiplied(loss: torch.Tensor) -> bool:
    """Whether a loss (or a term of it) was multiplied last by something that needs no gradient: a number, say."""
    products = (node for node in _last_nodes(loss) if type(node).__name__ == "MulBackward0")
    return any(inner is None for node in products for inner, _ in node.next_functions)


def _last_nodes(loss: torch.Tensor) -> list[Any]:
    """The nodes by which a loss was put together last, as far as factors are kept through them."""
    nodes = [loss.grad_fn]
    for node in nodes:  # grows
        if node is not None and type(node).__name__ in _KEEPS_FACTORS and len(nodes) <= _LOOKED_AT:
            nodes += [inner for inner, _ in node.next_functions]
    return [node for node in nodes if node is not None and type(node).__name__ in _KEEPS_FACTORS]


def saved_by(node: Any, name: str) -> torch.Tensor | None:
    """The tensor that a node of the graph has saved of an argument of its operator (`self`, `other`); None without one."""
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # the graph was freed, or the value was written to since
        return None
    return value if isinstance(value, torch.Tensor) else None


def alpha_of(node: Any) -> float:
    """By which an addition or a subtraction has multiplied its second operand."""
    return float(getattr(node, "_saved_alpha", 1.0))


def exponent_of(node: Any) -> float | None:
    """Of a power; None where it is no number."""
    exponent = getattr(node, "_saved_exponent", None)
    return float(exponent) if isinstance(exponent, (int, float)) else None


def first_node_of(losses: Iterable[torch.Tensor], dtype: torch.dtype, at_most: int = 2000) -> str | None:
    """The name of an operator with results of this type among those that the losses were made by; None for none."""
    nodes = [loss.grad_fn for loss in losses]
    seen = set(nodes)
    for node in nodes:  # grows
        if node is None or len(nodes) > at_most:
            continue
        metadata = getattr(node, "_input_metadata", ())
        if metadata and getattr(metadata[0], "dtype", None) == dtype:
            return type(node).__name__.partition("Backward")[0]
        inner = [other for other, _ in node.next_functions if other not in seen]
        seen.update(inner)
        nodes += inner
    return None


def shape_behind(loss: torch.Tensor, passed: Collection[str]) -> torch.Size:
    """The shape of what a number was reduced from, behind operators of these names; that of a number where it is not known."""
    node, shape = loss.grad_fn, loss.shape
    while node is not None:
        inner = next((other for other, _ in node.next_functions if other is not None), None)
        metadata = getattr(inner, "_input_metadata", ())
        shape = torch.Size(metadata[0].shape) if metadata else loss.shape
        if shape.numel() > 1 or type(node).__name__ not in passed:
            break
        node = inner
    return shape


def first_number_behind(losses: Iterable[torch.Tensor]) -> float:
    """The least of the numbers that `node_number` gives of the nodes that the losses were made by."""
    nodes = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # grows
        inner = dict.fromkeys(other for other, _ in node.next_functions if other is not None and other not in seen)
        seen.update(inner)
        nodes += inner
    return min((number for node in nodes if (number := node_number(node)) is not None), default=math.inf)


def leaves_behind(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves to whose gradients a backward pass of these results will add."""
    results = list(results)
    leaves = [result for result in results if result.grad_fn is None and result.requires_grad]
    nodes = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # grows
        inner = [other for other, _ in node.next_functions if other is not None and other not in seen]
        if inner:
            seen.update(inner)
            nodes += dict.fromkeys(inner)
        elif type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
    return leaves
