"""A replay is the step itself, bit for bit: every result that the replay makes again equals the one of the step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import bits, seed_everything

from ampguard.capture.record import BadResult
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer

AtFailure = Callable[..., list[Any]]
NAN = float("nan")


class Keeps(nn.Module):
    """Calls a network and keeps the bits of what came out, so that both runs can be compared."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any) -> Any:
        out = self.net(*args)
        SEEN.add(bits(out))
        return out


class Sink:
    """Out of a replay's reach, which puts back what a forward pass has changed: it has no `__dict__`."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def add(self, item: Any) -> None:
        self.kept.append(item)


SEEN = Sink()


def replays_exactly(at_failure: AtFailure, body: Callable[[], object], times: int = 1) -> None:
    """The failing step, replayed twice, gives the same bits in its last root call, is bad again, and claims exactness."""
    SEEN.kept.clear()
    found: list[tuple[Any, list[Any], list[Outcome]]] = []

    def look(replayer: Replayer, bad: BadResult) -> None:
        of_the_step = SEEN.kept[-1]
        SEEN.kept.clear()
        outcomes = [replayer.run() for _ in range(2)]
        found.append((of_the_step, list(SEEN.kept), outcomes))

    at_failure(body, look)
    assert len(found) == times
    for of_the_step, of_replays, outcomes in found:
        assert len(of_replays) >= 2
        assert of_replays[-1] == of_the_step
        assert all(outcome.is_bad for outcome in outcomes)
        assert all(outcome.is_exact for outcome in outcomes)


def step(model: nn.Module, *args: Any, dtype: torch.dtype | None = None, healthy: int = 2) -> None:
    """Some healthy steps, then one whose loss is NaN by a factor in the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(healthy + 1):
        with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
            loss = model(*args).float().pow(2).mean() / (0.0 if number == healthy else 1.0)
        optimizer.zero_grad()
        loss.backward()
        if number < healthy:
            optimizer.step()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = F.relu_(h) * 1.5
        h[:, 0] = h[:, 1].detach() * 2
        h.mul_(0.5).add_(1.0)
        h.masked_fill_(h > 3, 0.0)
        return h.transpose_(0, 1)


class DrawsEverywhere(nn.Module):
    """Draws from torch's, Python's and numpy's streams."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * torch.rand(6) + random.gauss(0, 1)
        return h * float(np.random.rand()) + torch.randn_like(h)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), (6, 4)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2)), (6, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), (3, 5, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), nn.MaxPool2d(2)), (2, 2, 8, 8)),
    "recurrent": (lambda: First(nn.LSTM(4, 5, num_layers=2, dropout=0.3)), (3, 2, 4)),
    "in-place": (InPlace, (6, 4)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (6, 4)),
    "every stream": (DrawsEverywhere, (6, 4)),
}


class First(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


def runs(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether this processor can do it at all."""
    try:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            model(x)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, dtype: torch.dtype | None, at_failure: AtFailure) -> None:
    make, shape = MODELS[name]
    seed_everything()
    model = Keeps(make())
    x = torch.randn(*shape)
    if name == "recurrent" and not runs(model, x, dtype):
        pytest.skip(f"PyTorch has no {dtype} LSTM on this processor")
    replays_exactly(at_failure, lambda: step(model, x, dtype=dtype))


def test_generator_of_the_script(at_failure: AtFailure) -> None:
    """Random numbers of a generator of its own, outside the module."""
    seed_everything()
    model = Keeps(nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(5)

    def body() -> None:
        for number in range(3):
            model(torch.zeros(1, 4)).sum().backward()
            x = torch.randn(6, 4, generator=generator) + torch.rand(6, 4)
            loss = model(x).pow(2).mean() * (NAN if number == 2 else 1.0)
            loss.backward()

    replays_exactly(at_failure, body)


def test_input_changed_in_place_before_the_call(at_failure: AtFailure) -> None:
    seed_everything()
    model = Keeps(nn.Linear(4, 2))

    def body() -> None:
        for number in range(3):
            x = torch.randn(6, 4)
            x.mul_(3.0).clamp_(-2, 2)
            model(x).pow(2).mean().mul(NAN if number == 2 else 1.0).backward()

    replays_exactly(at_failure, body)


def test_small_mask_changed_in_place_after_the_call(at_failure: AtFailure) -> None:
    """Small arguments are copied at the call: masks and states are often reused."""
    seed_everything()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x) + mask

    model, mask = Keeps(Masked()), torch.zeros(6, 2)

    def body() -> None:
        for number in range(3):
            mask[number] = 1.0
            loss = model(torch.randn(6, 4), mask).pow(2).mean() * (NAN if number == 2 else 1.0)
            mask.zero_()
            loss.backward()

    replays_exactly(at_failure, body)


