"""Our step is PyTorch's own sequence to the last digits, for each of its optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import SCALE, Ours, Theirs, assert_alike, copies, parameters
from torch import Tensor, optim

SHAPES = [(7, 5), (16,), (3, 2, 4), (1,), (40, 130)]
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, weight decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
    "SGD, dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD, nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD, maximize": (optim.SGD, {"lr": 0.1, "maximize": True, "weight_decay": 0.05}),
    "SGD, foreach": (optim.SGD, {"lr": 0.1, "foreach": True, "momentum": 0.9}),
    "SGD, fused": (optim.SGD, {"lr": 0.1, "fused": True, "momentum": 0.9}),
    "SGD, one by one": (optim.SGD, {"lr": 0.1, "fused": False}),
    "SGD, tensor lr": (optim.SGD, {"lr": torch.tensor(0.1)}),
    "Adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.05}),
    "Adam, foreach": (optim.Adam, {"lr": 0.01, "foreach": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "AdamW, tensor lr": (optim.AdamW, {"lr": torch.tensor(0.01)}),
    "AdamW, amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW, maximize": (optim.AdamW, {"lr": 0.01, "maximize": True}),
    "AdamW, fused": (optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW, one by one": (optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW, differentiable": (optim.AdamW, {"lr": 0.01, "differentiable": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.05}),
    "Adagrad, fused": (optim.Adagrad, {"lr": 0.1, "fused": True}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.01}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "Adafactor": (optim.Adafactor, {"lr": 0.01}),
}


def scaled_gradients(seed: int, length: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * length * SCALE for shape in SHAPES]


@pytest.mark.parametrize("max_norm", [None, 1.0, 1e6], ids=["unclipped", "clipped", "below the limit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, max_norm: float | None) -> None:
    kind, options = OPTIMIZERS[name]
    start = parameters(SHAPES)
    if options.get("differentiable"):
        start = [p.detach().clone() for p in start]  # type: ignore[misc]
    theirs, ours = Theirs(copies(start), kind, **options), Ours(copies(start), kind, **options)
    for number in range(6):
        gradients: list[Tensor | None] = list(scaled_gradients(number))
        if number == 1:
            gradients[1] = None  # a parameter that was not used
        if number == 3:
            gradients[0] = torch.full(SHAPES[0], torch.inf)
        theirs.step(gradients, max_norm)
        ours.step(gradients, max_norm)
        assert_alike(theirs, ours)
    assert ours.loss_scale.state_dict() == theirs.scaler.state_dict()
    assert ours.loss_scale.value == SCALE / 2


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3), min_size=1, max_size=6),
    exponent=st.integers(-12, 12),
    max_norm=st.one_of(st.none(), st.floats(1e-3, 1e3)),
    bad=st.sampled_from([None, None, torch.inf, -torch.inf, torch.nan]),
    kind=st.sampled_from([optim.SGD, optim.AdamW, optim.RMSprop]),
    seed=st.integers(0, 1000),
)
def test_any_shapes_and_lengths(
    sizes: list[list[int]], exponent: int, max_norm: float | None, bad: float | None, kind: Any, seed: int
) -> None:
    start = parameters([tuple(s) for s in sizes], seed)
    theirs, ours = Theirs(copies(start), kind, lr=0.01), Ours(copies(start), kind, lr=0.01)
    gradients = [torch.randn_like(p) * 2.0**exponent for p in start]
    if bad is not None:
        gradients[seed % len(gradients)].view(-1)[0] = bad
    theirs.step(gradients, max_norm)
    ours.step(gradients, max_norm)
    assert_alike(theirs, ours)
    assert ours.loss_scale.state_dict() == theirs.scaler.state_dict()


@pytest.mark.parametrize("name", ["SGD", "SGD, momentum", "AdamW", "AdamW, fused", "RMSprop", "Adagrad"])
def test_write_back(name: str) -> None:
    """Asked for, the gradients afterwards are the unscaled and clipped ones; after a skipped step they are untouched."""
    kind, options = OPTIMIZERS[name]
    theirs, ours = (one(parameters(SHAPES), kind, **options) for one in (Theirs, Ours))
    for max_norm in (None, 1.0, 1e6):
        gradients = scaled_gradients(1)
        theirs.step(gradients, max_norm)
        ours.step(gradients, max_norm, write_back=True)
        for a, b in zip(theirs.parameters, ours.parameters, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-6, atol=1e-9)
    gradients[0] = gradients[0] * torch.inf
    ours.step(gradients, 1.0, write_back=True)
    assert all(torch.equal(p.grad, g) for p, g in zip(ours.parameters, gradients, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["SGD, momentum", "AdamW", "AdamW, amsgrad", "Adagrad", "RMSprop"])
def test_state_goes_on_in_either(name: str) -> None:
    """A state that our steps left is continued by PyTorch's own loop, and the other way round."""
    kind, options = OPTIMIZERS[name]
    ours, theirs, control = (one(parameters(SHAPES), kind, **options) for one in (Ours, Theirs, Theirs))
    for number in range(4):
        control.step(scaled_gradients(number), 1.0)
        (ours if number < 2 else theirs).step(scaled_gradients(number), 1.0)
        if number == 1:
            theirs.optimizer.load_state_dict(ours.optimizer.state_dict())
            with torch.no_grad():
                for p, q in zip(theirs.parameters, ours.parameters, strict=True):
                    p.copy_(q)
    assert_alike(control, theirs)
    back = Ours(copies(theirs.parameters), kind, **options)
    back.optimizer.load_state_dict(theirs.optimizer.state_dict())
    control.step(scaled_gradients(9), 1.0)
    back.step(scaled_gradients(9), 1.0)
    assert_alike(control, back)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_types_against_float64(dtype: torch.dtype) -> None:
    """Within one rounding of the truth: also where PyTorch's fused SGD would leave most elements as they were."""
    start = parameters(SHAPES, dtype=dtype)
    truth = Theirs([torch.nn.Parameter(p.detach().double()) for p in start], optim.SGD, lr=0.1)
    ours = Ours(copies(start), optim.SGD, lr=0.1)
    gradients = [g.to(dtype) for g in scaled_gradients(5, length=0.01)]
    truth.step([g.double() for g in gradients], 0.5)
    ours.step(gradients, 0.5)
    digits = max(torch.finfo(dtype).eps, 1e-7)  # the norm and the scale are float32
    for a, b in zip(truth.parameters, ours.parameters, strict=True):
        torch.testing.assert_close(a, b.double(), rtol=digits, atol=digits * 0.01)


def test_a_tiny_norm_does_not_lengthen_gradients() -> None:
    ours = Ours(parameters([(4,)]), optim.SGD, lr=1.0)
    before = ours.parameters[0].detach().clone()
    ours.step([torch.full((4,), 1e-3)], 1.0)
    torch.testing.assert_close(before - ours.parameters[0], torch.full((4,), 1e-3 / SCALE), rtol=1e-2, atol=1e-7)
