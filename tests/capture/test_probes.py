"""What a probe installs it removes, and a nested call is nobody's business."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode
from watching import Watched

import ampguard
from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.patches import Patches
from ampguard.capture.probes import Probes
from ampguard.capture.record import RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import StopRun

Guard = Callable[..., Watched]

PATCHED: list[tuple[Any, str]] = [
    (nn.Module, "__call__"),
    (nn.Module, "train"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "step"),
    (torch.amp.GradScaler, "update"),
    (Optimizer, "__init__"),
    (Optimizer, "zero_grad"),
    *[(iterator, "__next__") for iterator in compat.loader_iterators()],
]


class Silent:
    def on_bad(self, bad: Any) -> None: ...
    def on_step(self, step: int) -> None: ...
    def on_forward(self) -> None: ...


def attributes() -> list[Any]:
    return [vars(owner)[name] for owner, name in PATCHED]


def hooks() -> tuple[int, int]:
    return len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)


def test_undo_puts_back_every_original_object() -> None:
    before, hooks_before = attributes(), hooks()
    probes = Probes(FlightRecorder(Silent(), FaultBarrier(lambda fault: None)))
    probes.install()
    during, hooks_during = attributes(), hooks()
    probes.undo()

    assert all(new is not old for new, old in zip(during, before, strict=True))
    assert all(new is old for new, old in zip(attributes(), before, strict=True))
    assert hooks_during != hooks_before == hooks()


def test_every_class_and_module_of_torch_is_as_before(tmp_path: Path) -> None:
    """Not only the attributes that we know of."""
    owners = [torch, torch.Tensor, torch.autograd, nn.Module, nn.functional, torch.amp.GradScaler, Optimizer, torch.amp]
    owners += [torch.utils.data.DataLoader, torch.optim.AdamW, torch.nn.utils, torch.cuda.amp, torch.func]
    before = [dict(vars(owner)) for owner in owners]
    with ampguard.watch(out=tmp_path / "run"):
        model = nn.Linear(2, 1)
        model(torch.full((1, 2), float("nan"))).sum().backward()
    for owner, was in zip(owners, before, strict=True):
        now = vars(owner)
        assert [name for name in was if now.get(name) is not was[name]] == []
        assert set(now) - set(was) == set()


def test_ending_by_exception_and_by_stop_puts_back_too(tmp_path: Path) -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), ampguard.watch(out=tmp_path / "a"):
        raise ZeroDivisionError
    with ampguard.watch(out=tmp_path / "b"):
        raise StopRun("enough", 0)
    assert all(new is old for new, old in zip(attributes(), before, strict=True))
    assert _get_current_dispatch_mode() is None


def test_guard_within_a_guard(tmp_path: Path) -> None:
    before = attributes()
    with ampguard.watch(out=tmp_path / "a") as outer, ampguard.watch(out=tmp_path / "b") as inner:
        nn.Linear(2, 1)(torch.full((1, 2), float("nan"))).sum().backward()
    assert all(new is old for new, old in zip(attributes(), before, strict=True))
    assert outer.report is not None
    assert inner.report is not None
    assert "nonfinite-input" in [i.cause for s in (outer, inner) for i in s.report.incidents]  # type: ignore[union-attr]
    while _get_current_dispatch_mode() is not None:  # the next test's business
        _pop_mode()


def test_guard_within_a_guard_leaves_nothing_on_the_stack(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "a"), ampguard.watch(out=tmp_path / "b"):
        nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
    left = []
    while _get_current_dispatch_mode() is not None:
        left.append(_pop_mode())
    assert left == []


class TestPatches:
    """`Patches` alone."""

    def test_replaces_and_undoes(self) -> None:
        class Owner:
            def method(self) -> int:
                return 1

        original = Owner.__dict__["method"]
        patches = Patches()
        patches.replace(Owner, "method", lambda old: lambda self: old(self) + 1)
        assert Owner().method() == 2
        patches.undo()
        assert Owner.__dict__["method"] is original

    def test_leaves_what_somebody_else_put_on_top(self) -> None:
        class Owner:
            def method(self) -> str:
                return "original"

        patches = Patches()
        patches.replace(Owner, "method", lambda old: lambda self: "ours " + old(self))
        ours = Owner.method
        Owner.method = lambda self: "theirs " + ours(self)  # type: ignore[method-assign]
        patches.undo()
        assert Owner().method() == "theirs ours original"


class Nest(nn.Module):
    """A chain of modules, one in another."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Nest(depth - 1) if depth else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_nested_call_leaves_no_record(guard: Guard) -> None:
    model = Nest(30)

    def body() -> None:
        model(torch.ones(1))

    run = guard(body)

    roots = [e for e in run.session._recorder.log.record.events if isinstance(e, RootCall)]
    assert [root.module for root in roots] == [model]


def test_nested_call_costs_no_call_of_ours(guard: Guard) -> None:
    """A hundred nested modules make as many Python calls as without the guard, and no operator is looked at."""

    def calls_of(depth: int) -> int:
        model, x, calls = Nest(depth), torch.ones(1), 0

        def count(frame: types.FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        for _ in range(2):  # what is asked once of each module
            model(x)
        sys.setprofile(count)
        try:
            model(x)
        finally:
            sys.setprofile(None)
        return calls

    def per_nested_call() -> float:
        return (calls_of(110) - calls_of(10)) / 100

    assert guard(per_nested_call).result <= per_nested_call()


def test_importing_the_front_door_patches_nothing() -> None:
    before = attributes()
    import ampguard.run.session

    assert ampguard.run.session.Session
    assert all(new is old for new, old in zip(attributes(), before, strict=True))


def test_a_guard_that_ends_while_a_batch_is_fetched_leaves_nothing_on(tmp_path: Path) -> None:
    """The wrapper of the fetch comes back when the guard is gone."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    class Batches(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            with ampguard.watch(out=tmp_path / "run"):
                for _ in range(12):
                    yield torch.rand(3, 4)
            yield torch.rand(3, 4)

    left = []
    for x in torch.utils.data.DataLoader(Batches(), batch_size=None):
        left.append(compat.function_modes_on() + compat.dispatch_modes_on())
        optimizer.zero_grad()
        model(x - x.mean()).square().mean().backward()
        optimizer.step()
    assert left[-1] == 0
