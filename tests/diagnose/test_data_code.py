"""Bad samples are dropped in the words of the script, with all that belongs to them."""

from __future__ import annotations

import contextlib
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ampguard
from ampguard.incident import Incident

Guard = Callable[..., Any]
NAN = float("nan")


def samples(in_target: bool = False) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    found = [(torch.randn(3), torch.randn(())) for _ in range(12)]
    found[6] = (found[6][0], torch.tensor(NAN)) if in_target else (torch.full((3,), NAN), found[6][1])
    return found


def hows(incident: Incident) -> list[str]:
    assert (incident.cause, incident.step) == ("nonfinite-input", 1)
    assert all(fix.verified for fix in incident.fixes)
    return [fix.how for fix in incident.fixes]


def pairs(in_target: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x, y in DataLoader(samples(in_target), batch_size=4):  # type: ignore[arg-type]
        loss = (model(x)[:, 0] - y).square().mean()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("in_target", "dropped", "cleaned"),
    [
        (False, "keep = torch.isfinite(x).all(1); x, y = x[keep], y[keep]", "x = torch.nan_to_num(x)"),
        (True, "keep = torch.isfinite(y); y, x = y[keep], x[keep]", "y = torch.nan_to_num(y)"),
    ],
)
def test_of_a_pair_both_lose_the_samples(in_target: bool, dropped: str, cleaned: str, guard: Guard) -> None:
    filtering, cleaning = hows(guard(lambda: pairs(in_target)).first)
    assert filtering == f"drop the samples that are not finite: {dropped}"
    assert cleaning == f"clean the data: {cleaned}, or repair it where it is made"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, values: Tensor, labels: Tensor) -> Tensor:
        return (self.head(values)[:, 0] - labels).square().mean()


def test_of_a_dictionary_every_entry_loses_them(guard: Guard) -> None:
    def body() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for values, labels in DataLoader(samples(), batch_size=4):  # type: ignore[arg-type]
            inputs = {"values": values, "labels": labels}
            del values, labels
            model(**inputs).backward()
            optimizer.step()

    expected = "keep = torch.isfinite(inputs['values']).all(1); inputs = {k: v[keep] for k, v in inputs.items()}"
    assert hows(guard(body).first)[0] == f"drop the samples that are not finite: {expected}"


def test_a_script_that_leaves_over_the_loss_still_names_its_data(tmp_path: Path) -> None:
    def train(model: Model) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for features, targets in DataLoader(samples(), batch_size=4):  # type: ignore[arg-type]
            loss = model(features, targets)
            if not loss.isfinite():
                sys.exit(1)
            loss.backward()
            optimizer.step()

    with contextlib.suppress(SystemExit), ampguard.watch(out=tmp_path / "run") as session:
        train(Model())
    assert session.report is not None
    filtering = hows(session.report.incidents[0])[0]
    assert filtering.endswith("torch.isfinite(features).all(1); features, targets = features[keep], targets[keep]")


@dataclass
class Batch:
    values: Tensor
    labels: Tensor
    more: dict[str, Any]


def collated(rows: list[tuple[Tensor, Tensor]]) -> Batch:
    values, labels = map(torch.stack, zip(*rows, strict=True))
    return Batch(values, labels, {"count": len(rows), "weights": torch.ones(len(rows))})


def test_of_an_object_every_attribute_loses_them(guard: Guard) -> None:
    def body() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for batch in DataLoader(samples(), batch_size=4, collate_fn=collated):  # type: ignore[arg-type]
            off = (model(batch.values)[:, 0] - batch.labels).square()
            (off * batch.more["weights"]).mean().backward()
            optimizer.step()

    filtering, cleaning = hows(guard(body).first)
    dropped = "batch.values, batch.labels, batch.more['weights'] = batch.values[keep], batch.labels[keep]"
    assert f": keep = torch.isfinite(batch.values).all(1); {dropped}, batch.more['weights'][keep]" in filtering
    assert cleaning.startswith("clean the data: batch.values = torch.nan_to_num(batch.values)")


Record = namedtuple("Record", "inputs targets")


def test_a_target_deep_in_a_batch_of_its_own_is_named(guard: Guard) -> None:
    def body() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for k in range(3):
            record = Record({"x": torch.randn(4, 3)}, [torch.tensor([1.0, NAN if k == 1 else 2.0, 3.0, 4.0])])
            (model(record.inputs["x"])[:, 0] - record.targets[0]).square().mean().backward()
            optimizer.step()

    incident = guard(body).first
    assert "The target `record.targets[0]` of the step" in incident.explanation
    assert any("record.targets[0] = torch.nan_to_num(record.targets[0])" in how for how in hows(incident))


def test_a_batch_is_the_shortest_list_that_the_sample_lies_in(guard: Guard) -> None:
    """Its samples are tuples, to which nothing can be assigned."""

    def body() -> None:
        data = [(torch.randn(3), torch.tensor(float(i))) for i in range(12)]
        data[7][0][1] = float("inf")
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for start in range(0, 12, 4):
            batch = data[start : start + 4]
            predicted = model(torch.stack([x for x, _ in batch]))[:, 0]
            nn.functional.l1_loss(predicted, torch.stack([y for _, y in batch])).backward()
            optimizer.step()

    incident = guard(body).first
    assert incident.evidence["samples"] == [3]
    filtering, cleaning = hows(incident)
    assert "batch = [each for each in batch if torch.isfinite(each[0]).all()]" in filtering
    assert cleaning.startswith("clean the data: batch[3][0].nan_to_num_(posinf=0.0), or ")
