"""One bad sample reaches a step by several ways: what cleaning it would cure is tried on all of them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Guard = Callable[..., Any]


def render(net: nn.Module, origins: Tensor, directions: Tensor) -> Tensor:
    """Two passes along rays: the points of the second are made from the rays once more, where the first is dense."""
    depths = torch.linspace(2.0, 6.0, 8).expand(len(origins), 8)
    density = net(origins[:, None, :] + directions[:, None, :] * depths[..., None])
    finer = depths + torch.sigmoid(density.squeeze(-1)).detach()
    points = origins[:, None, :] + directions[:, None, :] * finer[..., None]
    return torch.sigmoid(net(points)).mean(1)


def train(bad_view: int | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(5):
        origins, directions = torch.randn(6, 3), torch.randn(6, 3)
        if step == bad_view:
            origins[2, 0] = float("nan")
        loss = nn.functional.mse_loss(render(net, origins, directions), torch.rand(6, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def test_cleaning_is_tried_on_everything_that_holds_nan(guard: Guard) -> None:
    run = guard(lambda: train(bad_view=3))
    assert (run.first.cause, run.first.step, run.first.phase) == ("nonfinite-input", 3, "data")
    assert {fix.action: fix.verified for fix in run.first.fixes} == {"filter-sample": True, "fix-data": True}


WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda y: y.index_put((torch.tensor(5),), torch.tensor(float("nan"))),
    "a row of it": lambda y: y[5].fill_(float("nan")) is None or y,
    "where": lambda y: torch.where(y > 1, float("nan"), y),
    "masked": lambda y: y.masked_fill(y > 1, float("nan")),
    "joined": lambda y: torch.cat([y[:7], torch.full((1, 3), float("nan"))]),
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("way", WRITTEN)
def test_a_target_that_the_step_made_is_named_and_cleaned(way: str, is_late: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            inputs, wanted = torch.randn(8, 4), torch.randn(8, 3)
            if step == 2 and not is_late:
                wanted = WRITTEN[way](wanted)
            output = net(inputs)
            if step == 2 and is_late:
                wanted = WRITTEN[way](wanted)
            loss = ((output - wanted) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.phase) == ("nonfinite-input", 2, "data")
    assert (first.evidence["role"], first.evidence["name"]) == ("target", "wanted")
    assert first.evidence["samples"]
    assert {fix.action: fix.verified for fix in first.fixes} == {"filter-sample": True, "fix-data": True}
    assert not any("more tensors" in fix.how for fix in first.fixes)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_weight_of_the_loss_that_is_nan_is_named(is_tensor: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        beta: Any = torch.ones(3) if is_tensor else 1.0
        for step in range(4):
            errors = net(torch.randn(8, 4)) - torch.randn(8, 3)
            if step == 2:
                beta = beta * float("nan")
            loss = ((errors**2) * beta).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step, first.phase, first.op) == ("nonfinite-input", 2, "data", "aten.mul.Tensor")
    assert first.evidence["name"] == ("beta" if is_tensor else "loss = ((errors**2) * beta).mean()")
    assert first.location.code == "loss = ((errors**2) * beta).mean()"


def test_good_rays_are_silent(guard: Guard) -> None:
    assert guard(lambda: train(bad_view=None)).causes == []


def diffuse(table: Tensor, batch: Tensor | None = None) -> None:
    """A diffusion loss weighted by a table of the script's own, with an entry for each time."""
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(3):
        x, noise, time = torch.randn(6, 8), torch.randn(6, 8), torch.randint(16, 20, (6,))
        weight = torch.from_numpy(table.numpy())[time] if batch is None else batch
        loss = (weight[:, None] * (net(x) - noise).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return


def test_table_of_the_scripts_own_is_no_target(guard: Guard) -> None:
    table = torch.linspace(1, 0, 20).double().reciprocal()
    run = guard(lambda: diffuse(table))
    assert run.first.cause == "nonfinite-input"
    assert run.first.evidence["role"] == "table"
    assert "The table that `weight = torch.from_numpy(" in run.first.explanation
    assert "(row 19 of it)" in run.first.explanation
    assert {fix.action: fix.verified for fix in run.first.fixes} == {"fix-data": True}


def test_weights_with_one_for_each_sample_are_data(guard: Guard) -> None:
    bad = torch.tensor([1.0, 2.0, float("nan"), 1.0, 1.0, 1.0])
    run = guard(lambda: diffuse(torch.ones(1), bad))
    assert run.first.evidence["role"] == "target"
    assert {fix.action: fix.verified for fix in run.first.fixes} == {"filter-sample": True, "fix-data": True}


def test_of_a_batch_without_a_good_sample_none_can_be_kept(guard: Guard) -> None:
    """The one observation of an agent: filtering it would leave nothing, so that is not what was seen to work."""

    def body() -> None:
        net = nn.Linear(3, 2)
        net(torch.tensor([[0.5, float("nan"), 1.0]])).sum().backward()

    first = guard(body).first
    assert first.cause == "nonfinite-input"
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("fix-data", True), ("filter-sample", None)]


