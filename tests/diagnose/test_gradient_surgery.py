"""Gradients that a script combines and puts into `.grad` itself: do they carry the loss scale when they are used?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import clip_grad_norm_

Guard = Callable[..., Any]
Script = Callable[[], None]


def flat(gradients: Any, parameters: list[nn.Parameter]) -> Tensor:
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).detach().reshape(-1) for g, p in pairs])


def projected(tasks: list[Tensor]) -> Tensor:
    """PCGrad: of two gradients that are in conflict, each loses its part along the other."""
    out = [g.clone() for g in tasks]
    for i, g in enumerate(out):
        for j, other in enumerate(tasks):
            dot = torch.dot(g, other)
            if i != j and dot < 0:
                g -= dot / other.square().sum() * other
    return torch.stack(out).mean(0)


def dropped(tasks: list[Tensor]) -> Tensor:
    """GradDrop: elements in conflict are left out; no combination of the tasks' gradients."""
    total = torch.stack(tasks).sum(0)
    return torch.where((tasks[0] * tasks[1]) < 0, torch.zeros_like(total), total)


def normalised(tasks: list[Tensor]) -> Tensor:
    total = torch.stack(tasks).sum(0)
    return total / total.norm()


class Parts:
    """What a script is made of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)

    def losses(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        return F.mse_loss(out[:, 0].float(), x.sum(1)), F.mse_loss(out[:, 1].float(), x[:, 0])

    def by_grad(self, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = [torch.autograd.grad(of(loss), self.parameters, retain_graph=True) for loss in self.losses()]
        return [flat(gradients, self.parameters) for gradients in found]

    def by_backward(self, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        found = []
        for loss in self.losses():
            self.optimizer.zero_grad()
            of(loss).backward(retain_graph=True)
            found.append(flat([p.grad for p in self.parameters], self.parameters))
        return found

    def put(self, gradient: Tensor) -> None:
        parts = gradient.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.grad = part.view_as(p).clone()


def script(
    use: Callable[[Parts], None],
    combine: Callable[[list[Tensor]], Tensor] = projected,
    by: Callable[..., list[Tensor]] = Parts.by_grad,
    divides: bool = False,
    scales: bool = True,
) -> Script:
    def body() -> None:
        parts = Parts()
        parts.scaler.scale(torch.zeros(()))
        inverse = 1.0 / parts.scaler.get_scale() if divides else 1.0
        for _ in range(12):
            of: Callable[[Tensor], Tensor] = parts.scaler.scale if scales else (lambda loss: loss)
            parts.put(combine(by(parts, of)) * inverse)
            use(parts)

    return body


def clips_scaled(parts: Parts) -> None:
    clip_grad_norm_(parts.parameters, 1.0)
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()


def clips_unscaled(parts: Parts) -> None:
    parts.scaler.unscale_(parts.optimizer)
    clips_scaled(parts)


def steps(parts: Parts) -> None:
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()


def steps_past_the_scaler(parts: Parts) -> None:
    parts.optimizer.step()


def clips_and_steps_past_the_scaler(parts: Parts) -> None:
    clip_grad_norm_(parts.parameters, 1.0)
    parts.optimizer.step()


BROKEN = {
    "clipped": (script(clips_scaled), "clip-before-unscale", "clip_grad_norm_(parts.parameters, 1.0)"),
    "stepped": (script(steps_past_the_scaler), "bypassed-scaler", "parts.optimizer.step()"),
    "no combination": (script(steps_past_the_scaler, dropped), "bypassed-scaler", "parts.optimizer.step()"),
    "by backward": (
        script(steps_past_the_scaler, by=Parts.by_backward),
        "bypassed-scaler",
        "parts.optimizer.step()",
    ),
    "divided, then by the scaler": (
        script(steps, divides=True),
        "double-unscale",
        "parts.scaler.step(parts.optimizer)",
    ),
    "never scaled": (
        script(steps, scales=False),
        "unscaled-backward",
        "found = [torch.autograd.grad(of(loss), self.parameters, retain_graph=True) for loss in self.losses()]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_them_is_told(guard: Guard, name: str) -> None:
    body, cause, code = BROKEN[name]
    run = guard(body)
    assert run.causes == [cause]
    assert run.first.step == 0
    assert run.first.location.code == code


RIGHT = {
    "unscaled, then clipped": script(clips_unscaled),
    "no combination": script(clips_unscaled, dropped),
    "by backward": script(clips_unscaled, by=Parts.by_backward),
    "stepped by the scaler": script(steps),
    "divided by hand": script(steps_past_the_scaler, divides=True),
    "divided by hand, clipped": script(clips_and_steps_past_the_scaler, divides=True),
    "divided by hand, by backward": script(clips_and_steps_past_the_scaler, by=Parts.by_backward, divides=True),
    "never scaled": script(clips_and_steps_past_the_scaler, scales=False),
    "of length one": script(steps_past_the_scaler, normalised),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_silent(guard: Guard, name: str) -> None:
    assert guard(RIGHT[name]).causes == []


def heads_and_trunk(of_tasks: str) -> Script:
    """The sum of the losses gives the heads their gradients; the trunk's are replaced by the tasks' projected ones."""

    def body() -> None:
        torch.manual_seed(0)
        trunk, heads = nn.Sequential(nn.Linear(6, 24), nn.Tanh()), nn.ModuleList(nn.Linear(24, 1) for _ in range(2))
        shared = list(trunk.parameters())
        optimizer = torch.optim.Adam([*shared, *heads.parameters()], lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for _ in range(10):
            x = torch.randn(16, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                hidden = trunk(x)
                outs = [head(hidden).float() for head in heads]
            losses = [F.mse_loss(outs[0], x[:, :1]), F.mse_loss(outs[1], x[:, 1:2] - x[:, :1])]
            optimizer.zero_grad()
            of = scaler.scale if of_tasks == "scaled" else (lambda loss: loss)
            taken = [torch.autograd.grad(of(loss), shared, retain_graph=True) for loss in losses]
            tasks = [flat(gradients, shared) for gradients in taken]
            scaler.scale(sum(losses)).backward()
            for p, part in zip(shared, projected(tasks).split([p.numel() for p in shared]), strict=True):
                p.grad = part.view_as(p).clone()
            scaler.step(optimizer)
            scaler.update()

    return body


def test_some_are_replaced_by_unscaled_ones(guard: Guard) -> None:
    run = guard(heads_and_trunk("unscaled"))
    assert run.causes == ["unscaled-backward"]
    assert (run.first.step, run.first.evidence["factor"]) == (0, 1 / 4096)
    assert run.first.location.code.startswith("taken = [torch.autograd.grad(")


def test_some_are_replaced_by_scaled_ones(guard: Guard) -> None:
    assert guard(heads_and_trunk("scaled")).causes == []


def test_an_optimizer_of_its_own_inside_the_surgery(guard: Guard) -> None:
    """Its first steps make the outer iteration one that is looked at closely, from the middle on."""

    def body() -> None:
        parts = Parts()
        for _ in range(24):
            scale = parts.scaler.get_scale()
            tasks = [g / scale for g in parts.by_backward(parts.scaler.scale)]
            weights = torch.zeros(2, requires_grad=True)
            inner = torch.optim.SGD([weights], lr=0.1)
            for _ in range(8):
                inner.zero_grad()
                (torch.softmax(weights, 0) @ torch.stack(tasks)).square().sum().backward()
                inner.step()
            parts.put((torch.softmax(weights.detach(), 0)[:, None] * torch.stack(tasks)).sum(0))
            clips_and_steps_past_the_scaler(parts)

    assert guard(body).causes == []
