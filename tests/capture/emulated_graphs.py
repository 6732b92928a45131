"""CUDA graphs without CUDA: what is captured is recorded beneath autograd, and a replay runs it again without Python.

PyTorch's own `torch.cuda.graph` and `make_graphed_callables` run over a stand-in of `torch.cuda.CUDAGraph`. As on a GPU:

- between the beginning and the end of a capture nothing is computed: what was there before keeps its values, and what
  is made holds garbage (NaN) until the first replay;
- what would wait for the device (`item()`, `nonzero`, a synchronisation) is refused, and the capture is lost with it:
  every operator after it is refused too, and so is the capture's end;
- a replay writes into the tensors of the capture, runs no Python (no hook, no mode, no module), and moves no version.

All threads' tensors of the CPU count as the device's. The operators are caught at a dispatch key that no build of
PyTorch uses on a CPU, so that no mode is on the stack which a guard would see.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

KEY = "FPGA"
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2", "masked_select")
"""Operators that give the host a number."""

BY_THEMSELVES = (torch.ops.aten.copy_, torch.ops.aten.native_layer_norm)
"""Operators with one kernel for all devices, which asks no other operator, or others than on a real one."""

REFUSED = "CUDA error: operation not permitted when stream is capturing"
LOST = "CUDA error: operation failed due to a previous error during capture"

_underway: list[EmulatedGraph] = []


class EmulatedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._operators: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: dict[int, Tensor] = {}
        self._is_lost = False
        self.replays = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        assert not _underway
        _underway.append(self)
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, True)

    def capture_end(self) -> None:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, False)
        _underway.remove(self)
        if self._is_lost:
            raise RuntimeError(LOST)
        with _beneath():
            for tensor, before in self._before.values():
                torch.ops.aten.copy_.default.redispatch(CPU, tensor, before)
            for tensor in self._made.values():
                if tensor.is_floating_point():
                    torch.ops.aten.fill_.Scalar.redispatch(CPU, tensor, float("nan"))
        self._before.clear()

    def replay(self) -> None:
        assert not _underway, REFUSED
        self.replays += 1
        with _beneath():
            for operator, args, kwargs, results in self._operators:
                again = operator.redispatch(CPU, *args, **kwargs)
                for then, now in zip(_tensors(results), _tensors(again), strict=True):
                    if now.untyped_storage().data_ptr() not in {_storage(t) for t in _tensors((args, kwargs))}:
                        torch.ops.aten.copy_.default.redispatch(CPU, then, now)

    def reset(self) -> None:
        self._operators.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def refuse(self, why: str) -> None:
        """The capture is lost."""
        self._is_lost = True
        raise RuntimeError(why)

    def capture(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """An operator that is asked for while this is underway."""
        if self._is_lost:
            raise RuntimeError(LOST)
        if operator._schema.name.partition("::")[2] in WAITING:
            self.refuse(REFUSED)
        args = tuple(
            torch.scalar_tensor(value, dtype=torch.float64) if _is_number_for(argument, value) else value
            for argument, value in zip(operator._schema.arguments, args, strict=False)
        )
        given = {_storage(t) for t in _tensors((args, kwargs))}
        read = {
            _storage(t)
            for argument, value in _bound(operator, args, kwargs)
            if not argument.is_out
            for t in _tensors(value)
        }
        for argument, value in _bound(operator, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    if argument.is_out and _storage(tensor) not in read | self._before.keys():
                        self._made[_storage(tensor)] = tensor  # by the operator that this one is a part of
                    self._keep(tensor)
        results = operator.redispatch(CPU, *args, **kwargs)
        self._operators.append((operator, args, kwargs, results))
        for tensor in _tensors(results):
            if _storage(tensor) not in given:
                self._made[_storage(tensor)] = tensor
        return results

    def _keep(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key in self._made or key in self._before:
            return
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        self._before[key] = (whole, whole.clone())


def _bound(operator: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(operator._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _is_number_for(argument: Any, value: Any) -> bool:
    """A plain number where the operator wants a tensor: PyTorch hands it to Python as that."""
    return isinstance(value, (int, float)) and isinstance(argument.type, torch._C.TensorType)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _beneath() -> Iterator[None]:
    """Where neither autograd nor a mode of Python's is told, and what is asked for is done."""
    was_on = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, False)
    try:
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.utils._python_dispatch._disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, was_on)


def _fallback(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with _beneath():
        return _underway[-1].capture(operator, args, kwargs)


class _Stream:
    def wait_stream(self, stream: Any) -> None:
        pass


def _wait(*_: Any) -> None:
    if _underway:
        _underway[-1].refuse(REFUSED)


@pytest.fixture
def device_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EmulatedGraph]]:
    """Lets PyTorch's functions for CUDA graphs work on the CPU; gives the stand-in for `CUDAGraph`."""
    library, kernels = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    library.fallback(_fallback, KEY)
    for operator in BY_THEMSELVES:
        kernels.impl(operator.__name__, functools.partial(_fallback, operator.default), KEY)
    for place in (torch.cuda, torch.cuda.graphs):
        monkeypatch.setattr(place, "CUDAGraph", EmulatedGraph)
        monkeypatch.setattr(place, "graph_pool_handle", lambda: (0, 0))
        monkeypatch.setattr(place, "is_current_stream_capturing", lambda: bool(_underway))
    monkeypatch.setattr("ampguard.capture.graph_captures.cuda_is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", _wait)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    try:
        yield EmulatedGraph
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, False)
        _underway.clear()
        library._destroy()
        kernels._destroy()
