"""Gradients that a script divides by itself beside its scaler: wrongly, rightly, and by another number than the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
SCALE = 64.0


def found(run: Any) -> list[Any]:
    assert run.faults == 0, run.stderr
    return [i for i in run.report.incidents if i.severity != "info"]


def trained(
    change: Callable[[Any, Any, list[Tensor]], None], by_scaler: bool = True, clips: bool = True
) -> Callable[[], None]:
    """`change` gets the scaler, the optimizer and the gradients after each backward pass."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(5):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(64, 4))
            scaler.scale(out.float().square().sum() / 64).backward()
            change(scaler, opt, [p.grad for p in model.parameters() if p.grad is not None])
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            if by_scaler:
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()

    return body


def unscaled_and_divided(scaler: Any, opt: Any, grads: list[Tensor]) -> None:
    scaler.unscale_(opt)
    torch._foreach_mul_(grads, 1.0 / scaler.get_scale())


def test_divided_by_the_scaler_and_then_by_the_script(guard: Guard) -> None:
    (incident,) = found(guard(trained(unscaled_and_divided)))
    assert (incident.cause, incident.step) == ("double-unscale", 0)
    assert "by the scaler at" in incident.explanation
    assert "64 times too small" in incident.explanation
    assert incident.location.code == "torch._foreach_mul_(grads, 1.0 / scaler.get_scale())"


def test_divided_by_the_number_of_samples_that_happens_to_be_the_scale(guard: Guard) -> None:
    def change(scaler: Any, opt: Any, grads: list[Tensor]) -> None:
        for grad in grads:
            grad.div_(64)

    assert found(guard(trained(change, clips=False))) == []


def test_divided_by_hand_with_one_call_before_a_step_of_its_own(guard: Guard) -> None:
    def change(scaler: Any, opt: Any, grads: list[Tensor]) -> None:
        torch._foreach_mul_(grads, 1.0 / scaler.get_scale())

    assert found(guard(trained(change, by_scaler=False))) == []


def test_clipped_by_hand_after_unscaling(guard: Guard) -> None:
    def change(scaler: Any, opt: Any, grads: list[Tensor]) -> None:
        scaler.unscale_(opt)
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        torch._foreach_mul_(grads, float(0.001 / norm))

    assert found(guard(trained(change))) == []
