"""A count that is 0 and that several terms of a loss divide by: one incident, and one change of the line that counts."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
Boxes = list[Tensor]


class Criterion(nn.Module):
    """A detector's losses, each divided by the number of boxes, which this class hands on as an argument."""

    def __init__(self, is_number: bool) -> None:
        super().__init__()
        self.is_number = is_number

    def of_labels(self, scores: Tensor, targets: Boxes, num_boxes: Any) -> Tensor:
        wanted = torch.zeros(scores.shape)
        for row, boxes in zip(wanted, targets, strict=True):
            row[: len(boxes)] = 1
        loss = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        return loss.mean(1).sum() / num_boxes

    def of_boxes(self, found: Tensor, targets: Boxes, count: Any) -> tuple[Tensor, Tensor]:
        chosen = torch.cat([row[: len(boxes)] for row, boxes in zip(found, targets, strict=True)])
        distance = F.l1_loss(chosen, torch.cat(targets), reduction="none")
        overlap = 1 - (chosen * torch.cat(targets)).sum(-1)
        first = distance.sum() / count
        second = overlap.sum() / count
        return first, second

    def forward(self, found: tuple[Tensor, Tensor], targets: Boxes) -> dict[str, Tensor]:
        num_boxes: Any = sum(len(boxes) for boxes in targets)
        num_boxes = torch.as_tensor(num_boxes, dtype=torch.float)
        if self.is_number:
            n = (num_boxes / 2).item()
            return self.losses(found, targets, n)
        half = num_boxes / 2
        return self.losses(found, targets, half)

    def losses(self, found: tuple[Tensor, Tensor], targets: Boxes, num_boxes: Any) -> dict[str, Tensor]:
        scores, places = found
        first, second = self.of_boxes(places, targets, num_boxes)
        return {"boxes": first, "overlap": second, "labels": self.of_labels(scores, targets, num_boxes)}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.score, self.box = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.score(h).squeeze(-1), self.box(h).sigmoid()


def batches(steps: int, empty: int) -> list[tuple[Tensor, Boxes]]:
    torch.manual_seed(0)
    return [
        (torch.randn(2, 5, 6), [torch.rand(0 if step == empty else 1 + i, 4) for i in range(2)])
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("is_number", "how"),
    [
        (True, "n = max((num_boxes / 2).item(), 1)  # test_shared_divisor.py:"),
        (False, "half = (num_boxes / 2).clamp(min=1)  # test_shared_divisor.py:"),
    ],
)
@pytest.mark.parametrize("is_printed", [True, False])
def test_the_count_is_changed_where_it_is_made(is_number: bool, how: str, is_printed: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net, criterion = Detector(), Criterion(is_number)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for x, targets in batches(5, empty=2):
            losses = criterion(net(x), targets)
            loss = torch.stack(list(losses.values())).sum()
            if not loss.isfinite() and is_printed:
                with contextlib.redirect_stdout(io.StringIO()):
                    print(losses)
                return
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert len(run.report.incidents) == 1, [(i.cause, i.location) for i in run.report.incidents]
    fix = run.first.fixes[0]
    assert (run.first.step, fix.action, fix.verified) == (2, "guard-empty", True), fix
    assert fix.how.startswith(how), fix.how
    assert "its gradients too" in fix.outcome
    assert float(fix.outcome.rpartition(" ")[2]) < 10
    assert not any("1e-6" in other.how for other in run.first.fixes)


def criterion_of(scores: Tensor, places: Tensor, targets: Boxes) -> Tensor:
    n = float(sum(len(boxes) for boxes in targets))
    labels = scores.square().sum() / n
    distance = (places[: len(targets[0])] - targets[0]).abs().sum() / n
    return labels + distance


def test_losses_outside_modules(guard: Guard) -> None:
    """Of these a replay runs no code: the function of the line tells."""

    def body() -> None:
        torch.manual_seed(0)
        net = Detector()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        for x, targets in batches(5, empty=3):
            scores, places = net(x[0])
            loss = criterion_of(scores, places, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    fix = incident.fixes[0]
    assert (incident.step, fix.action, fix.verified) == (3, "guard-empty", True), fix
    assert fix.how.startswith("n = max(float(sum(len(boxes) for boxes in targets)), 1)  # "), fix.how


class Weighted(nn.Module):
    """Two terms divided by a plain number that counts nothing: a temperature that has come to 0."""

    def forward(self, h: Tensor, temperature: float) -> Tensor:
        t = temperature * 0.5
        first = h.square().mean() / t
        return first + h.abs().mean() / t


def test_what_counts_nothing_gets_no_count(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net, loss_of = nn.Linear(4, 4), Weighted()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(4):
            loss = loss_of(net(torch.randn(5, 4)), 0.0 if step == 2 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert not any("max(temperature * 0.5, 1)" in fix.how for fix in incident.fixes)
    fix = incident.fixes[0]
    assert fix.verified, incident.fixes
    assert fix.how.count("max(t, 1e-6)") == 2


class Plain:
    """Terms in methods of no module, which are handed a weight that is counted elsewhere."""

    def of_boxes(self, distance: Tensor, mask: Tensor, weight: float) -> Tensor:
        return (distance * mask[:, None]).sum() / weight

    def of_scores(self, scores: Tensor, mask: Tensor, weight: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores, mask, reduction="sum") / weight


def test_a_weight_of_nothing_is_one_in_every_term(guard: Guard) -> None:
    """0 of 0 in one term says that there was nothing to count: an epsilon in the other makes a loss of millions."""

    def body() -> None:
        torch.manual_seed(0)
        net, terms = nn.Linear(4, 5), Plain()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(4):
            made, mask = net(torch.randn(6, 4)), torch.full((6,), float(step != 2))
            weight = float(mask.sum())
            boxes = terms.of_boxes((made[:, :4] - 0.5).abs(), mask, weight)
            loss = boxes + terms.of_scores(made[:, 4], mask, weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    fix = incident.fixes[0]
    assert fix.verified, incident.fixes
    assert fix.how.count("/ (weight or 1)") == 2, fix.how
    assert float(fix.outcome.rpartition(" ")[2]) < 100
