"""GradNorm: weights of tasks that learn by how far norms of the tasks' gradients are apart, and whose loss carries the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]
ROUNDS = 16


class Tasks:
    """A shared layer, two heads, and a weight for each task. `steps`: how the weights are stepped."""

    def __init__(self, through_graph: bool, by_backward: bool, scaled: bool, steps_by_scaler: bool) -> None:
        self.through_graph, self.by_backward = through_graph, by_backward
        self.scaled, self.steps_by_scaler = scaled, steps_by_scaler
        torch.manual_seed(0)
        self.shared = nn.Linear(12, 24)
        self.heads = nn.ModuleList([nn.Linear(24, 1), nn.Linear(24, 1)])
        self.weights = nn.Parameter(torch.ones(2))
        self.opt = torch.optim.SGD([*self.shared.parameters(), *self.heads.parameters()], lr=1e-2)
        self.opt_w = torch.optim.SGD([self.weights], lr=1e-5)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)

    def norms(self, tasks: Tensor) -> Tensor:
        found = []
        for weight, loss in zip(self.weights, tasks, strict=True):
            outer = weight if not self.through_graph else 1.0
            inner = weight * loss if self.through_graph else loss
            inner = self.scaler.scale(inner) if self.scaled else inner
            gradient = torch.autograd.grad(
                inner, self.shared.weight, retain_graph=True, create_graph=self.through_graph
            )
            found.append((outer * gradient[0]).norm())
        return torch.stack(found)

    def train(self) -> None:
        for _ in range(ROUNDS):
            x = torch.randn(32, 12)
            with torch.autocast("cpu", dtype=torch.float16):
                hidden = torch.relu(self.shared(x))
                tasks = torch.stack([(h(hidden) - n * x[:, :1]).pow(2).mean() for n, h in enumerate(self.heads, 1)])
            self.opt.zero_grad()
            self.opt_w.zero_grad()
            self.scaler.scale((self.weights.detach() * tasks).sum()).backward(retain_graph=True)
            norms = self.norms(tasks)
            apart = (norms - norms.mean().detach()).abs().sum()
            if self.by_backward:
                apart.backward(inputs=[self.weights])
            else:
                self.weights.grad = torch.autograd.grad(apart, self.weights)[0]
            if self.steps_by_scaler:
                self.scaler.step(self.opt_w)
            else:
                self.opt_w.step()
            self.scaler.step(self.opt)
            self.scaler.update()


@pytest.mark.parametrize("by_backward", [False, True])
@pytest.mark.parametrize("through_graph", [False, True])
def test_they_carry_the_scale(through_graph: bool, by_backward: bool, guard: Guard) -> None:
    run = guard(lambda: Tasks(through_graph, by_backward, scaled=True, steps_by_scaler=False).train())

    assert run.faults == 0, run.stderr
    incident = run.report.incidents[0]
    assert (incident.cause, incident.step) == ("bypassed-scaler", 0)
    assert incident.location.code == "self.opt_w.step()"
    assert incident.evidence["factor"] == 256.0


@pytest.mark.parametrize("by_backward", [False, True])
@pytest.mark.parametrize("through_graph", [False, True])
def test_the_scaler_divides_them(through_graph: bool, by_backward: bool, guard: Guard) -> None:
    run = guard(lambda: Tasks(through_graph, by_backward, scaled=True, steps_by_scaler=True).train())

    assert run.faults == 0, run.stderr
    assert run.report.status == "clean"


@pytest.mark.parametrize("by_backward", [False, True])
@pytest.mark.parametrize("through_graph", [False, True])
def test_true_gradients_and_a_step_past_the_scaler(through_graph: bool, by_backward: bool, guard: Guard) -> None:
    run = guard(lambda: Tasks(through_graph, by_backward, scaled=False, steps_by_scaler=False).train())

    assert run.faults == 0, run.stderr
    assert run.report.status == "clean"