def test_evaluation_in_inference_mode(at_failure: AtFailure) -> None:
    seed_everything()
    model = Keeps(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))).eval()

    def body() -> None:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
            model(torch.randn(6, 4))
            model(torch.randn(6, 4) * 1e6)

    replays_exactly(at_failure, body)


def test_two_calls_of_one_model_in_one_step(at_failure: AtFailure) -> None:
    """The second call reads running statistics that the first has changed."""
    seed_everything()
    model = Keeps(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)))

    def body() -> None:
        for number in range(3):
            a, b = torch.randn(6, 4), torch.randn(6, 4)
            one = model(a)
            two = model(b + one[:, :4].detach())
            ((one - two).pow(2).mean() * (NAN if number == 2 else 1.0)).backward()

    replays_exactly(at_failure, body)


def test_parameters_shared_by_two_modules(at_failure: AtFailure) -> None:
    seed_everything()
    embed = nn.Embedding(7, 4)
    head = nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    model = Keeps(nn.Sequential(embed, head))
    replays_exactly(at_failure, lambda: step(model, torch.tensor([1, 2, 3])))


# --- what is written through views outside the modules ----------------------------------------------------------------


def failing_step_with(change: Callable[[Tensor], None]) -> Callable[[], None]:
    """Each step makes a batch between two modules, changes it in place, and goes on; the last step's loss is NaN."""

    def body() -> None:
        seed_everything()
        first, model = nn.Linear(1, 1), Keeps(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(3):
            first(torch.zeros(1))
            x = torch.ones(6, 4)
            change(x)
            loss = model(x).pow(2).mean() * (NAN if number == 2 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return body


def same_bits(at_failure: AtFailure, body: Callable[[], None]) -> list[Outcome]:
    """The replayed call gives the bits of the step's own; what the replay claims of itself is left to the caller."""
    SEEN.kept.clear()

    def look(replayer: Replayer, bad: BadResult) -> tuple[Any, Any, Outcome]:
        of_the_step = SEEN.kept[-1]
        outcome = replayer.run()
        return of_the_step, SEEN.kept[-1], outcome

    (found,) = at_failure(body, look)
    assert found[0] == found[1]
    return [found[2]]


def one_view(x: Tensor) -> None:
    x[2] = 3.0


def one_view_twice(x: Tensor) -> None:
    row = x[2]
    row.mul_(2.0)
    row.add_(1.0)


def view_of_a_view(x: Tensor) -> None:
    x[2][1] = 5.0


def two_writes(x: Tensor) -> None:
    x[2] = 3.0
    x[4] = 7.0


def views_of_views_after_a_write(x: Tensor) -> None:
    x[2, 1] = 3.0
    x[4, 1] = 7.0


def masked_write(x: Tensor) -> None:
    x[x > 0] = 2.5


def list_of_views(x: Tensor) -> None:
    for row in x.unbind(0)[:1]:
        row.fill_(4.0)


@pytest.mark.parametrize(
    "change",
    [
        one_view,
        one_view_twice,
        view_of_a_view,
        masked_write,
        list_of_views,
        two_writes,
        views_of_views_after_a_write,
    ],
    ids=lambda change: change.__name__.replace("_", " "),
)
def test_batch_written_through_views(change: Callable[[Tensor], None], at_failure: AtFailure) -> None:
    same_bits(at_failure, failing_step_with(change))


def test_batch_written_through_a_view_is_compared_after_the_write(at_failure: AtFailure) -> None:
    (outcome,) = same_bits(at_failure, failing_step_with(one_view))
    assert outcome.is_exact


def test_new_tensor_written_through_a_view(at_failure: AtFailure) -> None:
    first, model = nn.Linear(1, 1), Keeps(nn.Linear(4, 2))

    def body() -> None:
        for number in range(3):
            first(torch.zeros(1))
            x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
            x[0] = 9.0
            (model(x).pow(2).mean() * (NAN if number == 2 else 1.0)).backward()

    same_bits(at_failure, body)


def test_result_computed_before_another_backward(at_failure: AtFailure) -> None:
    """A GAN's fake, computed outside the generator, is used again after the critic's backward."""
    seed_everything()
    maker, critic = Keeps(nn.Linear(3, 4)), nn.Linear(4, 1)

    def body() -> None:
        critic(torch.zeros(1, 4)).sum().backward()
        fake = maker(torch.randn(6, 3)) * 2.0
        critic(fake.detach()).mean().backward()
        (critic(fake).mean() * NAN).backward()

    def look(replayer: Replayer, bad: BadResult) -> list[str]:
        return [type(getattr(event, "module", event)).__name__ for event in replayer.events]

    (events,) = at_failure(body, look)
    assert "Keeps" in events
