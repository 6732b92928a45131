"""`torch.set_default_device`: a mode of PyTorch's own that is on all the time. Where "meta" is the default, no tensor that is
made without a device has values: neither one of ours, nor one that the script makes while it is run again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import Watched, fingerprint, seed_everything

from ampguard import compat

BAD = 12
NOTES: list[Any] = []
"""A file: what a pass has noted in memory is undone when it was a replay of ours."""


def noted() -> list[str]:
    NOTES[0].seek(0)
    return NOTES[0].read().decode().split()


@pytest.fixture(params=["set_default_device", "with torch.device"])
def default_meta(request: pytest.FixtureRequest) -> Iterator[None]:
    with tempfile.TemporaryFile("w+b", buffering=0) as notes:
        NOTES[:] = [notes]
        yield from _with_default(request.param)


def _with_default(how: str) -> Iterator[None]:
    if how == "with torch.device":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        os.write(NOTES[0].fileno(), f"{torch.empty(1).device.type} ".encode())
        return self.layer(x)  # type: ignore[no-any-return]


def divided(out: Tensor, x: Tensor, is_bad: bool) -> Tensor:
    return (out / (x.abs().amax(1, keepdim=True) * (0.0 if is_bad else 1.0))).square().mean()


def distance(out: Tensor, x: Tensor, is_bad: bool) -> Tensor:
    return (out - (out.detach() if is_bad else 0.0)).square().sum(1).sqrt().mean()


def overflow(out: Tensor, x: Tensor, is_bad: bool) -> Tensor:
    return ((out * (1e5 if is_bad else 1.0)).half() * 1.0).float().mean()


LOSSES: dict[Callable[[Tensor, Tensor, bool], Tensor], str] = {
    divided: "division-by-zero",
    distance: "singular-gradient",
    overflow: "fp16-overflow",
}


def train(loss_of: Callable[[Tensor, Tensor, bool], Tensor], bad: int) -> Callable[[], Any]:
    def body() -> Any:
        generator = torch.Generator("cpu").manual_seed(0)
        seed_everything()
        model = Noting()
        for p in model.parameters():
            nn.init.normal_(p, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(BAD + 3):
            x = torch.rand(5, 4, generator=generator, device="cpu") + 0.5
            optimizer.zero_grad()
            loss = loss_of(model(x), x, step == bad)
            loss.backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    return body


@pytest.mark.usefixtures("default_meta")
@pytest.mark.parametrize("loss_of", LOSSES)
def test_a_failure_outside_modules_is_explained(
    loss_of: Callable[[Tensor, Tensor, bool], Tensor], guard: Callable[..., Watched]
) -> None:
    body = train(loss_of, BAD)
    plain = body()
    passes = len(noted())
    run = guard(body)
    assert run.result == plain
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == (LOSSES[loss_of], BAD)
    assert run.first.evidence["rung"] == "replay"
    assert any(fix.verified for fix in run.first.fixes)
    assert len(noted()) > 2 * passes
    assert set(noted()) == {"meta"}
    assert torch.empty(1).device.type == "meta"


@pytest.mark.usefixtures("default_meta")
@pytest.mark.parametrize("loss_of", LOSSES)
def test_healthy(loss_of: Callable[[Tensor, Tensor, bool], Tensor], guard: Callable[..., Watched]) -> None:
    run = guard(train(loss_of, -1))
    assert (run.faults, run.causes) == (0, []), run.stderr


@pytest.mark.usefixtures("default_meta")
@pytest.mark.parametrize("scaled", [False, True])
def test_what_a_script_makes_lies_where_it_would(scaled: bool, guard: Callable[..., Watched]) -> None:
    """Among functions of PyTorch's that are written in Python, which ask the modes by themselves."""

    def body() -> Any:
        seed_everything()
        model = nn.Linear(4, 3, device="cpu")
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        made = set()
        for step in range(30):
            made.add(torch.rand(2).device.type)
            out = functional.relu(model(torch.ones(5, 4, device="cpu") * step))
            made.add(torch.arange(3).device.type)
            loss = functional.smooth_l1_loss(out, torch.ones(5, 3, device="cpu"))
            made.add(torch.zeros(2).device.type)
            scaler.scale(loss).backward()
            made.add(torch.eye(2).device.type)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return made, fingerprint(model, optimizer)

    plain = body()
    run = guard(body)
    assert run.result == plain
    assert run.result[0] == {"meta"}
    assert run.faults == 0
    assert torch.empty(1).device.type == "meta"


@pytest.mark.usefixtures("default_meta")
def test_put_aside_and_back() -> None:
    with compat.without_default_device():
        assert torch.empty(1).device.type == "cpu"
        with compat.scripts_default_device():
            assert torch.empty(1).device.type == "meta"
            with compat.without_default_device():
                assert torch.empty(1).device.type == "cpu"
        assert torch.empty(1).device.type == "cpu"
    assert torch.empty(1).device.type == "meta"
