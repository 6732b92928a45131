"""A bad loss that a script looks at later, in whatever it has put it in, is one incident: that of the step which made it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched

from ampguard.capture.glue import schedule

Guard = Callable[..., Watched]
BAD, STEPS = 4, 8


def loss_of(model: nn.Module, is_bad: bool) -> Tensor:
    """In float16 its logits overflow; the scaler skips the step, so that the weights stay good and the run goes on."""
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(x * (1e6 if is_bad else 1.0)), y)


KEEPING: dict[str, Callable[[list[Tensor], Tensor], None]] = {
    "a list": lambda kept, loss: kept.append(loss),
    "a list of detached losses": lambda kept, loss: kept.append(loss.detach()),
    "a sum with its graph": lambda kept, loss: kept.__setitem__(slice(None), [sum(kept, loss)]),
    "a sum": lambda kept, loss: kept.__setitem__(slice(None), [sum(kept, loss.detach())]),
    "a sum in place": lambda kept, loss: kept[0].add_(loss.detach()) if kept else kept.append(loss.detach().clone()),
    "a running mean": lambda kept, loss: kept.__setitem__(slice(None), [0.9 * sum(kept) + 0.1 * loss.detach()]),
}


def train(keep: Callable[[list[Tensor], Tensor], None], micro_steps: int, reads: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    kept: list[Tensor] = []
    for step in range(STEPS):
        for part in range(micro_steps):
            loss = loss_of(model, step == BAD and part == 0)
            scaler.scale(loss / micro_steps).backward()
            keep(kept, loss)
            if reads == "at once":
                torch.stack(kept).mean().item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if reads == "after the step":
            torch.stack(kept).mean().item()
    mean = torch.stack(kept).mean().item()
    if not math.isfinite(mean):
        raise ValueError(f"the mean loss of this epoch is {mean}")


@pytest.mark.parametrize(
    ("kept_as", "micro_steps", "reads"),
    list(itertools.product(KEEPING, (1, 2), ("at once", "after the step", "at the end"))),
)
def test_loss_that_is_read_after_the_step(kept_as: str, micro_steps: int, reads: str, guard: Guard) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="mean loss"):
            train(KEEPING[kept_as], micro_steps, reads)

    run = guard(body)
    (incident,) = run.report.incidents
    assert (incident.step, incident.cause, incident.module) == (BAD, "fp16-overflow", "0")
    assert not run.faults


@pytest.mark.parametrize("kept_as", ["a sum", "a sum with its graph", "a running mean"])
@pytest.mark.parametrize(("long_step", "much_glue"), [(0.0, 0.0), (0.0, 1e9), (1e9, 0.0), (1e9, 1e9)])
def test_it_is_one_incident_however_glue_is_kept(
    kept_as: str, long_step: float, much_glue: float, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By operators, by calls, or first by the one and then by the other: how long steps take decides."""
    monkeypatch.setattr(schedule, "LONG_STEP", long_step)
    monkeypatch.setattr(schedule, "MUCH_GLUE", much_glue)
    test_loss_that_is_read_after_the_step(kept_as, 2, "after the step", guard)


def test_a_second_failure_is_told_beside_a_sum_that_is_bad_for_ever(guard: Guard) -> None:
    """The sum of the first failure is no news; a loss that the script skips later, for another reason, is."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        total = torch.zeros(())
        for step in range(STEPS):
            optimizer.zero_grad()
            p = model(torch.randn(8, 6)).softmax(-1)
            loss = p.square().mean()
            if step == BAD:
                loss = loss - torch.log(p[:, 0] * 0).mean()
            if step == BAD + 2:
                loss = loss + (p * 0).mean() / (p.sum() * 0)
            total = total + loss
            if not math.isfinite(loss.item()):
                continue
            loss.backward()
            optimizer.step()

    assert [(i.step, i.cause) for i in guard(body).report.incidents] == [
        (BAD, "domain-error"),
        (BAD + 1, "division-by-zero"),
    ]


def test_a_bad_number_that_the_script_gives_to_its_first_losses_is_told(guard: Guard) -> None:
    """A coefficient is no running figure of a loss that has failed: nothing has."""

    def body() -> None:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            weight = torch.tensor(math.nan if step == BAD else 1.0)
            loss = model(torch.randn(8, 6)).square().mean() * weight
            if not math.isfinite(loss.item()):
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    (incident,) = guard(body).report.incidents
    assert (incident.step, incident.cause) == (BAD, "nonfinite-input")
