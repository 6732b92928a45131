"""A model that raises because of its numbers: why they were bad is told, not what the message says about a shape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from watching import Watched, fingerprint, seed_everything

import ampguard
from ampguard.capture.root_calls import pace

Guard = Callable[..., Watched]
BAD = 3


class Normalized(nn.Module):
    """Divides by a norm that is 0 where the observation is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8, bias=False), nn.Linear(8, 3)

    def mean(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden / hidden.norm(dim=-1, keepdim=True))


class Actor(Normalized):
    def forward(self, x: Tensor) -> Tensor:
        return Normal(self.mean(x), 1.0, validate_args=True).rsample()  # (Dynamo switches the check off)


class Chooser(Normalized):
    def forward(self, x: Tensor) -> Tensor:
        return Categorical(logits=self.mean(x)).log_prob(torch.zeros(len(x)))


class Sampler(Normalized):
    """PyTorch's own operator refuses."""

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.mean(x).softmax(-1)
        chosen = torch.multinomial(probabilities, 1)
        return probabilities.gather(1, chosen).log()


class Careful(Normalized):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x)
        if not torch.isfinite(mean).all():
            raise FloatingPointError("the mean is not finite")
        return mean


def observed(step: int) -> Tensor:
    x = torch.randn(5, 4)
    if step == BAD:
        x[2] = 0
    return x


@pytest.mark.parametrize("kind", [Actor, Chooser, Sampler, Careful])
def test_training_step_that_is_refused(kind: type[nn.Module], guard: Guard) -> None:
    def body() -> object:
        seed_everything()
        model = kind()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(6):
            optimizer.zero_grad()
            with contextlib.suppress(ValueError, RuntimeError, FloatingPointError):  # the batch is left out
                model(observed(step)).pow(2).mean().backward()
                optimizer.step()
        return fingerprint(model, optimizer)

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.mode) == ("division-by-zero", BAD, "train")
    assert incident.location is not None
    assert incident.location.code == "return self.head(hidden / hidden.norm(dim=-1, keepdim=True))"
    assert any(fix.verified for fix in incident.fixes)


@pytest.mark.parametrize("free", [2.0, -10.0])
def test_rollout_that_is_refused_after_many(free: float, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without gradients are looked at from outside after a while: the one that raises is kept all the same."""
    monkeypatch.setattr(pace, "FREE_SECONDS", free)

    def body() -> None:
        seed_everything()
        model = Actor()
        with torch.no_grad():
            for _ in range(40):
                model(observed(0))
            with pytest.raises(ValueError, match="Expected parameter loc"):
                model(observed(BAD))

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["division-by-zero"]
    assert run.first.mode == "eval"


def test_weights_that_an_earlier_step_has_spoiled_are_its_consequence(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = Actor()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(observed(0)).mean() * 0).log().backward()
        optimizer.step()
        for step in range(1, 3):
            with contextlib.suppress(ValueError):
                model(observed(step)).mean().backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == ["domain-error"]


def test_other_errors_are_the_scripts_own(guard: Guard) -> None:
    """A wrong shape, an index: though there is a mask of -Inf about, or an earlier NaN that was put aside."""

    class Wrong(Normalized):
        def forward(self, x: Tensor, fails: bool) -> Tensor:
            mask = torch.full((5, 5), -torch.inf).triu(1)
            scores = (x @ x.T + mask).softmax(-1)
            return scores @ (x[:2] if fails else x)

    def body() -> None:
        model = Wrong()
        model(torch.randn(5, 4), fails=False)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(5, 4), fails=True)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == []


def strict_log_prob(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("Expected value argument to be within the support")
    return Normal(0.0, 1.0).log_prob(x).sum(-1)


class Flow(nn.Module):
    """Has no forward; what it computes goes into a distribution that refuses infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(4, 4)

    def log_prob(self, x: Tensor) -> Tensor:
        return strict_log_prob(x + self.shift(x))


def logits_of(x: Tensor) -> tuple[Tensor, Tensor]:
    z = torch.log(x) - torch.log1p(-x)
    correction = -torch.log(x) - torch.log1p(-x)
    return z, correction.sum(-1)


def train_flow(flow: Flow, log_prob: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.SGD(flow.parameters(), lr=1e-3)
    for step in range(BAD + 1):
        x = torch.rand(5, 4) * 0.8 + 0.1
        if step == BAD:
            x[2, 1] = 0
        ban = torch.zeros(5).masked_fill(torch.arange(5) > 3, float("-inf"))
        z, correction = logits_of(x)
        loss = -((log_prob(z) + correction) * (ban == 0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_training_step_that_ends_before_its_loss(is_first: bool, tmp_path: Path) -> None:
    """What failed was computed from data alone, and a mask with infinities of its own stood beside it.

    `is_first`: the error comes before the model was called.
    """
    seed_everything()
    flow = Flow()
    with pytest.raises(ValueError, match="Expected value argument"), ampguard.watch(out=tmp_path / "run") as session:
        train_flow(flow, (lambda z: strict_log_prob(z) + flow.log_prob(z)) if is_first else flow.log_prob)

    assert session.report is not None
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step, incident.mode) == ("domain-error", BAD, "train")
    assert incident.location is not None
    assert incident.location.code == "z = torch.log(x) - torch.log1p(-x)"
    fix = incident.fixes[0]
    assert (fix.action, fix.verified) == ("clamp", True)
    assert "correction = -torch.log(x.clamp(" in fix.how, "both lines are needed"
