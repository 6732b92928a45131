"""What a step was given is judged by the values that it read, not by what the script made of its tensors since."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]
BAD_STEP = 40


class Shifted(nn.Module):
    """Its derivative needs nothing of the input, so the script may write to it before `backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def overwriting(bad: Tensor, normalised: bool = False) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Shifted(), nn.LayerNorm(4)) if normalised else Shifted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(BAD_STEP + 1):
        x = bad.clone() if step == BAD_STEP else torch.randn(3, 4)
        out = model(x)
        if step >= 20:
            x.zero_()
        optimizer.zero_grad()
        out.pow(2).mean().backward()
        optimizer.step()


def one_hole() -> Tensor:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    x[1, 2] = math.inf
    return x


@pytest.mark.parametrize(
    ("bad", "samples"),
    [(one_hole(), [1]), (torch.full((3, 4), math.inf), [0, 1, 2])],
    ids=["one value", "all values"],
)
@pytest.mark.parametrize("normalised", [False, True])
def test_input_that_is_overwritten_before_backward(
    guard: Guard, bad: Tensor, samples: list[int], normalised: bool
) -> None:
    run = guard(lambda: overwriting(bad, normalised))

    assert run.faults == 0, run.stderr
    assert (run.first.step, run.first.cause, run.first.phase) == (BAD_STEP, "nonfinite-input", "data")
    assert run.first.evidence["rung"] == "replay"
    assert run.first.evidence["samples"] == samples
    assert any(fix.action == "fix-data" and fix.verified for fix in run.first.fixes)


class Sequence(nn.Module):
    """Its first product reads (time, batch, features) as (time * batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16, bias=False)
        self.cell = nn.GRUCell(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 4)
        for frame in self.project(x):
            state = self.cell(frame, state)
        return state


def test_input_that_is_read_through_a_view_has_its_own_shape(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Sequence()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            x = torch.randn(6, 4, 8)
            if step == 2:
                x[3, 1] = -math.inf
            target = torch.randn(4, 4)
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert (run.first.step, run.first.cause, run.first.evidence["name"]) == (2, "nonfinite-input", "x")
    assert run.first.evidence["samples"] == [3]
    assert [fix.action for fix in run.first.fixes if fix.verified] == ["filter-sample", "fix-data"]


def test_buffer_that_held_two_batches_of_one_window(guard: Guard) -> None:
    """The same tensor is filled anew for each micro-batch; only the second one is bad."""

    def body() -> None:
        torch.manual_seed(0)
        model = Shifted()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.empty(3, 4)
        for step in range(BAD_STEP + 1):
            optimizer.zero_grad()
            for part in range(2):
                x.copy_(one_hole() if step == BAD_STEP and part else torch.randn(3, 4))
                out = model(x)
                x.zero_()
                out.pow(2).mean().backward()
            optimizer.step()

    run = guard(body)

    assert (run.first.step, run.first.cause) == (BAD_STEP, "nonfinite-input")
    assert run.first.evidence["samples"] == [1]


class Attention(nn.Module):
    """A model that is handed its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.score(x) + mask).softmax(-1)


def filled(keep: Tensor) -> Tensor:
    return torch.zeros(4, 4).masked_fill(~keep, -math.inf)


def with_biases(keep: Tensor) -> Tensor:
    return torch.where(keep, torch.rand(4, 4), torch.tensor(-math.inf))


def overwritten(keep: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[~keep] = -math.inf
    return mask


@pytest.mark.parametrize("mask_of", [filled, with_biases, overwritten])
def test_mask_that_the_loop_makes_is_no_data(guard: Guard, mask_of: Callable[[Tensor], Tensor]) -> None:
    """The row without a key is at fault, not the mask's infinities."""

    def body() -> None:
        torch.manual_seed(0)
        model = Attention()
        for step in range(4):
            keep = torch.rand(4, 4) > 0.3
            keep[:, 0] = True
            if step == 3:
                keep[2] = False
            model(torch.ones(4, 4), mask_of(keep)).pow(2).mean().backward()

    run = guard(body)

    assert (run.first.step, run.first.cause, run.first.op) == (3, "masked-softmax", "aten._softmax.default")
    assert run.first.evidence["empty_rows"] == 1


class Biased(nn.Module):
    """The mask is the bias of the product of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        scores = torch.baddbmm(bias, self.query(x), self.key(x).transpose(1, 2), alpha=0.5)
        return scores.softmax(-1) @ x


def test_mask_that_is_the_bias_of_a_product_is_no_data(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Biased()
        for step in range(4):
            bias = torch.rand(2, 3, 3)
            bias.masked_fill_(torch.arange(3) >= (0 if step == 3 else 2), -math.inf)
            model(torch.randn(2, 3, 4), bias).sum().backward()

    run = guard(body)

    assert (run.first.step, run.first.cause, run.first.op) == (3, "masked-softmax", "aten._softmax.default")


@pytest.mark.parametrize("loss_of", [Tensor.neg, Tensor.square], ids=["negated", "squared"])
def test_log_partition_over_nothing(guard: Guard, loss_of: Callable[[Tensor], Tensor]) -> None:
    """The loss itself is infinite: the row without an entry is at fault, wherever its -Inf was turned round."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        for step in range(3):
            scores = model(torch.randn(5, 4))
            if step == 2:
                scores = scores.masked_fill(torch.arange(5)[:, None] == 1, -math.inf)
            total = torch.logsumexp(scores, 1)
            loss_of(total).mean().backward()

    run = guard(body)

    assert (run.first.step, run.first.cause, run.first.op) == (2, "masked-softmax", "aten.logsumexp.default")
    assert run.first.location is not None
    assert "logsumexp" in run.first.location.code
    assert run.first.evidence["empty_rows"] == 1
    assert run.first.fixes[0].verified


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinity_of_the_data_that_a_softmax_meets(guard: Guard, value: float, loaded: bool) -> None:
    """Classification: what the loss's softmax makes of an infinite logit is a consequence."""

    def body() -> None:
        torch.manual_seed(0)
        data, labels = torch.randn(40, 4), torch.randint(0, 4, (40,))
        data[35, 1] = value
        model = nn.Linear(4, 4)
        nn.init.uniform_(model.weight)  # rows that are all -Inf are no mask's either
        for number in range(5):
            x = data[8 * number :][:8] if loaded else torch.randn(8, 4)
            if not loaded and number == 4:
                x[3, 1] = value
            nn.functional.cross_entropy(model(x), labels[8 * number :][:8]).backward()

    run = guard(body)

    assert (run.first.step, run.first.cause, run.first.phase) == (4, "nonfinite-input", "data")
    assert run.first.op == "aten.addmm.default"
    assert run.first.evidence["samples"] == ([35] if loaded else [3])
    assert run.first.evidence["role"] == "input"
    assert ("row 35 of it" if loaded else "sample 3 of the batch") in run.first.explanation


def test_gradient_that_a_hook_replaces_is_no_input(guard: Guard) -> None:
    """What a hook hands to the backward pass was given by nobody: no batch is accused."""

    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        bad = torch.full((3, 4), math.nan)
        out = model[0](torch.randn(3, 4))
        out.register_hook(lambda _: bad)
        model[1](out).sum().backward()
        optimizer.step()

    run = guard(body)

    assert run.causes == ["unexplained"]
    assert "a hook put it there" in run.first.explanation


def test_weights_that_no_optimizer_trains_were_not_poisoned_by_an_update(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        student, teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
        for step in range(4):
            if step == 3:
                teacher.load_state_dict({**teacher.state_dict(), "bias": torch.tensor([0.0, math.nan, 0.0])})
            x = torch.randn(5, 4)
            with torch.no_grad():
                target = teacher(x).softmax(-1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(student(x), target).backward()
            optimizer.step()

    run = guard(body)

    assert (run.first.step, run.first.cause) == (3, "nonfinite-parameter")
    assert "update" not in run.first.explanation
    assert "These values were loaded at test_givens.py" in run.first.explanation
    assert "teacher.load_state_dict(" in run.first.explanation


def test_name_of_what_a_line_read_has_no_comment(guard: Guard) -> None:
    def body() -> None:
        target = torch.tensor([0.0, math.nan, 1.0])
        out = nn.Linear(2, 3)(torch.ones(2))
        (out - target).square().mean().backward()  # the target has a hole

    run = guard(body)

    assert run.first.cause == "nonfinite-input"
    assert "hole" not in run.first.explanation
    assert "row 1 of it" in run.first.explanation


@pytest.mark.parametrize(("excess", "said"), [(1e-6, "1.00000"), (0.5, "1.5,")])
def test_operand_can_be_told_from_the_end_of_its_domain(guard: Guard, excess: float, said: str) -> None:
    def body() -> None:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        torch.acos(layer(torch.full((1, 1), 1 + excess))).sum().backward()

    run = guard(body)

    assert run.first.cause == "domain-error"
    assert f"was given {said}" in run.first.explanation
    assert "was given 1," not in run.first.explanation
