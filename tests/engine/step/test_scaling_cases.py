"""PyTorch's own scaling cases with our step in place of GradScaler: weights equal the control's, which is not scaled."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from ampguard.engine.step import LossScale, apply_update, check_gradients

Case = tuple[nn.Module, nn.Module, optim.Optimizer, optim.Optimizer, list[tuple[Tensor, Tensor]], nn.Module, int]
START = 128.0


def of_pytorch(name: str) -> Any:
    """A function of `torch.testing._internal.common_cuda`, without what else that module imports."""
    path = Path(__file__).parents[2] / "torch_amp" / "installed.py"
    spec = importlib.util.spec_from_file_location("pieces_of_pytorch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.installed("common_cuda", name)


def case(kind: type[optim.Optimizer], options: dict[str, Any]) -> Case:
    made: Case = of_pytorch("_create_scaling_case")(device="cpu", optimizer_ctor=kind, optimizer_kwargs=options)
    return made


def scale() -> LossScale:
    return LossScale(init_scale=START, growth_factor=2.0, growth_interval=1)


def assert_same_weights(control: nn.Module, scaling: nn.Module, kind: type[optim.Optimizer] = optim.SGD) -> None:
    for c, s in zip(control.parameters(), scaling.parameters(), strict=True):
        torch.testing.assert_close(c, s, rtol=1e-5, atol=1e-7 if kind is optim.SGD else 1e-5)


KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    f"{kind.__name__}, {implementation or 'default'}": (
        kind,
        {"lr": 1.0 if kind is optim.SGD else 0.1} | ({implementation: True} if implementation else {}),
    )
    for kind in (optim.SGD, optim.Adam, optim.AdamW)
    for implementation in ("", "foreach", "fused")
}


@pytest.mark.parametrize("max_norm", [None, 0.2, 1e6], ids=["unclipped", "clipped", "below the limit"])
@pytest.mark.parametrize("name", KINDS)
def test_one_model(name: str, max_norm: float | None) -> None:
    kind, options = KINDS[name]
    control, scaling, control_optimizer, optimizer, data, criterion, skip = case(kind, options)
    loss_scale = scale()
    for number, (x, y) in enumerate(data):
        control_optimizer.zero_grad()
        criterion(control(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(control.parameters(), max_norm)
        if number != skip:
            control_optimizer.step()
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss_scale.scale(criterion(scaling(x), y)).backward()
        if number == skip:
            scaling[1].weight.grad.data.fill_(math.inf)  # type: ignore[index]
        check = check_gradients(scaling.parameters(), loss_scale.value)
        apply_update(optimizer, check, max_norm)
        loss_scale.update([check.found_inf])
    assert loss_scale.value == START * 2.0**3 * 0.5  # doubled three times, halved once
    assert_same_weights(control, scaling, kind)


@pytest.mark.parametrize("name", KINDS)
def test_accumulation(name: str) -> None:
    """Two batches for each step; the scale does not move within them."""
    kind, options = KINDS[name]
    control, scaling, control_optimizer, optimizer, data, criterion, _ = case(kind, options)
    loss_scale = scale()
    for number, (x, y) in enumerate(data):
        (criterion(control(x), y) / 2).backward()
        loss_scale.scale(criterion(scaling(x), y) / 2).backward()
        if number % 2:
            control_optimizer.step()
            control_optimizer.zero_grad()
            check = check_gradients(scaling.parameters(), loss_scale.value)
            apply_update(optimizer, check)
            loss_scale.update([check.found_inf])
            optimizer.zero_grad()
    assert loss_scale.value == START * 4
    assert_same_weights(control, scaling, kind)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("skips_both", [False, True], ids=["each its own verdict", "one verdict"])
def test_two_models_losses_and_optimizers(name: str, skips_both: bool) -> None:
    """One scale for both, moved once an iteration; the second model's gradients overflow once."""
    kind, options = KINDS[name]
    control0, scaled0, control_optimizer0, optimizer0, data, criterion, skip = case(kind, options)
    pair = of_pytorch("_create_scaling_models_optimizers")
    control1, scaled1, control_optimizer1, optimizer1 = pair(
        device="cpu", optimizer_ctor=kind, optimizer_kwargs=options
    )
    loss_scale = scale()

    def losses(one: nn.Module, two: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = one(x), two(x)
        return criterion(0.3 * a + 0.7 * b, y), criterion(0.6 * a - 0.4 * b, y)

    for number, (x, y) in enumerate(data):
        for optimizer in (control_optimizer0, control_optimizer1):
            optimizer.zero_grad()
        first, second = losses(control0, control1, x, y)
        first.backward(retain_graph=True)
        second.backward()
        if number != skip or not skips_both:
            control_optimizer0.step()
        if number != skip:
            control_optimizer1.step()
    for number, (x, y) in enumerate(data):
        for optimizer in (optimizer0, optimizer1):
            optimizer.zero_grad()
        first, second = loss_scale.scale(losses(scaled0, scaled1, x, y))
        first.backward(retain_graph=True)
        second.backward()
        if number == skip:
            scaled1[1].weight.grad.data.fill_(math.inf)
        if skips_both:
            both = check_gradients([*scaled0.parameters(), *scaled1.parameters()], loss_scale.value)
            checks = [both, both]
        else:
            checks = [check_gradients(m.parameters(), loss_scale.value) for m in (scaled0, scaled1)]
        apply_update(optimizer0, checks[0])
        apply_update(optimizer1, checks[1])
        loss_scale.update([check.found_inf for check in checks])
    assert loss_scale.value == START * 2.0**3 * 0.5
    assert_same_weights(control0, scaled0, kind)
    assert_same_weights(control1, scaled1, kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_under_autocast(dtype: torch.dtype) -> None:
    control, scaling, control_optimizer, optimizer, data, criterion, skip = case(optim.SGD, {"lr": 0.1})
    loss_scale = scale()
    for number, (x, y) in enumerate(data):
        control_optimizer.zero_grad()
        optimizer.zero_grad()
        criterion(control(x), y).backward()
        with torch.autocast("cpu", dtype=dtype):
            loss = criterion(scaling(x), y)
        loss_scale.scale(loss).backward()
        if number == skip:
            scaling[1].weight.grad.data.fill_(math.nan)  # type: ignore[index]
        else:
            control_optimizer.step()
        check = check_gradients(scaling.parameters(), loss_scale.value)
        apply_update(optimizer, check)
        loss_scale.update([check.found_inf])
    assert loss_scale.value == START * 4
    for c, s in zip(control.parameters(), scaling.parameters(), strict=True):
        torch.testing.assert_close(c, s, rtol=0.02, atol=0.02)
