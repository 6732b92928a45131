"""A batch that a DataLoader has made badly: the card says with which of the script's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from watching import Watched

Guard = Callable[..., Watched]
ROWS, BLANK = 12, 6


class Frames(Dataset[Any]):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(index)
        frame = torch.rand(4) + 0.1
        return (frame * 0 if index == BLANK else frame).log(), torch.tensor(index % 2)

    def __len__(self) -> int:
        return ROWS


def standardised(rows: list[Any]) -> list[Tensor]:
    x, y = default_collate(rows)
    return [x / x.std(1, keepdim=True), y]


class Collator:
    def __call__(self, rows: list[Any]) -> list[Tensor]:
        return standardised(rows)


def tensors() -> Dataset[Any]:
    x = torch.rand(ROWS, 4)
    x[BLANK] = float("nan")
    return TensorDataset(x, torch.arange(ROWS) % 2)


@pytest.mark.parametrize(
    ("data", "collate", "named"),
    [
        (Frames(), None, ["Frames.__getitem__"]),
        (Subset(Frames(), range(ROWS)), standardised, ["Frames.__getitem__", "standardised"]),
        (Frames(), Collator(), ["Frames.__getitem__", "Collator.__call__"]),
        (tensors(), None, []),
    ],
    ids=["data set", "collate function", "collator", "tensors"],
)
@pytest.mark.parametrize("skips", [False, True])
def test_whose_code_it_was(guard: Guard, data: Dataset[Any], collate: Any, named: list[str], skips: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in DataLoader(data, 2, collate_fn=collate):
            loss = functional.cross_entropy(net(x), y)
            if skips and not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["nonfinite-input"]
    text = run.first.explanation
    assert ("The DataLoader made it with" in text) == bool(named)
    for name in named:
        assert f"`{name}` ({__name__}.py:" in text


def test_a_loader_that_is_a_batch_ahead(guard: Guard) -> None:
    """As Accelerate's are, so that they know the last one."""

    def ahead(loader: DataLoader[Any]) -> Any:
        batches = iter(loader)
        present = next(batches)
        for coming in batches:
            yield present
            present = coming
        yield present

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for xb, yb in ahead(DataLoader(Frames(), 2)):
            loss = functional.cross_entropy(net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["nonfinite-input"]
    assert f"`Frames.__getitem__` ({__name__}.py:" in run.first.explanation
    assert run.first.fixes[0].how.endswith("keep = torch.isfinite(xb).all(1); xb, yb = xb[keep], yb[keep]")
