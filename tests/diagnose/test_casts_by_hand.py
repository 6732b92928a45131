"""Casts to low precision in the script's own code: to leave autocast is not enough where they do the harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


class Pooled(nn.Module):
    """Sums over time in a type of its own; `harmful`: that type is float16, else it is what is returned for the log."""

    def __init__(self, harmful: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.harmful = harmful
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.harmful:
            return h.to(torch.float16).square().cumsum(1)[:, -1]
        self.kept = torch.tanh(h.mean()).detach().to(torch.float16)
        return (h * 300) @ h.transpose(1, 2)


def train(harmful: bool, autocast: bool = True) -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"pool": Pooled(harmful), "head": nn.Linear(8 if harmful else 5, 1)})
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    for step in range(3):
        x = torch.randn(6, 5, 4) * (300 if step == 2 else 1)
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = net["head"](net["pool"](x).float() / 1e5).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def hows(guard: Guard, body: Callable[[], None]) -> dict[str, str]:
    first = guard(body).first
    assert (first.cause, first.step) == ("fp16-overflow", 2)
    assert all(fix.verified for fix in first.fixes if fix.action in ("force-fp32", "use-bf16", "disable-amp"))
    return {fix.action: fix.how for fix in first.fixes}


def test_a_cast_that_does_the_harm_is_to_be_left_out_too(guard: Guard) -> None:
    how = hows(guard, lambda: train(harmful=True))
    code = "return h.to(torch.float16).square().cumsum(1)[:, -1]"
    call, cast = how["force-fp32"].splitlines()
    assert 'torch.autocast("cpu", enabled=False)(net["pool"])(x).float()' in call
    assert cast == f"and leave out the cast to float16 in: {code}"
    assert how["use-bf16"].endswith(f"and bfloat16 in place of the script's own casts in: {code}")
    assert how["disable-amp"].endswith(f"and float32 in place of the script's own casts in: {code}")


def test_a_cast_that_does_none_may_stay(guard: Guard) -> None:
    how = hows(guard, lambda: train(harmful=False))
    assert not any("cast" in text.replace("autocast", "").partition("#")[0] for text in how.values())


def test_without_autocast_there_is_none_to_leave(guard: Guard) -> None:
    how = hows(guard, lambda: train(harmful=True, autocast=False))
    assert "autocast" not in how["force-fp32"]
    assert "leave out the cast to float16 in: return h.to(torch.float16)" in how["force-fp32"]


@pytest.mark.parametrize("autocast", [False, True])
def test_outside_modules(autocast: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 8)
        optimizer = torch.optim.SGD(net.parameters(), 1e-9)
        for step in range(3):
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                logits = net(torch.randn(6, 4)).float() * (1e6 if step == 2 else 1)
            loss = torch.softmax(logits.half(), -1)[:, 0].float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    how = hows(guard, body)["force-fp32"]
    assert ("autocast" in how) is autocast
    assert how.endswith("# on .float() operands, without its cast to float16")


def test_outside_a_model_with_weights_in_float16(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 8).half().eval()
        with torch.no_grad():
            scores = torch.log_softmax(net(torch.randn(6, 4).half()), -1)
            scores[:, :2] = -1e4
            ranked = scores * 7
            float((ranked - ranked.mean(-1, keepdim=True)).mean())

    first = guard(body).first
    assert (first.cause, first.op) == ("fp16-overflow", "aten.mul.Tensor")
    fix = next(fix for fix in first.fixes if fix.action == "force-fp32")
    assert fix.verified
    assert fix.how == "ranked = scores.float() * 7"


def test_a_call_in_a_line_that_enters_autocast_does_not_stand_under_another(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = Scores()
        optimizer = torch.optim.SGD(net.parameters(), 1e-9)
        for step in range(3):
            x = torch.randn(6, 4) * (3000 if step == 2 else 1)
            with torch.autocast("cpu", torch.float16): loss = net(x).float().softmax(-1)[:, 0].mean()  # fmt: skip  # noqa: E701
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    how = hows(guard, body)["force-fp32"]
    assert how.startswith("leave autocast for this one call: ")
    assert 'loss = torch.autocast("cpu", enabled=False)(net)(x).float().softmax' in how


class Scores(nn.Module):
    """Products of what no inner module has made: only the model itself can leave autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.keys) @ (x @ self.keys).t()
