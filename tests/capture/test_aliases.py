"""Names that a script has given to what a probe replaces are found, also by the second guard of a process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from watching import Watched

from ampguard.capture.probing.aliases import names_of, names_of_apply


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("users_own")
    monkeypatch.setitem(sys.modules, "users_own", module)
    return module


def test_names_given_between_two_looks_are_found(users: Any) -> None:
    assert not any(module is users for module, _ in [*names_of(torch.compile), *names_of_apply()])
    users.squeeze, users.twice, users.other = torch.compile, Twice.apply, Twice.mro
    assert [name for module, name in names_of(torch.compile) if module is users] == ["squeeze"]
    assert [name for module, name in names_of_apply() if module is users] == ["twice"]


def test_a_compiler_that_was_imported_by_name_is_watched(users: Any, guard: Callable[..., Watched]) -> None:
    original = users.squeeze = torch.compile
    assert guard(lambda: users.squeeze).result is not original
    assert users.squeeze is torch.compile is original
