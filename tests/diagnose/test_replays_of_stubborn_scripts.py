"""Scripts whose own code gets in the way of looking at a failure: it is told all the same, and truly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


class InHalf(nn.Module):
    """Computes in float16 by itself, and insists on it (EDM's preconditioning does)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8).half()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.half())
        assert hidden.dtype == torch.float16
        return hidden.float()


def test_a_model_that_refuses_another_precision(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = InHalf()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for step in range(5):
            loss = model(torch.rand(4, 8) * (6e4 if step == 3 else 1.0) + 1.0).abs().mean() * 1e-6
            if step == 3:
                model.body.weight.data.fill_(1.0)
                loss = model(torch.full((4, 8), 6e4)).abs().mean() * 1e-6
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    incident = run.report.incidents[0]
    assert (incident.cause, incident.step) == ("fp16-overflow", 3)
    refused = [fix for fix in incident.fixes if "the replay with it raised" in (fix.outcome or "")]
    assert refused
    assert all(fix.verified is None for fix in refused)


class AddsToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x += self.second(torch.relu(self.first(x))) * 100
        return x


def test_a_batch_that_the_model_overwrites_is_not_what_was_bad(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = AddsToItsInput()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        sizes = torch.tensor([1.0, 3e3]).repeat_interleave(30)[:, None]
        for (x,) in DataLoader(TensorDataset(torch.randn(60, 3) * sizes), 10):
            spread = x.pow(2).sum()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x.detach())
            loss = out.float().abs().mean() + 0.0 * spread
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert "fp16-overflow" in run.causes
    assert "nonfinite-input" not in run.causes


class NormalisesItsBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2048, 4)

    def forward(self, images: Tensor) -> Tensor:
        images.sub_(0.5).div_(0.2)
        return self.body(images)


def test_a_large_batch_that_the_model_normalises_in_place_is_run_again_as_it_was(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = NormalisesItsBatch()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        sizes = torch.tensor([1.0, 2e4]).repeat_interleave(36)[:, None]
        for (x,) in DataLoader(TensorDataset(torch.ones(72, 2048) * sizes), 12):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            loss = out.float().abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert (run.faults, run.first.cause, run.first.step) == (0, "fp16-overflow", 3)
    assert "the cast gives 99998 in float32" in run.first.explanation, "and not five times as much, normalised twice"
    assert "bit for bit" not in run.first.explanation


def test_lists_of_tensors_are_overwritten_while_a_bad_result_waits(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Linear(8, 4)
        average = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(6):
            model.eval()
            with torch.no_grad():
                score = model(torch.full((2, 8), float("inf")) if step == 2 else torch.rand(2, 8))
                torch._foreach_mul_(average, 0.9)
                torch._foreach_add_(average, list(model.parameters()), alpha=0.1)
            model.train()
            optimizer.zero_grad()
            model(torch.randn(4, 8)).pow(2).mean().backward()
            optimizer.step()
            float(score.mean())

    run = guard(body)
    assert run.faults == 0, run.stderr
