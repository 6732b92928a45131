"""Calls of modules inside others take a shorter way than PyTorch's own: whatever makes a difference there still does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)

import ampguard


class Outer(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner if inner is not None else nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class Doubling(nn.Linear):
    """PyTorch's own call, twice its result."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) * 2


def plain(model: Outer, told: list[str]) -> None:
    pass


def replaced_forward(model: Outer, told: list[str]) -> None:
    model.inner.forward = lambda x: x * 3


def own_call(model: Outer, told: list[str]) -> None:
    model.inner = Doubling(3, 3)


def own_call_of_one(model: Outer, told: list[str]) -> None:
    usual = model.inner._call_impl
    model.inner._call_impl = lambda *args, **kwargs: usual(*args, **kwargs) * 11


def scripted(model: Outer, told: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.inner = torch.jit.script(nn.Linear(3, 3))


def without_some_attributes(model: Outer, told: list[str]) -> None:
    """As a module that was unpickled from an old file; PyTorch's own call raises."""
    del model.inner.__dict__["_backward_pre_hooks"]


def forward_hook(model: Outer, told: list[str]) -> None:
    model.inner.register_forward_hook(lambda module, args, output: output * 5)


def forward_pre_hook(model: Outer, told: list[str]) -> None:
    model.inner.register_forward_pre_hook(lambda module, args: (args[0] * 7,))


def backward_hook(model: Outer, told: list[str]) -> None:
    model.inner.register_full_backward_hook(lambda module, into, out: told.append(f"backward {out[0].sum():.4f}"))


def backward_pre_hook(model: Outer, told: list[str]) -> None:
    model.inner.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))


def compiled(model: Outer, told: list[str]) -> None:
    model.inner.compile(backend="eager")


WAYS = [
    *(plain, replaced_forward, own_call, own_call_of_one, scripted, compiled),
    *(forward_hook, forward_pre_hook, backward_hook, backward_pre_hook),
]


def trained(prepare: Callable[[Outer, list[str]], None]) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    told: list[str] = []
    model = Outer()
    prepare(model, told)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 3, requires_grad=True)
        model(x).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], told


@pytest.mark.parametrize("prepare", WAYS, ids=lambda way: way.__name__)
def test_what_stands_on_a_nested_module_counts(prepare: Callable[[Outer, list[str]], None]) -> None:
    expected, told = trained(prepare)
    with ampguard.watch():
        found, told_guarded = trained(prepare)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert told == told_guarded


def test_a_module_without_some_of_its_attributes_raises_what_it_raised() -> None:
    with pytest.raises(AttributeError) as expected:
        trained(without_some_attributes)
    with ampguard.watch(), pytest.raises(AttributeError) as found:
        trained(without_some_attributes)
    assert str(found.value) == str(expected.value)


@contextmanager
def on_all_modules(told: list[str]) -> Iterator[None]:
    handles = [
        register_module_forward_pre_hook(lambda module, args: told.append(f"into {type(module).__name__}")),
        register_module_forward_hook(lambda module, args, out: told.append(f"out of {type(module).__name__}")),
        register_module_full_backward_hook(lambda module, into, out: told.append(f"back {type(module).__name__}")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_on_all_modules_are_called() -> None:
    def trained_under_hooks() -> list[str]:
        told: list[str] = []
        with on_all_modules(told):
            trained(plain)
        return told

    expected = trained_under_hooks()
    with ampguard.watch():
        assert trained_under_hooks() == expected
    assert {"into Linear", "out of Linear", "back Linear"} <= set(expected)


def test_a_traced_module_keeps_its_scopes() -> None:
    """`torch.jit.trace` calls `_slow_forward`, which names the scopes of modules."""
    model = Outer().eval()
    x = torch.ones(2, 3)
    with ampguard.watch():
        model(x)
        with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
            traced = torch.jit.trace(model, x)
    assert "prim::CallMethod" in str(traced.graph)
    assert torch.equal(traced(x), model(x))
