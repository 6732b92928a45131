"""What is compared: each row is a context manager around training steps; leaving it undoes everything."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

Row = Callable[[nn.Module], AbstractContextManager[None]]


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    yield


@contextlib.contextmanager
def ampguard_watch(model: nn.Module) -> Iterator[None]:
    import ampguard

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(io.StringIO()),
        ampguard.watch(out=Path(folder) / "run"),
    ):
        yield


@contextlib.contextmanager
def detect_anomaly(model: nn.Module) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces itself each time
        with torch.autograd.detect_anomaly():
            yield


@contextlib.contextmanager
def hf_debug_underflow_overflow(model: nn.Module) -> Iterator[None]:
    from transformers.debug_utils import DebugUnderflowOverflow

    with _new_hooks_removed(model):
        DebugUnderflowOverflow(model)
        yield


@contextlib.contextmanager
def isfinite_hooks(model: nn.Module) -> Iterator[None]:
    def check(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            raise FloatingPointError(f"a {type(module).__name__} made a non-finite output")

    handles = [module.register_forward_hook(check) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _new_hooks_removed(model: nn.Module) -> Iterator[None]:
    """DebugUnderflowOverflow keeps no handles, so take away whatever hook was not there before."""
    before = {module: set(module._forward_hooks) for module in model.modules()}
    try:
        yield
    finally:
        for module, keys in before.items():
            for key in set(module._forward_hooks) - keys:
                del module._forward_hooks[key]


ROWS: dict[str, Row] = {
    "plain": plain,
    "ampguard.watch": ampguard_watch,
    "torch.autograd.detect_anomaly": detect_anomaly,
    "HF DebugUnderflowOverflow": hf_debug_underflow_overflow,
    "module hooks with isfinite": isfinite_hooks,
}
