"""LossScale moves as GradScaler does, goes on from its checkpoints, and refuses what is none."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampguard.engine.step import LossScale
from ampguard.errors import UsageError

SETTINGS: dict[str, Any] = {"init_scale": 512.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}


def grad_scaler(**options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **options)
    scaler.scale(torch.ones(()))
    return scaler


def update(scaler: torch.amp.GradScaler, found: list[bool]) -> None:
    """Let GradScaler see optimizers of which some have infinite gradients."""
    optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0) for _ in found]
    for optimizer, is_bad in zip(optimizers, found, strict=True):
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([torch.inf if is_bad else 1.0])
        scaler.unscale_(optimizer)
    scaler.update()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=3), max_size=12))
def test_moves_as_grad_scaler_does(iterations: list[list[bool]]) -> None:
    ours, theirs = LossScale(**SETTINGS), grad_scaler(**SETTINGS)
    tensor = ours.value
    for found in iterations:
        ours.update([torch.tensor(float(is_bad)) for is_bad in found])
        update(theirs, found)
        assert ours.state_dict() == theirs.state_dict()
    assert ours.value is tensor


def test_checkpoints_are_exchanged_with_grad_scaler() -> None:
    ours, theirs = LossScale(), grad_scaler(**SETTINGS)
    update(theirs, [False])
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    ours.update([torch.zeros(())])
    back = grad_scaler()
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == ours.state_dict()
    assert back.get_scale() == 512.0


def test_does_not_fall_below_its_floor() -> None:
    scale = LossScale(init_scale=8.0, min_scale=2.0)
    for _ in range(5):
        scale.update([torch.ones(())])
    assert scale.value == 2.0
    collapsing = LossScale(init_scale=1.0)
    for _ in range(200):
        collapsing.update([torch.ones(())])
    assert collapsing.value > 0
    assert collapsing.value.reciprocal().isfinite()


def test_scales_what_a_script_may_call_its_loss() -> None:
    scale = LossScale(init_scale=4.0)
    Pair = namedtuple("Pair", "a b")
    one = torch.ones(2, requires_grad=True)
    assert torch.equal(scale.scale(one), torch.full((2,), 4.0))
    nested = scale.scale({"a": [one, (one,)], "b": Pair(one, one)})
    assert isinstance(nested["b"], Pair)
    assert isinstance(nested["a"][1], tuple)
    assert [t.sum().item() for t in scale.scale(t for t in (one, one))] == [8.0, 8.0]
    nested["b"].a.sum().backward()
    assert torch.equal(one.grad, torch.full((2,), 4.0))  # type: ignore[arg-type]
    half = torch.tensor(2.0, dtype=torch.float16)
    assert torch.equal(scale.scale(half), grad_scaler(init_scale=4.0).scale(half))
    with pytest.raises(UsageError, match="got float"):
        scale.scale(1.0)


def test_update_needs_a_check() -> None:
    with pytest.raises(UsageError, match="no gradients were checked"):
        LossScale().update([])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": None}, r"scale=None"),
        ({"scale": float("nan")}, "not a finite number"),
        ({"scale": 0.0}, "must be above 0"),
        ({"scale": True}, "not a finite number"),
        ({"growth_factor": 0.5}, "growth factor"),
        ({"backoff_factor": 1.0}, "backoff factor"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"growth_interval": 2.5}, "growth_interval=2.5"),
        ({"_growth_tracker": -1}, "_growth_tracker=-1"),
    ],
)
def test_a_bad_checkpoint_changes_nothing(change: dict[str, Any], words: str) -> None:
    scale = LossScale(**SETTINGS)
    before = scale.state_dict()
    with pytest.raises(UsageError, match=words):
        scale.load_state_dict({**LossScale().state_dict(), **change})
    truncated = LossScale().state_dict()
    del truncated["scale"], truncated["_growth_tracker"]
    with pytest.raises(UsageError, match="lacks 'scale', '_growth_tracker'"):
        scale.load_state_dict(truncated)
    with pytest.raises(UsageError, match="switched off"):
        scale.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert scale.state_dict() == before


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="growth factor"):
        LossScale(growth_factor=0.9)
    with pytest.raises(UsageError, match="min_scale=8"):
        LossScale(init_scale=4.0, min_scale=8.0)
