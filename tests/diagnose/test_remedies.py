"""Fixes of a divergence are tried on the steps that led to it: real loops, and what each fix comes to is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import seed_everything

from ampguard.capture.events.producers import Producers
from ampguard.capture.glue.schedule import TapeSchedule
from ampguard.capture.sampling import keeper
from ampguard.errors import ReplayError
from ampguard.incident import Fix, Incident
from ampguard.replay.stretch_updates import limits_of

STEPS = 70
JUMP_AT = 40
Guard = Callable[..., Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8)
    return x, x.sum(1, keepdim=True)


def fixes_of(incident: Incident) -> dict[str, Fix]:
    return {fix.action: fix for fix in incident.fixes}


# --- the learning rate is raised from one step to the next --------------------------------------------------------------


def plain(optimizer_of: Callable[[Any], torch.optim.Optimizer], factor: float) -> None:
    seed_everything()
    model = net()
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        if step == JUMP_AT:
            for group in optimizer.param_groups:
                group["lr"] *= factor
        x, y = batch()
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to diverge")


def with_scaler(optimizer_of: Callable[[Any], torch.optim.Optimizer], factor: float) -> None:
    seed_everything()
    model = net()
    optimizer = optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    for step in range(STEPS):
        if step == JUMP_AT:
            for group in optimizer.param_groups:
                group["lr"] *= factor
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            loss = (out.float() - y).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 50.0)
        scaler.step(optimizer)
        scaler.update()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to diverge")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


SUDDEN = {
    "sgd": lambda: plain(sgd, 200.0),
    "sgd, one update": lambda: plain(sgd, 1e9),
    "adamw": lambda: plain(adamw, 1e6),
    "adamw, one update": lambda: plain(adamw, 1e12),
    "sgd, scaler": lambda: with_scaler(sgd, 1e4),
    "adamw, scaler": lambda: with_scaler(adamw, 3e4),
}


@pytest.mark.parametrize("name", SUDDEN)
def test_rate_that_is_raised_at_once_is_divergence_and_the_rate_of_before_cures_it(guard: Guard, name: str) -> None:
    run = guard(SUDDEN[name])

    assert run.faults == 0, run.stderr
    assert run.causes[0] == "divergence", run.stderr
    incident = run.first
    assert incident.evidence["began_at_step"] == JUMP_AT
    assert JUMP_AT < incident.step <= JUMP_AT + 8
    fix = fixes_of(incident)["lower-learning-rate"]
    assert fix.verified, fix
    assert "which it was before" in fix.how
    assert f"steps {JUMP_AT} to {incident.step} replayed" in str(fix.outcome)
    assert incident.evidence["weights_moved_by"] > 0.5
    assert "learning rate went from" in incident.evidence["alarm"]
    assert fixes_of(incident)["clip-gradients"].verified is not None


# --- slow: a rate that is too large for the model -----------------------------------------------------------------------


def slowly(rate: float) -> None:
    seed_everything()
    model = nn.Linear(24, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(400):
        x = torch.randn(96, 24)
        loss = (model(x).sin() + model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to diverge")


@pytest.mark.parametrize("rate", [0.8, 1.5, 4.0])
def test_rate_that_is_too_large_from_the_start_is_cured_by_a_tenth(guard: Guard, rate: float) -> None:
    run = guard(lambda: slowly(rate))

    assert run.faults == 0, run.stderr
    assert run.causes[0] == "divergence", run.stderr
    fix = fixes_of(run.first)["lower-learning-rate"]
    assert fix.verified, fix
    assert "by a factor of 10" in fix.how


def giant_from_the_start(rate: float) -> None:
    seed_everything()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(20):
        x, y = batch()
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to diverge")


@pytest.mark.parametrize("rate", [30.0, 300.0])
def test_what_is_tried_after_the_update_that_did_it_is_not_called_not_enough(
    guard: Guard, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update of all blows the weights up, and steps are kept from the second on: no remedy undoes that one."""
    monkeypatch.setattr(keeper, "FIRST_UPDATES", 0)  # as on a device, which is not waited for
    run = guard(lambda: giant_from_the_start(rate))

    assert run.causes[0] == "divergence", run.stderr
    fix = fixes_of(run.first)["lower-learning-rate"]
    assert fix.verified is None, fix
    assert "had left its range before step 1 already" in str(fix.outcome)
    assert run.first.evidence["began_at_step"] == 0
    assert "usual_update_ratio" not in run.first.evidence, "no update of this run was a usual one"


# --- one batch ----------------------------------------------------------------------------------------------------------


def outlier_then_divergence() -> None:
    """One batch is 1,000 times larger; its update blows the weights up, and the batches after it overflow."""
    seed_everything()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        x, y = batch()
        if step == JUMP_AT:
            x = x * 1e3
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to diverge")


