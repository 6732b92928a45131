"""Arrays that a script takes out of PyTorch, and figures made of counts: a failure, a note, or meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import Watched

Guard = Callable[..., Watched]
ROWS, CLASSES = 8, 4


class Run:
    """An evaluation of `batches` batches, of which `read` makes what it likes."""

    def __init__(self, read: Callable[[Tensor, Tensor, int], Any], size: float = 1.0) -> None:
        self.read, self.size = read, size

    def __call__(self) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Linear(5, CLASSES)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(ROWS, 5)).square().mean().backward()
            optimizer.step()
        net.eval()
        found = []
        for number in range(3):
            with torch.no_grad():
                logits = net(torch.randn(ROWS, 5)) * (self.size if number == 1 else 1.0)
            target = torch.randint(0, CLASSES - 1, (ROWS,))
            found.append(self.read(logits, target, number))
        return found


def hand_made_probabilities(logits: Tensor, target: Tensor, number: int) -> Any:
    grown = torch.exp(logits)
    return (grown / grown.sum(1, keepdim=True)).numpy()


def losses_as_an_array(logits: Tensor, target: Tensor, number: int) -> Any:
    known = target[:4] < (CLASSES if number != 1 else 0)
    loss = functional.cross_entropy(logits[:4], target[:4], reduction="none")[known].mean()
    return loss.repeat(ROWS).numpy()


def shares(logits: Tensor, target: Tensor, number: int) -> Any:
    chosen = target < CLASSES * (number != 1)
    share = logits[:, 0] * chosen / chosen.sum()
    return share.numpy()


def means_by_half(logits: Tensor, target: Tensor, number: int) -> Any:
    truth = np.ones(ROWS, dtype=np.float32)
    truth[:: ROWS // 2] = np.nan if number == 1 else 1.0
    errors = (logits[:, 0] - torch.from_numpy(truth)).abs()
    return torch.stack([errors[: ROWS // 2].mean(), errors[ROWS // 2 :].mean()]).numpy()


def energies(logits: Tensor, target: Tensor, number: int) -> str:
    energy = torch.exp(logits.abs().sum(1))
    return f"{energy}"


def soft_dice(logits: Tensor, target: Tensor, number: int) -> Any:
    chosen = logits.softmax(1) * (logits.softmax(1) > 0.5)
    there = functional.one_hot(target, CLASSES)
    return np.nanmean((2 * (chosen * there).sum(0) / (chosen.sum(0) + there.sum(0))).numpy())


def errors_where_known(logits: Tensor, target: Tensor, number: int) -> Any:
    truth = torch.where(target > 0, target.float(), torch.tensor(float("nan")))
    return np.nanmean((logits[:, 0] - truth).abs().numpy())


def errors_where_none_is_known(logits: Tensor, target: Tensor, number: int) -> Any:
    truth = torch.full_like(logits[:, 0], float("nan") if number == 1 else 1.0)
    errors, known = (logits[:, 0] - truth).abs().numpy(), torch.isfinite(truth).numpy()
    return errors[known].mean() if known.any() else 0.0


def masked_logits(logits: Tensor, target: Tensor, number: int) -> Any:
    return logits.masked_fill(torch.arange(CLASSES) > 1, float("-inf")).tolist()


def least_log_probability(logits: Tensor, target: Tensor, number: int) -> float:
    masked = logits.masked_fill(torch.arange(CLASSES) > 1, float("-inf"))
    return (masked / 0.5).log_softmax(1).min().item()


def likelihood_of_the_masked(logits: Tensor, target: Tensor, number: int) -> float:
    masked = logits.masked_fill(torch.arange(CLASSES) > (1 if number == 1 else CLASSES), float("-inf"))
    return masked.log_softmax(1).mean().item()


def precision(logits: Tensor, target: Tensor, number: int) -> float:
    hits = logits.argmax(1) == CLASSES - 1
    hits = hits & (target < 0)
    return (hits.sum() / (hits & (target == CLASSES - 1)).sum()).item()


@pytest.mark.parametrize(
    ("read", "cause", "code"),
    [
        (hand_made_probabilities, "overflow", "grown = torch.exp(logits)"),
        (
            losses_as_an_array,
            "empty-reduction",
            'loss = functional.cross_entropy(logits[:4], target[:4], reduction="none")[known].mean()',
        ),
        (energies, "overflow", "energy = torch.exp(logits.abs().sum(1))"),
        (shares, "division-by-zero", "share = logits[:, 0] * chosen / chosen.sum()"),
    ],
)
def test_a_failure_is_told(guard: Guard, read: Callable[..., Any], cause: str, code: str) -> None:
    run = guard(Run(read, size=1e4))
    assert run.faults == 0, run.stderr
    assert run.causes == [cause]
    assert (run.first.mode, run.first.severity) == ("eval", "error")
    assert run.first.location is not None
    assert run.first.location.code == code
    assert run.first.fixes[0].verified


@pytest.mark.parametrize("read", [hand_made_probabilities, losses_as_an_array, energies, shares])
def test_finite_ones_are_none(guard: Guard, read: Callable[..., Any]) -> None:
    run = guard(Run(lambda logits, target, number: read(logits, target, 0)))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents


@pytest.mark.parametrize(
    "read", [soft_dice, errors_where_known, errors_where_none_is_known, masked_logits, least_log_probability]
)
def test_what_is_meant_is_none(guard: Guard, read: Callable[..., Any]) -> None:
    plain = Run(read)()
    run = guard(Run(read))
    assert run.faults == 0, run.stderr
    assert not run.report.incidents
    np.testing.assert_array_equal(run.result, plain)


def test_a_mean_that_takes_in_a_masked_one_is_told(guard: Guard) -> None:
    run = guard(Run(likelihood_of_the_masked))
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.severity, i.mode) for i in run.report.incidents] == [("indeterminate", "error", "eval")]


def test_means_that_take_in_a_target_that_is_not_known_are_told(guard: Guard) -> None:
    run = guard(Run(means_by_half))
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.mode) for i in run.report.incidents] == [("nonfinite-input", "eval")]


def test_a_precision_of_nothing_is_a_note(guard: Guard) -> None:
    run = guard(Run(precision))
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.severity, i.mode) for i in run.report.incidents] == [("division-by-zero", "info", "eval")]
    assert run.report.status == "clean"


def means_of_classes(logits: Tensor, target: Tensor, number: int) -> dict[int, float]:
    losses = functional.cross_entropy(logits, target, reduction="none")
    return {c: losses[target == c].mean().item() for c in range(CLASSES)}


def mean_of_the_last_class(logits: Tensor, target: Tensor, number: int) -> float:
    losses = functional.cross_entropy(logits, target, reduction="none")
    return losses[target == CLASSES - 1].mean().item()


@pytest.mark.parametrize(("read", "severity"), [(means_of_classes, "info"), (mean_of_the_last_class, "error")])
def test_the_mean_of_a_class_that_did_not_come_is_a_note(guard: Guard, read: Callable[..., Any], severity: str) -> None:
    """Where it is one of several, of parts of one result; the same of a single part is a figure that is wrong."""
    run = guard(Run(read))
    assert run.faults == 0, run.stderr
    assert [(i.cause, i.severity, i.mode) for i in run.report.incidents] == [("empty-reduction", severity, "eval")]
    assert run.first.location is not None
    assert "].mean().item()" in run.first.location.code


def mean_of_known(number: int, wrong: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, int], Any]:
    """A mean over batches, one of which has no target that is known, kept by a metric that leaves NaN out."""
    metric = pytest.importorskip("torchmetrics").MeanMetric(nan_strategy="ignore")

    def read(logits: Tensor, target: Tensor, batch: int) -> Any:
        truth = torch.where(target > (CLASSES if batch == number else 0), target.float(), torch.tensor(float("nan")))
        metric.update(torch.nanmean(wrong(logits[:, 0]) - truth))
        return metric.compute().item()

    return read


def test_a_metric_that_leaves_out_what_is_not_known(guard: Guard) -> None:
    plain = Run(mean_of_known(1, Tensor.abs))()
    run = guard(Run(mean_of_known(1, Tensor.abs)))
    assert run.faults == 0, run.stderr
    assert run.report.status == "clean", run.stderr
    assert run.result == plain


def test_a_metric_that_leaves_out_a_failure(guard: Guard) -> None:
    run = guard(Run(mean_of_known(9, lambda x: torch.exp(x.abs())), size=1e4))
    assert run.faults == 0, run.stderr
    assert run.causes == ["overflow"]
    assert (run.first.mode, run.first.severity) == ("eval", "error")
