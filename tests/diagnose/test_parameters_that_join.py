"""Parameters that are added to an optimizer in the middle of a run, by a trainer that clears only those of its beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

Guard = Callable[..., Any]


@pytest.mark.parametrize("made_late", [True, False])
@pytest.mark.parametrize("clears_all", [True, False])
def test_a_group_that_is_never_cleared(made_late: bool, clears_all: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.ModuleDict({"first": nn.Linear(6, 1)})
        second = nn.Linear(6, 1)
        net.forward = lambda x: sum(layer(x) for layer in net.values())
        cleared = list(net.parameters())
        opt = torch.optim.SGD(cleared, lr=0.01)
        for it in range(24):
            if it == 11:
                net["second"] = nn.Linear(6, 1) if made_late else second
                opt.add_param_group({"params": list(net["second"].parameters())})
            loss = (net(torch.randn(16, 6)) - 1).pow(2).mean()
            for p in net.parameters() if clears_all else cleared:
                p.grad = None
            loss.backward()
            opt.step()

    incidents = guard(body).report.incidents
    if clears_all:
        assert not incidents
    else:
        (incident,) = incidents
        assert (incident.cause, incident.step, incident.location.code) == ("missing-zero-grad", 12, "opt.step()")


class Unfreezing:
    """A head is trained first; its body joins in iteration 11."""

    def __init__(self, keeps_gradients: bool = True) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        self.body.requires_grad_(keeps_gradients)
        self.opt = torch.optim.SGD(self.head.parameters(), lr=0.01)
        self.opts = [self.opt]

    def backward(self) -> None:
        (self.head(torch.tanh(self.body(torch.randn(16, 6)))) - 1).pow(2).mean().backward()

    def step(self) -> None:
        for opt in self.opts:
            opt.step()

    def clear(self) -> None:
        for opt in self.opts:
            opt.zero_grad()

    def join(self) -> None:
        self.body.requires_grad_(True)
        self.opt.add_param_group({"params": list(self.body.parameters())})

    def join_another(self) -> None:
        self.body.requires_grad_(True)
        self.opts.append(torch.optim.SGD(self.body.parameters(), lr=0.01))


@pytest.mark.parametrize("join", ["join", "join_another"])
def test_gradients_that_piled_up_before_their_parameters_joined(join: str, guard: Guard) -> None:
    def body() -> None:
        loop = Unfreezing()
        for it in range(24):
            if it == 11:
                getattr(loop, join)()
            loop.backward()
            loop.step()
            loop.clear()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.severity, incident.step) == ("missing-zero-grad", "error", 11)
    assert incident.location.function == join
    assert incident.evidence["parameters"] == ["weight", "bias"]


def test_one_iteration_left_by_the_phase_before_is_not_worth_a_word(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(6, 1)
        for phase in range(3):
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(12):
                if phase != 1:
                    opt.zero_grad()
                (net(torch.randn(16, 6)) - 1).pow(2).mean().backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                if phase == 1:
                    opt.zero_grad()

    assert not guard(body).report.incidents


@pytest.mark.parametrize("way", ["cleared first", "cleared by hand", "no gradients", "joins behind a backward pass"])
@pytest.mark.parametrize("join", ["join", "join_another"])
def test_parameters_that_join_as_they_should(way: str, join: str, guard: Guard) -> None:
    def body() -> None:
        loop = Unfreezing(keeps_gradients=way != "no gradients")
        for it in range(24):
            if way == "joins behind a backward pass":
                for p in loop.body.parameters():
                    p.grad = None
            if it == 11 and way != "joins behind a backward pass":
                getattr(loop, join)()
                if way == "cleared by hand":
                    for p in loop.body.parameters():
                        p.grad.zero_()
            if way == "cleared first":
                loop.clear()
            loop.backward()
            if it == 11 and way == "joins behind a backward pass":
                getattr(loop, join)()
            loop.step()
            if way != "cleared first":
                loop.clear()

    assert not guard(body).report.incidents
