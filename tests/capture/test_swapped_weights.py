"""Modules that put converted weights in the place of their own tensors, by `torch.utils.swap_tensors`.

PyTorch refuses to swap a tensor that anybody holds a weak reference to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 4))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def converted_between_trainings() -> object:
    seed_everything()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    for steps in (4, 30, 4):
        train(model, steps)
        model.double().float()
        model.load_state_dict({name: value * 1 for name, value in model.state_dict().items()})
        for parameter in model.parameters():
            parameter.grad = None
    return fingerprint(model)


def test_weights_that_the_guard_follows_can_be_swapped(guard: Guard) -> None:
    plain = converted_between_trainings()
    run = guard(converted_between_trainings)
    assert (run.result, run.faults, run.causes) == (plain, 0, [])


def test_what_the_script_refers_to_is_still_refused(guard: Guard) -> None:
    gone: list[object] = []

    def refer() -> str:
        weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
        ref: weakref.ref[Tensor] = weakref.ref(weight, gone.append)
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(weight, other)
        del ref
        torch.utils.swap_tensors(weight, other)
        return str(weight.tolist())

    before = torch.utils.swap_tensors
    assert guard(refer).result == "[0.0, 0.0]"
    assert torch.utils.swap_tensors is before
