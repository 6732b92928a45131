"""Where a batch is a list with a sample in each entry, a sample is an entry, and dropping it drops all that lies in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

Guard = Callable[..., Any]
BAD = 6
"""Of twelve samples, in batches of four: the third of the second batch."""


def image(i: int, is_ragged: bool = False) -> Tensor:
    torch.manual_seed(i)
    made = torch.rand(3, 4 + i % 3 if is_ragged else 4, 5)
    return made * float("nan") if i == BAD else made


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.conv(each[None]).mean((0, 2, 3)) for each in images])


def train(model: nn.Module, data: list[Any], loss_of: Callable[[nn.Module, Any], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for batch in DataLoader(data, batch_size=4, collate_fn=list):  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def of_dicts() -> None:
    def loss_of(model: nn.Module, batched: Any) -> Tensor:
        boxes = torch.stack([each["instances"]["box"] for each in batched])
        return nn.functional.mse_loss(model([each["image"] for each in batched]), boxes)

    train(Detector(), [{"image": image(i), "instances": {"box": torch.rand(2)}} for i in range(12)], loss_of)


def of_tuples() -> None:
    def loss_of(model: nn.Module, pairs: Any) -> Tensor:
        return nn.functional.cross_entropy(model([x for x, _ in pairs]), torch.tensor([y for _, y in pairs]))

    train(Detector(), [(image(i, is_ragged=True), i % 2) for i in range(12)], loss_of)


def of_images_and_targets() -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        images, targets = zip(*batch, strict=True)
        found: Tensor = model(images)
        return sum(
            ((row - target["box"]).square().sum() for row, target in zip(found, targets, strict=True)), found.sum() * 0
        )

    train(Detector(), [(image(i), {"box": torch.rand(2)}) for i in range(12)], loss_of)


@pytest.mark.parametrize(
    ("script", "dropped"),
    [
        (of_dicts, "batch = [each for each in batch if torch.isfinite(each['image']).all()]"),
        (of_tuples, "batch = [each for each in batch if torch.isfinite(each[0]).all()]"),
        (of_images_and_targets, "batch = [each for each in batch if torch.isfinite(each[0]).all()]"),
    ],
)
def test_the_entry_is_the_sample(script: Callable[[], None], dropped: str, guard: Guard) -> None:
    found = guard(script).first
    assert (found.cause, found.step, found.evidence["samples"]) == ("nonfinite-input", 1, [2])
    assert "(sample 2 of the batch)" in found.explanation
    assert [(fix.action, fix.verified) for fix in found.fixes] == [("filter-sample", True), ("fix-data", True)]
    assert found.fixes[0].how == f"drop the samples that are not finite: {dropped}"


def test_two_lists_side_by_side_both_lose_it(guard: Guard) -> None:
    def script() -> None:
        model = Detector()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for first in range(0, 12, 4):
            images, labels = [image(i) for i in range(first, first + 4)], [0, 1, 0, 1]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), torch.tensor(labels)).backward()
            optimizer.step()

    found = guard(script).first
    assert found.evidence["samples"] == [2]
    (filtering,) = [fix for fix in found.fixes if fix.action == "filter-sample"]
    assert filtering.verified
    assert filtering.how.endswith(
        "keep = [i for i, each in enumerate(images) if torch.isfinite(each).all()]; "
        "images, labels = [images[i] for i in keep], [labels[i] for i in keep]"
    )


def test_the_parts_of_a_batch_are_no_samples(guard: Guard) -> None:
    def script() -> None:
        model = nn.Bilinear(3, 3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for i in range(3):
            torch.manual_seed(i)
            views = [torch.randn(4, 3), torch.randn(4, 3)]
            if i == 1:
                views[0][3] = float("nan")
            optimizer.zero_grad()
            model(*views).square().mean().backward()
            optimizer.step()

    found = guard(script).first
    assert (found.cause, found.evidence["samples"]) == ("nonfinite-input", [3])
    assert "keep" in found.fixes[0].how
