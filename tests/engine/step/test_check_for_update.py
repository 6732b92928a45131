"""The cheapest check that an update can do with: without a norm, and with the division where the optimizer cannot divide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import SCALE, Theirs, assert_alike, copies, give, parameters
from torch import Tensor, nn, optim

from ampguard.engine.step import LossScale, apply_update, check_for_update, check_gradients, unscale_gradients
from ampguard.engine.step.gradients import CACHED
from ampguard.errors import UsageError

SHAPES = [(7, 5), (16,), (40, 130)]
KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (optim.AdamW, {}),
    "AdamW, foreach": (optim.AdamW, {"foreach": True}),
    "RMSprop": (optim.RMSprop, {}),
    "NAdam": (optim.NAdam, {}),
    "Adamax": (optim.Adamax, {}),
}


def held(*gradients: Tensor) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in gradients]
    for p, gradient in zip(found, gradients, strict=True):
        p.grad = gradient
    return found


class Cheapest:
    """Our sequence with the check that it needs."""

    def __init__(self, of: list[nn.Parameter], kind: type[optim.Optimizer], **options: Any) -> None:
        self.parameters, self.optimizer = of, kind(of, **options)
        self.loss_scale = LossScale(init_scale=SCALE)

    def step(self, gradients: list[Tensor], max_norm: float | None) -> None:
        give(self.parameters, gradients)
        check = check_for_update([self.optimizer], self.parameters, self.loss_scale.value, max_norm)
        assert (check.norm is None) == (max_norm is None)
        apply_update(self.optimizer, check, max_norm)
        self.loss_scale.update([check.found_inf])


@pytest.mark.parametrize("max_norm", [None, 1.0, math.inf])
@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_pytorch(name: str, max_norm: float | None) -> None:
    kind, options = KINDS[name]
    start = parameters(SHAPES)
    theirs, ours = Theirs(copies(start), kind, **options), Cheapest(copies(start), kind, **options)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        gradients = [torch.randn(shape, generator=generator) * SCALE for shape in SHAPES]
        if number in (0, 2):
            gradients[number][0] = torch.nan
        theirs.step(gradients, max_norm)
        ours.step(gradients, max_norm)
        assert_alike(theirs, ours)  # type: ignore[arg-type]
    assert ours.loss_scale.state_dict() == theirs.scaler.state_dict()


@pytest.mark.parametrize(("name", "divided"), [("SGD", False), ("RMSprop", True), ("AdamW, foreach", True)])
@pytest.mark.parametrize("may_write", [True, False])
def test_who_divides(name: str, divided: bool, may_write: bool) -> None:
    kind, options = KINDS[name]
    p = held(torch.full((4,), 8.0))
    check = check_for_update([kind(p, **options)], p, torch.tensor(8.0), may_write=may_write)
    factor, gradient = (1.0, 1.0) if divided and may_write else (0.125, 8.0)
    assert (check.inverse_scale.item(), p[0].grad.tolist()) == (factor, [gradient] * 4)  # type: ignore[union-attr]


def test_one_that_divides_by_itself_keeps_all_gradients_scaled() -> None:
    one, two = held(torch.full((4,), 8.0)), held(torch.full((3,), 8.0))
    both = [optim.RMSprop(one), optim.AdamW(two)]
    assert check_for_update(both, [*one, *two], torch.tensor(8.0)).inverse_scale.item() == 0.125
    assert one[0].grad.tolist() == [8.0] * 4  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 4, dtype=torch.bfloat16),
        lambda: torch.full((4,), 6e-8, dtype=torch.float16),
        lambda: torch.arange(6.0).reshape(2, 3).t(),
        lambda: torch.tensor(2.0).expand(4),
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,), check_invariants=True),
    ],
    ids=["bfloat16", "float16", "transposed", "expanded", "complex", "sparse"],
)
def test_what_is_not_divided_is_left_as_it_was(make: Callable[[], Tensor]) -> None:
    """None would keep its digits, or its elements, in the pass."""
    gradient = make()
    p = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    q = nn.Parameter(torch.zeros(3))
    p.grad, q.grad = gradient.clone() if gradient.is_sparse else gradient, torch.full((3,), 4.0)
    before = gradient.to_dense().clone()
    assert unscale_gradients([q, p], torch.tensor(4.0)) is None
    check = check_gradients([q, p], torch.tensor(4.0), wants_norm=False)
    assert (check.norm, check.found_inf.item(), check.inverse_scale.item()) == (None, 0.0, 0.25)
    assert torch.equal(p.grad.to_dense(), before)
    assert q.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [4, CACHED + 1])
def test_one_bad_element_is_found_without_a_norm(bad: float, dtype: torch.dtype, size: int) -> None:
    gradients = [torch.ones(5, 5), torch.full((size,), 3e4, dtype=dtype), torch.tensor([-0.0, 1e-45])]
    assert check_gradients(held(*gradients), wants_norm=False).found_inf.item() == 0.0
    assert torch.signbit(gradients[2][0])  # written back bit by bit
    assert gradients[2][1] > 0
    gradients[1][size // 2] = bad
    assert check_gradients(held(*gradients), wants_norm=False).found_inf.item() == 1.0


def test_clipping_needs_the_norm() -> None:
    p = held(torch.ones(3))
    check = check_gradients(p, wants_norm=False)
    with pytest.raises(UsageError, match="norm was not measured"):
        apply_update(optim.SGD(p, lr=1.0), check, 1.0)
    assert p[0].tolist() == [0.0] * 3


def test_a_parameter_that_moved_is_looked_at_again() -> None:
    """What is remembered of parameters is forgotten when their memory changes."""
    whole = torch.zeros(4, 4)
    p = nn.Parameter(torch.zeros(4, 2))
    optimizer = optim.SGD([p], lr=1.0, fused=True)
    for data in (p.data, whole[:, :2], torch.zeros(4, 2), torch.zeros(2, 4).t()):
        p.data = data
        p.grad = torch.full((4, 2), 4.0)
        apply_update(optimizer, check_for_update([optimizer], [p], torch.tensor(4.0)))
        assert torch.equal(p.detach(), -torch.ones(4, 2))
    assert torch.equal(whole, torch.tensor([-1.0, -1.0, 0.0, 0.0]).expand(4, 4))