def test_giant_update_of_one_batch_is_divergence_and_clipping_cures_it(guard: Guard) -> None:
    run = guard(outlier_then_divergence)

    assert run.causes[0] == "divergence", run.stderr
    assert run.first.evidence["began_at_step"] == JUMP_AT
    fix = fixes_of(run.first)["clip-gradients"]
    assert fix.verified, fix
    assert run.first.fixes[0] == fix, "what works comes first"
    limit = float(fix.how.rpartition(", ")[2].rstrip(")"))
    assert 0.1 < limit < 50, "the norm that was usual before"


@pytest.mark.parametrize("steepness", [1e10, 1e16])
def test_giant_gradient_of_a_loss_that_looks_healthy(guard: Guard, steepness: float) -> None:
    """Nothing is unusual before the update that breaks it: the sampled weights tell that it was that one."""

    def body() -> None:
        seed_everything()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for step in range(STEPS):
            x, y = batch()
            loss = (model(x) - y).square().mean()
            if step == JUMP_AT:
                loss = loss + 0.1 * (steepness * model[4].weight.sum()).sin()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not loss.isfinite():
                return
        raise AssertionError("this loop was meant to diverge")

    run = guard(body)

    assert run.faults == 0, run.stderr
    assert run.causes[0] == "divergence", run.stderr
    assert run.first.evidence["began_at_step"] == JUMP_AT
    clip = fixes_of(run.first)["clip-gradients"]
    assert not clip.verified, "the update that did it was not kept"


def growing_data() -> None:
    """Each batch is four times the one before it: no learning rate helps."""
    seed_everything()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(400):
        x, y = batch()
        x, y = x * 4.0 ** max(0, step - JUMP_AT), y * 4.0 ** max(0, step - JUMP_AT)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return


def test_bad_data_is_cured_by_neither(guard: Guard) -> None:
    run = guard(growing_data)

    assert run.causes
    tried = [f for f in run.first.fixes if f.action in ("lower-learning-rate", "clip-gradients")]
    assert all(not fix.verified for fix in tried)


def one_bad_batch_after_a_harmless_raise() -> None:
    """The learning rate is raised by what the model bears; a few steps later one batch is beyond float32."""
    seed_everything()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        if step == JUMP_AT:
            optimizer.param_groups[0]["lr"] *= 5
        x, y = batch()
        if step == JUMP_AT + 4:
            x = x * 1e30
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return


def test_batch_that_overflows_on_the_old_weights_too_is_no_divergence(guard: Guard) -> None:
    run = guard(one_bad_batch_after_a_harmless_raise)

    assert run.causes == ["overflow"], run.stderr
    assert run.first.step == JUMP_AT + 4


# --- what makes a step hard to run again ---------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 12, batch_first=True)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.cell(x)[0].mean(1)))) * 10


def diverge(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    parts: int = 1,
    before_step: Callable[..., object] = lambda: None,
) -> None:
    for step in range(STEPS):
        if step == JUMP_AT:
            for group in optimizer.param_groups:
                group["lr"] *= 1e22
        optimizer.zero_grad()
        finite = True
        for _ in range(parts):
            loss = loss_of() / parts
            loss.backward()
            finite &= bool(loss.isfinite())
        before_step()
        optimizer.step()
        if not finite:
            return
    raise AssertionError("this loop was meant to diverge")


def recurrent_with_dropout() -> None:
    seed_everything()
    model = Recurrent()

    def loss() -> Tensor:
        x = torch.randn(16, 5, 8)
        return (model(x) - x.sum((1, 2))[:, None]).square().mean()

    diverge(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss)


