"""A step that read a tensor and then wrote to a part of it is run again with what it read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampguard.capture.record import MAX_PARTS, Held
from ampguard.compat import whole_of


def written(tensor: Tensor, parts: list[Tensor], held: Held) -> None:
    for number, part in enumerate(parts):
        held.is_overwritten_in(part, part.detach().clone(), tensor._version)
        part.fill_(float(number))


@pytest.mark.parametrize(
    "parts_of",
    [
        lambda t: [t[2:4], t[3:6]],
        lambda t: [t[:, 1], t[0], t[1, 2]],
        lambda t: [t.T[2:4], t[::2]],
        lambda t: [t[i] for i in range(6)],
    ],
    ids=["rows", "columns", "strided", "one by one"],
)
@pytest.mark.parametrize("make", [lambda: torch.randn(6, 5), lambda: torch.randn(5, 6).T.clone()])
def test_the_value_of_before_comes_back(parts_of: Callable[[Tensor], list[Tensor]], make: Callable[[], Tensor]) -> None:
    tensor = make()
    before = tensor.clone()
    held = Held(tensor, tensor._version)
    written(tensor, parts_of(tensor), held)
    assert not torch.equal(tensor, before)
    assert held.is_intact
    now = tensor.clone()
    assert torch.equal(held.value, before)
    assert torch.equal(tensor, now)


def test_an_unseen_write_loses_it() -> None:
    tensor = torch.randn(6, 5)
    held = Held(tensor, tensor._version)
    written(tensor, [tensor[1]], held)
    tensor[2] = 0.0
    assert not held.is_intact
    written(tensor, [tensor[3]], held)
    assert not held.is_intact


def test_so_do_too_many() -> None:
    tensor = torch.randn(MAX_PARTS + 1, 2)
    held = Held(tensor, tensor._version)
    written(tensor, list(tensor), held)
    assert not held.is_intact


@pytest.mark.parametrize(
    ("make", "has_whole"),
    [
        (lambda: torch.randn(4, 3)[1:2], True),
        (lambda: torch.randn(4, 3), False),
        (lambda: torch.randn(4, 3).T, True),
        (lambda: torch.randn(4, 3).expand(2, 4, 3)[0], True),
    ],
)
def test_what_a_view_looks_into(make: Callable[[], Any], has_whole: bool) -> None:
    assert (whole_of(make()) is not None) == has_whole
