"""What a checkpoint holds that is not finite: which of it are weights, and what can have spoiled them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watching import Watched

Guard = Callable[..., Watched]


class Scaled(nn.Module):
    """A model with running statistics, and with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) * self.scale
        return out


def training(path: Path, spoil: Callable[[Scaled], Any], extra: torch.Tensor, frozen: bool = False) -> None:
    torch.manual_seed(0)
    model = Scaled()
    model.scale.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        spoil(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({"model": weights, "best_loss": extra, "step": 3}, path / "last.pt")


@pytest.mark.parametrize("best", [torch.tensor(math.nan), torch.tensor([math.nan])], ids=["number", "one of a list"])
def test_a_number_beside_the_weights_is_no_weight(guard: Guard, tmp_path: Path, best: torch.Tensor) -> None:
    run = guard(lambda: training(tmp_path, lambda model: None, best))
    assert run.faults == 0, run.stderr
    assert run.causes == []


@pytest.mark.parametrize(
    "history",
    [
        torch.full((16,), math.nan),
        torch.full((2, 7, 1), math.nan),
        {"train_loss": torch.full((9,), math.nan), "psnr": torch.full((9, 2), math.nan)},
        [torch.full((5,), math.nan)],
    ],
    ids=["losses", "psnr", "by name", "list"],
)
def test_a_history_is_no_weight(guard: Guard, tmp_path: Path, history: Any) -> None:
    """EDSR saves what it has logged, in files of their own."""

    def script() -> None:
        training(tmp_path, lambda model: None, torch.tensor(1.0))
        torch.save(history, tmp_path / "log.pt")

    run = guard(script)
    assert run.faults == 0, run.stderr
    assert run.causes == []


@pytest.mark.parametrize("by_name", [True, False])
def test_an_average_is_weights_wherever_it_lies(guard: Guard, tmp_path: Path, by_name: bool) -> None:
    def script() -> None:
        average = [torch.full((3, 4), math.nan), torch.zeros(3)]
        training(tmp_path, lambda model: None, torch.tensor(1.0))
        torch.save({"w": average[0], "b": average[1]} if by_name else {"shadow": average}, tmp_path / "average.pt")

    assert guard(script).causes == ["nonfinite-parameter"]


def test_a_parameter_that_is_a_single_number_is_a_weight(guard: Guard, tmp_path: Path) -> None:
    run = guard(lambda: training(tmp_path, lambda model: model.scale.fill_(math.nan), torch.tensor(math.nan)))
    assert run.causes == ["nonfinite-parameter"]
    assert run.first.evidence["names"] == ["scale"]
    assert run.first.evidence["bad_values"] == 1
    assert "The loss of step 2 was still finite: a later update has spoiled them." in run.first.explanation


@pytest.mark.parametrize("frozen", [False, True], ids=["statistics", "and a frozen number"])
def test_no_update_has_spoiled_what_no_optimizer_trains(guard: Guard, tmp_path: Path, frozen: bool) -> None:
    def spoil(model: Scaled) -> None:
        model.body(torch.full((2, 4), math.nan))  # training mode: the running statistics take it in
        if frozen:
            model.scale.fill_(math.nan)

    run = guard(lambda: training(tmp_path, spoil, torch.tensor(1.0), frozen))
    (saved,) = [i for i in run.report.incidents if i.cause == "nonfinite-parameter"]
    assert saved.evidence["names"] == [*["scale"] * frozen, "body.1.running_mean", "body.1.running_var"]
    assert "a later update" not in saved.explanation
    assert "No optimizer trains them" in saved.explanation
    assert "since_step" not in saved.evidence


def test_update_of_a_bad_micro_batch_has_spoiled_them_though_another_of_its_step_was_good(
    guard: Guard, tmp_path: Path
) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(5):
            optimizer.zero_grad()
            for half in range(2):
                x = torch.randn(6, 4)
                if (step, half) == (2, 1):
                    x[3] = math.inf
                model(x).square().mean().backward()
            optimizer.step()
        torch.save({"model": model.state_dict()}, tmp_path / "last.pt")

    run = guard(body)
    saved = next(i for i in run.report.incidents if i.location and "torch.save" in i.location.code)
    assert "They were poisoned in step 2 by addmm at test_saved_weights.py:" in saved.explanation
    assert saved.fixes[0].how.endswith("from before step 2; repair the nonfinite-input of that step")
    assert saved.evidence["since_step"] == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_another_module_with_weights_of_that_name_is_no_proof_of_a_cast(
    value: float, guard: Guard, tmp_path: Path
) -> None:
    """What is saved is as wide as the weights, which are finite elsewhere: no cast has overflowed."""

    def body() -> None:
        training(tmp_path, lambda model: None, torch.tensor(1.0))
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        other = {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}
        torch.save(other, tmp_path / "other.pt")

    run = guard(body)
    assert run.causes == ["nonfinite-parameter"]
    assert "the cast to" not in run.first.explanation
    assert [fix.action for fix in run.first.fixes] == ["load-weights"]


def test_a_cast_for_the_file_that_overflows_is_told(guard: Guard, tmp_path: Path) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight[0, 0] = 1e5
        torch.save({name: tensor.half() for name, tensor in model.state_dict().items()}, tmp_path / "half.pt")

    run = guard(body)
    assert run.causes == ["nonfinite-parameter"]
    assert "the cast to float16 for the file overflowed" in run.first.explanation