def accumulated_with_a_penalty_and_clipping_by_hand(in_hook: bool = False) -> None:
    seed_everything()
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x, y = batch()
        return F.huber_loss(model(x), y) + 1e-4 * sum(p.square().sum() for p in model.parameters())

    def clip(*_: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if norm > 0.5:
            for p in model.parameters():
                p.grad.mul_(0.5 / norm)

    if in_hook:
        optimizer.register_step_pre_hook(clip)
    diverge(model, optimizer, loss, parts=3, before_step=(lambda: None) if in_hook else clip)


def with_schedule_and_groups() -> None:
    seed_everything()
    model = net()
    groups = [{"params": model[:2].parameters(), "lr": 1e-3}, {"params": model[2:].parameters(), "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, foreach=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    def loss() -> Tensor:
        x, y = batch()
        return (model(x) - y).square().mean()

    optimizer.register_step_post_hook(lambda *_: schedule.step())
    diverge(model, optimizer, loss)


class Normalised(nn.Module):
    """Keeps a running number that its first call makes, as RetinaNet does with its normaliser."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        self.running = 0.9 * getattr(self, "running", 10.0) + 0.1 * float((x > 0).sum())
        return self.net(x) / self.running


def with_a_number_that_the_first_call_makes() -> None:
    seed_everything()
    model = Normalised()

    def loss() -> Tensor:
        x, y = batch()
        return (model(x) - y).square().mean()

    diverge(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss)


HARD = [
    with_a_number_that_the_first_call_makes,
    recurrent_with_dropout,
    accumulated_with_a_penalty_and_clipping_by_hand,
    with_schedule_and_groups,
]


@pytest.mark.parametrize("body", HARD)
def test_steps_are_reproduced(guard: Guard, body: Callable[[], None]) -> None:
    run = guard(body)

    assert run.faults == 0, run.stderr
    assert run.causes[0] == "divergence", run.stderr
    fix = fixes_of(run.first)["lower-learning-rate"]
    assert fix.verified, fix


def test_without_a_replay_the_growth_of_the_weights_tells(guard: Guard) -> None:
    """What an optimizer's own hook does to the gradients is seen by nobody: the steps give other losses."""
    run = guard(lambda: accumulated_with_a_penalty_and_clipping_by_hand(in_hook=True))

    assert run.causes[0] == "divergence", run.stderr
    assert run.first.evidence["began_at_step"] == JUMP_AT
    assert run.first.evidence["weights_grew_by"] > 10
    for fix in run.first.fixes:
        assert fix.verified is None
        assert "not reproduced" in str(fix.outcome)


def two_optimizers() -> None:
    """A GAN of which only the maker's rate is raised."""
    seed_everything()
    maker = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    opt_m = torch.optim.Adam(maker.parameters(), lr=1e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for step in range(STEPS):
        if step == JUMP_AT:
            opt_m.param_groups[0]["lr"] = 1e14
            opt_c.param_groups[0]["lr"] = 1e6
        real, fake = torch.randn(16, 4), maker(torch.randn(16, 3))
        loss_c = (critic(real) - 1).square().mean() + critic(fake.detach()).square().mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        loss_m = (critic(fake) - 1).square().mean()
        opt_m.zero_grad()
        loss_m.backward()
        opt_m.step()
        if not math.isfinite(loss_c.item() + loss_m.item()):
            return
    raise AssertionError("this loop was meant to diverge")


def test_two_optimizers_are_replayed_in_their_order(guard: Guard) -> None:
    run = guard(two_optimizers)

    assert run.faults == 0, run.stderr
    assert run.causes[0] == "divergence", run.stderr
    assert fixes_of(run.first)["lower-learning-rate"].verified


def test_calls_that_are_kept_in_short_are_in_use(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The critic's call lies among them where what comes before the first module is kept: its result was forgotten."""
    was = TapeSchedule.prefix_was
    monkeypatch.setattr(TapeSchedule, "prefix_was", lambda self, used, writes_state=False: was(self, True))
    monkeypatch.setattr(Producers, "forget", Producers.keep_made_by)
    run = guard(two_optimizers)
    assert run.faults == 0, run.stderr
    assert run.causes[0] == "divergence", run.stderr
    assert fixes_of(run.first)["lower-learning-rate"].verified


# --- where it cannot be shown --------------------------------------------------------------------------------------------


def changed_inputs() -> None:
    """One buffer for every batch: what the steps read is overwritten by the next one."""
    seed_everything()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x = torch.empty(4096, 8)
    memory = x.numpy()  # writes to it count no version
    for step in range(STEPS):
        if step == JUMP_AT:
            optimizer.param_groups[0]["lr"] *= 200
        memory[:] = torch.randn(4096, 8).numpy()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return


def gradients_changed_by_hand() -> None:
    seed_everything()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        x, y = batch()
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step >= JUMP_AT:
            optimizer.param_groups[0]["lr"] = 1.0
            for p in model.parameters():
                p.grad.mul_(torch.randn_like(p) * 100)
        optimizer.step()
        if not loss.isfinite():
            return


@pytest.mark.parametrize(
    ("body", "reason"),
    [(changed_inputs, "not reproduced"), (gradients_changed_by_hand, "not reproduced")],
)
def test_what_cannot_be_run_again_is_not_called_tried(guard: Guard, body: Callable[[], None], reason: str) -> None:
    run = guard(body)

    assert run.faults == 0, run.stderr
    fixes = [f for i in run.report.incidents for f in i.fixes if f.action in ("lower-learning-rate", "clip-gradients")]
    assert fixes, run.stderr
    for fix in fixes:
        assert fix.verified is None
        assert reason in str(fix.outcome)


@pytest.mark.parametrize(
    ("norms", "limit"),
    [
        ([(2.0, 2.0), (8.0, 8.0)], None),
        ([(2.0, 1.0), (8.0, 1.0), (0.5, 0.5)], 1.0),
        ([(2.0, 1.0), (8.0, 4.0)], ReplayError),
        ([(2.0, 1.0), (8.0, 8.0)], ReplayError),
        ([(2.0, 6.0)], ReplayError),
    ],
    ids=["untouched", "clipped at 1", "halved", "clipped once", "made larger"],
)
def test_clipping_is_told_from_other_changes(norms: list[tuple[float, float]], limit: Any) -> None:
    if limit is ReplayError:
        with pytest.raises(ReplayError, match="other than clipping"):
            limits_of([(0, *pair) for pair in norms])
    else:
        assert limits_of([(0, *pair) for pair in norms]) == ({} if limit is None else {0: limit})
