"""What a script adds to gradients that carry the loss scale: something that carries it as well, or something that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
Change = Callable[[nn.Module, Any, Any, list[Tensor]], None]
DECAY = 0.02


def trained(change: Change) -> Callable[[], None]:
    """`change` gets the model, the optimizer, the scaler and copies of the first weights after each backward pass."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=4096.0)
        anchors = [p.detach().clone() for p in model.parameters()]
        for _ in range(5):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(64, 4))
            loss = out.float().square().mean()
            scaler.scale(loss).backward()
            loss.item()
            change(model, opt, scaler, anchors)
            scaler.step(opt)
            scaler.update()

    return body


def grads(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    return [(p, p.grad) for p in model.parameters() if p.grad is not None and p.ndim > 1]


def decay(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, g in grads(model):
        g.data.add_(p.data, alpha=DECAY)


def decay_anew(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, g in grads(model):
        p.grad = g + DECAY * p.detach()


def lasso(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, g in grads(model):
        g += 1e-3 * torch.sign(p.detach())


def pull(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, anchor in zip(model.parameters(), anchors, strict=True):
        if p.grad is not None:
            p.grad.add_(0.1 * (p.detach() - anchor))


def noise(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, g in grads(model):
        p.grad = g + torch.randn_like(g) * 0.01


def decay_of_all(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    torch._foreach_add_([g for _, g in grads(model)], [p.detach() for p, _ in grads(model)], alpha=DECAY)


@pytest.mark.parametrize("change", [decay, decay_anew, lasso, pull, noise, decay_of_all])
def test_what_carries_no_scale_is_told(change: Change, guard: Guard) -> None:
    run = guard(trained(change))

    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.severity) == ("unscaled-backward", 0, "error")
    assert incident.location.function == change.__name__
    assert "4096 times too small" in incident.explanation
    assert "scaler.unscale_(opt)" in incident.fixes[0].how


def scaled_decay(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, g in grads(model):
        g.add_(p.data, alpha=DECAY * scaler.get_scale())


def decay_of_true_gradients(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    scaler.unscale_(opt)
    decay(model, opt, scaler, anchors)


def relative_noise(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for _, g in grads(model):
        g.add_(torch.randn_like(g) * g.std() * 0.1)


def off_the_weights(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, g in grads(model):
        w = p.detach()
        g.sub_(w * ((w * g).sum() / (w * w).sum()))


def off_the_weights_by_a_number(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, g in grads(model):
        w = p.detach()
        along = torch.dot(w.flatten(), g.flatten()).item() / torch.dot(w.flatten(), w.flatten()).item()
        g.sub_(w * along)


def added_to_others(model: nn.Module, opt: Any, scaler: Any, anchors: list[Tensor]) -> None:
    for p, anchor in zip(model.parameters(), anchors, strict=True):
        anchor.mul_(0.9).add_(p.detach(), alpha=0.1)


@pytest.mark.parametrize(
    "change",
    [
        scaled_decay,
        decay_of_true_gradients,
        relative_noise,
        off_the_weights,
        off_the_weights_by_a_number,
        added_to_others,
    ],
)
def test_what_carries_the_scale_as_well_is_silent(change: Change, guard: Guard) -> None:
    run = guard(trained(change))
    assert (run.faults, run.report.incidents) == (0, ())