class Pair(NamedTuple):
    image: Tensor
    target: Tensor


@dataclass
class Sample:
    image: Tensor
    target: Tensor


class Encoding(UserDict[str, Tensor]):
    """As a tokenizer of Transformers returns it."""


class Graphs:
    def __init__(self, image: Tensor, target: Tensor) -> None:
        self.image, self.target = image, target


BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "batch.image": Pair,
    "batch.image ": Sample,
    "batch['image']": lambda image, target: Encoding(image=image, target=target),
    "batch['image'] ": lambda image, target: {"image": image, "target": target},
    "batch.image  ": Graphs,
    "batch[0]": lambda image, target: [image, target],
}


@pytest.mark.parametrize("name", BATCHES)
def test_an_input_is_called_by_its_place_in_the_batch(name: str, guard: Guard) -> None:
    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.full((4,), float("nan") if index == 9 else 1.0), index % 2

    def collate(items: list[tuple[Tensor, int]]) -> Any:
        return BATCHES[name](torch.stack([image for image, _ in items]), torch.tensor([t for _, t in items]))

    def body() -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for batch in DataLoader(Data(), 4, collate_fn=collate):
            is_mapping = isinstance(batch, (dict, UserDict))
            image, target = (batch["image"], batch["target"]) if is_mapping else _pair(batch)
            loss = nn.functional.cross_entropy(net(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).first
    assert (incident.cause, incident.step) == ("nonfinite-input", 2)
    assert f"the input `{name.strip()}` of the step" in incident.explanation.lower()


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch[0], batch[1]) if isinstance(batch, (list, tuple)) else (batch.image, batch.target)


def forecast(feature: int | None) -> None:
    """A window of seven series; standardising one that never changes divides 0 by 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 7))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    table = torch.randn(64, 7).numpy()
    if feature is not None:
        table[:, feature] = 3.0
    with np.errstate(invalid="ignore"):
        series = torch.from_numpy((table - table.mean(0)) / table.std(0))
    for step in range(3):
        window = torch.stack([series[k : k + 8] for k in range(step, step + 6)])
        loss = nn.functional.mse_loss(net(window[:, :-1]), window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_bad_feature_of_every_sample_is_named(guard: Guard) -> None:
    run = guard(lambda: forecast(feature=2))
    assert run.first.cause == "nonfinite-input"
    assert run.first.evidence["column"] == {"dimension": 1, "index": 2}
    assert "index 2 of dimension 1: a feature that was made so" in run.first.explanation


def test_a_bad_sample_is_no_feature(guard: Guard) -> None:
    assert "column" not in guard(lambda: train(bad_view=3)).first.evidence


def test_module_of_an_infinity_that_a_norm_turns_into_nan(guard: Guard) -> None:
    """All of PyTorch's own modules run in one line of the script: each is told apart by its operator."""

    def body() -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        x = torch.randn(6, 4)
        x[3, 1] = float("inf")
        net(x).square().mean().backward()

    first = guard(body).first
    assert (first.cause, first.op, first.module) == ("nonfinite-input", "aten.addmm.default", "0")


@pytest.mark.parametrize("role", ["input", "target"])
def test_a_model_of_plain_tensors_has_inputs_and_targets(role: str, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        first, second = torch.randn(4, 8).requires_grad_(), torch.randn(8, 3).requires_grad_()
        optimizer = torch.optim.SGD([first, second], 1e-3)
        for step in range(4):
            x, y = torch.randn(6, 4), torch.randn(6, 3)
            if step == 2:
                (x if role == "input" else y)[1] = float("nan")
            loss = nn.functional.mse_loss(torch.relu(x @ first) @ second, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("nonfinite-input", 2)
    assert (first.evidence["role"], first.evidence["samples"]) == (role, [1])
    assert first.evidence["name"] == {"input": "x", "target": "y"}[role]
    assert {fix.action: fix.verified for fix in first.fixes} == {"filter-sample": True, "fix-data": True}


def test_a_mask_beside_plain_weights_is_no_data(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        query, key = torch.randn(4, 4).requires_grad_(), torch.randn(4, 4).requires_grad_()
        optimizer = torch.optim.SGD([query, key], 1e-3)
        for step in range(4):
            mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1 if step != 2 else 0).bool(), float("-inf"))
            x = torch.randn(2, 5, 4)
            scores = torch.softmax((x @ query) @ (x @ key).transpose(1, 2) + mask, -1)
            loss = (scores @ x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert (first.cause, first.step) == ("masked-softmax", 2)
