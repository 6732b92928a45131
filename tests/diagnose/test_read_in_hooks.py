"""Hooks that read gradients in the middle of a scaled backward pass: what they show is told, what they use rightly is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
Put = Callable[[nn.Sequential, Any], None]
SCALE = 4096.0


def loop(put: Put, late: int = 0) -> Callable[[], None]:
    """`put` gets the model and the scaler before step number `late`."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step in range(14):
            if step == late:
                put(net, scaler)
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            scaler.scale(F.cross_entropy(out.float(), (x[:, 0] > 0).long())).backward()
            scaler.step(optimizer)
            scaler.update()

    return body


def show(text: str) -> None:
    assert text


def in_a_text(net: nn.Sequential, scaler: Any) -> None:
    for p in net.parameters():
        p.register_hook(lambda g: show(f"{g.norm():.3f}"))


def as_a_number(net: nn.Sequential, scaler: Any) -> None:
    def hook(gradient: Tensor) -> None:
        largest = gradient.abs().max().item()
        show(str(largest))

    for p in net.parameters():
        p.register_hook(hook)


def behind_the_sum(net: nn.Sequential, scaler: Any) -> None:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        show(str(p.grad.norm().item()))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)


def of_a_module(net: nn.Sequential, scaler: Any) -> None:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        show(f"{outputs[0].norm()}")

    net[2].register_full_backward_hook(hook)


def of_hidden_values(net: nn.Sequential, scaler: Any) -> None:
    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: show(str(float(g.norm()))))

    net[0].register_forward_hook(watch)


def against_a_limit(net: nn.Sequential, scaler: Any) -> None:
    def hook(gradient: Tensor) -> None:
        if gradient.norm() > 10.0:
            show("exploding")

    net[0].weight.register_hook(hook)


PUT = [in_a_text, as_a_number, behind_the_sum, of_a_module, of_hidden_values, against_a_limit]


@pytest.mark.parametrize("late", [0, 11])
@pytest.mark.parametrize("put", PUT)
def test_what_a_hook_shows_is_told(guard: Guard, put: Put, late: int) -> None:
    run = guard(loop(put, late))
    assert run.faults == 0, run.stderr
    assert run.causes == ["clip-before-unscale"]
    assert (run.first.severity, run.first.evidence["factor"]) == ("warning", SCALE)
    assert run.first.step == late
    assert "divide what the hook reads by scaler.get_scale()" in run.first.fixes[0].how


class Monitor:
    """Keeps the norms of one pass, and shows them later."""

    def __init__(self) -> None:
        self.norms: dict[int, float] = {}

    def watch(self, net: nn.Sequential, scaler: Any) -> None:
        for number, p in enumerate(net.parameters()):
            p.register_hook(self.hook_of(number))

    def hook_of(self, number: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.norms[number] = gradient.norm().item()

        return hook

    def report(self) -> None:
        show(f"{max(self.norms.values())}")


class Shares:
    """Keeps them as well, to say which share of the whole each of them is."""

    def __init__(self) -> None:
        self.sizes: dict[int, float] = {}

    def watch(self, net: nn.Sequential, scaler: Any) -> None:
        for number, p in enumerate(net.parameters()):
            p.register_hook(self.hook_of(number))

    def hook_of(self, number: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.sizes[number] = gradient.norm().item()

        return hook

    def report(self) -> None:
        total = sum(self.sizes.values())
        show(f"{max(self.sizes.values()) / total}")


def test_what_a_hook_keeps_and_others_show(guard: Guard) -> None:
    monitor = Monitor()
    run = guard(loop(monitor.watch))
    monitor.report()
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.severity) for i in run.report.incidents] == [("clip-before-unscale", "warning")]


def over_scale(net: nn.Sequential, scaler: Any) -> None:
    for p in net.parameters():
        p.register_hook(lambda g: show(f"{g.norm() / scaler.get_scale()}"))


def numbers_over_scale(net: nn.Sequential, scaler: Any) -> None:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        show(str(p.grad.norm().item() / scaler.get_scale()))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)


def is_finite(net: nn.Sequential, scaler: Any) -> None:
    def hook(gradient: Tensor) -> None:
        if not torch.isfinite(gradient).all():
            show(f"{gradient.norm()}")

    for p in net.parameters():
        p.register_hook(hook)


def ratios(net: nn.Sequential, scaler: Any) -> None:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if inputs[0] is not None:
            show(f"{inputs[0].norm() / outputs[0].norm()}")

    net[2].register_full_backward_hook(hook)


def kept_unread(net: nn.Sequential, scaler: Any) -> None:
    sizes: list[float] = []
    for p in net.parameters():
        p.register_hook(lambda g: sizes.append(g.norm().item()))


def masked(net: nn.Sequential, scaler: Any) -> None:
    for p in net.parameters():
        p.register_hook(lambda g: g * (g.abs() > g.abs().mean()).float())


RIGHT = [over_scale, numbers_over_scale, is_finite, ratios, kept_unread, masked, Shares().watch]


@pytest.mark.parametrize("put", RIGHT, ids=lambda put: put.__qualname__)
def test_what_a_hook_uses_rightly_is_not(guard: Guard, put: Put) -> None:
    run = guard(loop(put))
    assert run.faults == 0, run.stderr
    assert run.causes == []
