"""Compiled code, and the kernels behind operators."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from ampguard.compat.device_graphs import without_graphs_in_modules
from ampguard.compat.members import own_children
from ampguard.compat.modes import DYNAMO, HAS_CUDA, cuda_is_in_use

_TORCH = os.path.dirname(torch.__file__)
_BETWEEN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.join(_TORCH, "fx"))
_INDUCTOR = os.path.join(_TORCH, "_inductor")
_RUNTIME = (os.path.join(_TORCH, "_functorch"), os.path.join(_TORCH, "_dynamo", "backends"))


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of the module run compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def any_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of the module, or of one inside it, run compiled code."""
    seen: set[int] = set()
    stack: list[Any] = [module]
    while stack:
        part = stack.pop()
        if part is None or id(part) in seen:
            continue
        if is_compiled(part):
            return True
        seen.add(id(part))
        stack += own_children(part).values()
    return False


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """A context in which compiled callables and graphed modules run eagerly, so that a replay sees every operator."""
    with without_graphs_in_modules(), _with_stance("force_eager"):
        yield


def has_compiled() -> bool:
    """Whether anything was compiled in this process: operators inside compiled code cannot be watched."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return bool(counters and counters.get("frames", {}).get("total", 0))


def compilation_seconds() -> float:
    """How long compiling has taken in this process so far; 0 where PyTorch does not count it."""
    utils = sys.modules.get("torch._dynamo.utils")
    times = getattr(utils, "compilation_time_metrics", None) or {}
    return float(sum(times.get("_compile.compile_inner", ())))


def as_compiled() -> Any:
    """A context in which compiled callables run what they have compiled, and raise where they would compile anew."""
    return _with_stance("fail_on_recompile")


@contextlib.contextmanager
def _with_stance(stance: str) -> Iterator[None]:
    """A stance of `torch.compiler`, also where compiled code has stopped and we are called from the middle of it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with outside_compiled_code(), torch.compiler.set_stance(stance):
        yield


@contextlib.contextmanager
def outside_compiled_code() -> Iterator[None]:
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
    frames = sys.modules.get(DYNAMO)
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
            outside_compiled_code(),
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


def run_uncompiled(codes: list[Any], with_calls: bool = False) -> None:
    """Let Dynamo run frames of these codes as they are: not compile them where compiled code has stopped and calls them.

    `with_calls`: nor what they call, unless that asks to be compiled. Where it follows a call from inside compiled code
    it still sees through them.
    """
    types = sys.modules.get("torch._dynamo.types")
    frames = sys.modules.get(DYNAMO)
    choose = getattr(frames, "set_code_exec_strategy", None)
    strategy, action = getattr(types, "FrameExecStrategy", None), getattr(types, "FrameAction", None)
    if choose is not None and strategy is not None and action is not None:
        chosen = strategy(action.SKIP, action.SKIP if with_calls else action.DEFAULT)
        for code in codes:
            choose(code, chosen)


def stop_compiled_code_at(function: Any) -> None:
    """Let Dynamo stop at calls of this function, which stands for `torch.autograd.grad`, as it stops at that."""
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    if hasattr(function, "__wrapped__") and not getattr(config, "trace_autograd_ops", False):
        function._torchdynamo_disable = True


def forget_functions() -> None:
    """Let Dynamo look up PyTorch's functions again: it has met those that stood in their place."""
    rules, variables = sys.modules.get("torch._dynamo.trace_rules"), sys.modules.get("torch._dynamo.variables.torch")
    handlers = getattr(getattr(variables, "TorchInGraphFunctionVariable", None), "_get_handlers", None)
    for clear in (getattr(rules, "clear_lru_cache", None), getattr(handlers, "cache_clear", None)):
        if clear is not None:
            clear()


def is_of_inductor(frame: FrameType) -> bool:
    """Whether this is code of the compiler's own: it captures parts of compiled code as CUDA graphs, and replays them."""
    return frame.f_code.co_filename.startswith(_INDUCTOR)


def is_inside_compiled_code(frame: FrameType) -> bool:
    """Whether the graph of a compiled function is called here, with only torch.fx and us in between."""
    current: FrameType | None = frame
    while current is not None and current.f_code.co_filename.startswith(_BETWEEN):
        current = current.f_back
    return current is not None and current.f_code.co_filename.startswith(_RUNTIME)


def is_inside_compiled_function(frame: FrameType) -> bool:
    """Whether a frame below is one that Dynamo has rewritten: Dynamo puts back the dispatch state of its beginning."""
    codes = getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", None)
    current: FrameType | None = frame
    while current is not None:
        code = current.f_code
        if code.co_name.startswith("torch_dynamo_resume_in_") or (codes is not None and code in codes):
            return True
        current = current.f_back
    return False
