"""Tensor classes that are asked about every call: the guard asks them for nothing, and replays what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]

STEPS = 8
BAD_STEP = 6


def name_of(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def logging_class() -> tuple[type[Tensor], list[str]]:
    """The class of PyTorch's own page on extending it: it writes down whatever it is asked."""
    seen: list[str] = []

    class Logging(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(name_of(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    return Logging, seen


def strict_class(known: frozenset[str]) -> type[Tensor]:
    """A class that refuses what it does not know; a tensor with a `gain` comes out of a layer that much larger."""

    class Strict(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if name_of(func) not in known:
                raise NotImplementedError(f"no {name_of(func)} of a quantity")
            result = super().__torch_function__(func, types, args, kwargs or {})
            gain = getattr(args[0], "gain", 1.0)
            return result * gain if gain != 1.0 else result

    return Strict


KNOWN = frozenset({"linear", "relu", "square", "mean", "mul", "backward"})


def train(batches: list[Tensor]) -> Any:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fingerprint(model, optimizer)


def batches_of(kind: type[Tensor]) -> list[Tensor]:
    seed_everything()
    rows = np.random.randn(STEPS, 5, 4).astype("f4")
    return [Tensor._make_subclass(kind, torch.from_numpy(batch)) for batch in rows]


def test_a_class_is_asked_what_the_script_asks(guard: Guard) -> None:
    def body() -> Any:
        kind, seen = logging_class()
        seed_everything()
        return train([torch.randn(5, 4).as_subclass(kind) for _ in range(STEPS)]), seen

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain


def test_a_class_that_was_there_before_the_guard(guard: Guard) -> None:
    kind, seen = logging_class()
    batches = batches_of(kind)
    train(batches)
    expected = seen[:]
    seen.clear()
    guard(lambda: train(batches))
    assert seen == expected


def test_a_class_that_refuses_leaves_the_guard_on(guard: Guard) -> None:
    def body() -> Any:
        return train(batches_of(strict_class(KNOWN)))

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    assert run.report.steps == STEPS
    assert run.causes == []


def test_a_failure_that_such_a_class_makes_is_explained(guard: Guard) -> None:
    def body() -> Any:
        batches = batches_of(strict_class(KNOWN))
        batches[BAD_STEP].gain = 1e30  # type: ignore[attr-defined]
        return train(batches)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("overflow", BAD_STEP)
    assert any(fix.verified for fix in run.first.fixes)


def test_a_function_mode_counts_no_call_of_ours(guard: Guard) -> None:
    class Counting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(name_of(func))
            return func(*args, **(kwargs or {}))

    def body() -> Any:
        with Counting() as mode:
            x = torch.tensor([1.0, float("nan")])
            return str(x), str(x[1]), x.tolist()[0], x[1].numpy().ndim, mode.seen

    plain = body()
    assert str(guard(body).result) == str(plain)


def test_a_class_whose_base_is_told_of_its_children(guard: Guard) -> None:
    def body() -> Any:
        told = []

        class Registry:
            def __init_subclass__(cls, **options: Any) -> None:
                told.append((cls.__name__, options))
                super().__init_subclass__()

        class Registered(Tensor, Registry, key="one"):
            pass

        return told, "__init_subclass__" in vars(Registered)

    before = Tensor.__init_subclass__
    assert guard(body).result == ([("Registered", {"key": "one"})], False)
    assert Tensor.__init_subclass__ == before
    assert "__init_subclass__" not in vars(Tensor)
