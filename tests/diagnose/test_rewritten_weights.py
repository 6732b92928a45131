"""Weights that the script writes to its modules by itself, in the step in which they make a result bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

from ampguard.capture.glue import schedule

Guard = Callable[..., Watched]


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))


def ascend(model: nn.Module, is_through_data: bool) -> list[Tensor]:
    """The first half of a step of SAM (Foret et al. 2021), without the 1e-12 beside the norm."""
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        steps = [0.05 * p.grad / norm for p in model.parameters() if p.grad is not None]
        for parameter, step in zip(model.parameters(), steps, strict=True):
            (parameter.data if is_through_data else parameter).add_(step)
    return steps


def train_by_ascent(is_through_data: bool) -> Any:
    """The batch of step 6 counts for nothing, so that its gradients are 0."""
    seed_everything()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(9):
        x, y = torch.randn(20, 10), torch.randint(0, 3, (20,))
        weight = 0.0 if number == 6 else 1.0
        optimizer.zero_grad()
        (weight * F.cross_entropy(model(x), y)).backward()
        steps = ascend(model, is_through_data)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            break
        loss.backward()
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), steps, strict=True):
                parameter.sub_(step)
        optimizer.step()
    return bits([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("is_through_data", [False, True])
def test_an_ascent_by_a_norm_of_zero(is_through_data: bool, guard: Guard) -> None:
    plain = train_by_ascent(is_through_data)
    run = guard(lambda: train_by_ascent(is_through_data))
    assert run.result == plain
    first = run.first
    assert (first.cause, first.op, first.step, first.module) == ("division-by-zero", "aten.div.Tensor", 6, None)
    assert first.location is not None
    assert first.location.code.startswith("steps = [0.05 * p.grad / norm")
    assert (first.phase, first.fixes[0].verified) == ("parameters", True)


def test_a_teacher_that_is_refreshed_before_each_step(guard: Guard) -> None:
    """Its first average is divided by 0; the script passes over the bad loss, and the next refresh mends the teacher."""

    def train() -> Any:
        seed_everything()
        student, teacher = small_net(), small_net()
        average = [torch.zeros_like(p) for p in student.parameters()]
        optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
        for number in range(6):
            with torch.no_grad():
                for mean, mine, its in zip(average, student.parameters(), teacher.parameters(), strict=True):
                    mean.mul_(0.98).add_(mine, alpha=0.02)
                    its.copy_(mean / torch.tensor(1 - 0.98**number))
            x, y = torch.randn(20, 10), torch.randint(0, 3, (20,))
            with torch.no_grad():
                soft = F.softmax(teacher(x), -1)
            logits = student(x + 0.1 * torch.randn_like(x))
            loss = F.cross_entropy(logits, y) + F.kl_div(F.log_softmax(logits, -1), soft, reduction="batchmean")
            if torch.isfinite(loss):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return bits([p.detach() for p in student.parameters()])

    plain = train()
    run = guard(train)
    assert run.result == plain
    assert run.causes == ["division-by-zero"]
    assert (run.first.mode, run.first.op, run.first.step) == ("train", "aten.div.Tensor", 0)
    assert run.first.location is not None
    assert run.first.location.code.startswith("its.copy_(")


def test_averaged_weights_swapped_in_for_one_batch(guard: Guard) -> None:
    """They are gone when the next step begins, and the failure is one of the evaluation all the same."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(10, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return self.b(h / h.sum(-1, keepdim=True))  # type: ignore[no-any-return]

    def train() -> None:
        seed_everything()
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        average = [p.detach().clone() for p in model.parameters()]
        for number in range(6):
            loss = F.cross_entropy(model(torch.rand(20, 10) + 1), torch.randint(0, 3, (20,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == 3:
                average[1].sub_(9.0)
                kept = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    for p, mean in zip(model.parameters(), average, strict=True):
                        p.copy_(mean)
                    model.eval()(torch.rand(20, 10) + 1)
                    for p, old in zip(model.train().parameters(), kept, strict=True):
                        p.copy_(old)

    run = guard(train)
    assert run.causes == ["division-by-zero"]
    assert (run.first.mode, run.first.step, run.first.module, run.first.op) == ("eval", 4, "", "aten.div.Tensor")


@pytest.mark.parametrize("written", ["divided", "copied", "given", "detached"])
def test_projection_through_data(guard: Guard, written: str) -> None:
    """Each fix is tried on the values of the step, whatever a replay before it has written to them."""

    def renormalise(weight: nn.Parameter) -> None:
        w = weight.detach() if written == "detached" else weight.data
        if written in ("divided", "detached"):
            w.div_(w.norm(dim=1, keepdim=True))
        elif written == "given":
            weight.data = w / w.norm(dim=1, keepdim=True)
        else:
            weight.data.copy_(w / w.norm(dim=1, keepdim=True))

    def script() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(12):
            loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 8:
                model[2].weight.data[1] = 0.0
            renormalise(model[2].weight)

    run = guard(script)
    assert run.faults == 0, run.stderr
    first = run.report.incidents[0]
    assert (first.cause, first.step) == ("division-by-zero", 9)
    assert [fix.action for fix in first.fixes] == ["add-epsilon", "clamp"]
    assert all(fix.verified for fix in first.fixes)
    assert "\n" not in first.fixes[0].how


@pytest.mark.parametrize("are_steps_long", [False, True])
@pytest.mark.parametrize("through", ["data", "detach"])
def test_average_in_one_statement(
    guard: Guard, through: str, are_steps_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several writes to what has no name of its own, the last of them bad. In long steps each operator is kept."""
    monkeypatch.setattr(schedule, "LONG_STEP", 0.0 if are_steps_long else 1e9)
    monkeypatch.setattr(schedule, "MUCH_GLUE", 1e9 if are_steps_long else 0.0)
    monkeypatch.setattr(schedule, "PREFIX_TIME_SHARE", 0.0)

    def script() -> None:
        seed_everything()
        online, target = small_net(), small_net().requires_grad_(False)
        optimizer = torch.optim.SGD(online.parameters(), lr=0.01)
        for step in range(12):
            x = torch.randn(6, 10)
            loss = F.mse_loss(online(x), target(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correction = torch.tensor(0.0 if step == 8 else 1.0)
            for t, p in zip(target.parameters(), online.parameters(), strict=True):
                written = t.data if through == "data" else t.detach()
                written.mul_(0.9).add_(p.detach(), alpha=0.1).div_(correction)
                del written

    run = guard(script)
    assert run.faults == 0, run.stderr
    first = run.report.incidents[0]
    assert (first.cause, first.step, first.op) == ("division-by-zero", 9, "aten.div_.Tensor")
    assert first.location is not None
    assert first.location.code == "written.mul_(0.9).add_(p.detach(), alpha=0.1).div_(correction)"
