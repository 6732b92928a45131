"""Divergence in trainings of several styles, and what only looks like it: real loops, told as one incident each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

Guard = Callable[..., Watched]


def errors_of(run: Watched) -> list[str]:
    return [i.cause for i in run.report.incidents if i.severity == "error"]


def verified(run: Watched) -> dict[str, bool | None]:
    return {fix.action: fix.verified for fix in run.first.fixes}


class Coupling(nn.Module):
    """Of a normalising flow: the scale of one half is the exponential of what the other half says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 8))
        nn.init.normal_(self.net[2].weight, std=0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        log_scale, shift = self.net(a).chunk(2, 1)
        return torch.cat((b * log_scale.exp() + shift, a), 1), log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return x, total


def flow() -> None:
    seed_everything()
    model = Flow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    for step in range(60):
        if step == 25:
            optimizer.param_groups[0]["lr"] = 0.03
        z, log_det = model(torch.randn(128, 8) * 2 + 1)
        loss = (0.5 * z.pow(2).sum(1) - log_det).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return
    raise AssertionError("this loop was meant to diverge")


def test_flow_whose_loss_only_trebles_before_it_overflows(guard: Guard) -> None:
    run = guard(flow)
    assert errors_of(run) == ["divergence"]
    assert verified(run)["lower-learning-rate"] is True
    assert run.first.evidence["began_at_step"] in (24, 25)


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x**3


def test_lbfgs_that_diverges_within_one_step(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(1, 32), Cube(), nn.Linear(32, 32), Cube(), nn.Linear(32, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=5, history_size=5)
        x = torch.linspace(-1, 1, 64).unsqueeze(1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - torch.sin(3 * x)).square().mean()
            loss.backward()
            return loss

        for step in range(30):
            if step == 15:
                optimizer.param_groups[0]["lr"] = 1e4
            if not optimizer.step(closure).isfinite():
                return

    run = guard(body)
    assert errors_of(run) == ["divergence"]


class Ode(nn.Module):
    """Thirty Euler steps of a neural ODE."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.f, self.g, self.out = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        for _ in range(30):
            h = h + 0.1 * self.g(torch.relu(self.f(h)))
        return self.out(h)


@pytest.mark.slow
def test_fixes_are_tried_across_steps_that_the_scaler_has_skipped(guard: Guard) -> None:
    skipped: list[int] = []

    def body() -> None:
        seed_everything()
        model = Ode()
        target = torch.randn(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(60):
            if step == 20:
                optimizer.param_groups[0]["lr"] = 2.0
            x = torch.randn(64, 4)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(x) - x @ target).float().square().mean()
            optimizer.zero_grad()
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if not loss.isfinite():
                return
            if scaler.get_scale() < scale:
                skipped.append(step)
        raise AssertionError("this loop was meant to diverge")

    run = guard(body)
    assert skipped, "the scaler was meant to skip steps on the way"
    assert errors_of(run)[0] == "divergence"
    assert verified(run)["lower-learning-rate"] is True


# --- two optimizers -----------------------------------------------------------------------------------------------------


def gan(rate: float, rate_of_generator: float, penalty: float, steps: int) -> None:
    """A discriminator with two steps an iteration, the second on a gradient penalty; then the generator."""
    seed_everything()
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=rate_of_generator)
    of_critic = torch.optim.Adam(critic.parameters(), lr=rate)
    for _ in range(steps):
        real = torch.randn(64, 2) * 2 + 3
        fake = generator(torch.randn(64, 16))
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        real.requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
        r1 = penalty * slope.square().sum(1).mean()
        of_critic.zero_grad()
        r1.backward()
        of_critic.step()
        loss = F.softplus(-critic(generator(torch.randn(64, 16)))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        if not r1.isfinite():
            return


def test_divergence_in_the_very_first_iteration(guard: Guard) -> None:
    run = guard(lambda: gan(rate=1e9, rate_of_generator=1e-3, penalty=10.0, steps=2))
    assert run.first.cause == "divergence"
    assert run.first.step == 0
    assert "of the same iteration" in run.first.explanation


def test_divergence_of_one_of_two_optimizers(guard: Guard) -> None:
    def body() -> None:
        gan(rate=1e-3, rate_of_generator=1e-4, penalty=10.0, steps=12)
        gan(rate=3e7, rate_of_generator=1e-4, penalty=10.0, steps=12)

    run = guard(body)
    assert errors_of(run)[0] == "divergence"


def test_adversarial_training_under_float16_is_one_story(guard: Guard) -> None:
    """Two optimizers at a rate a thousand times too high: the critic is thrown away before the generator's first loss."""

    def body() -> None:
        seed_everything()
        generator = nn.Sequential(
            nn.Conv1d(8, 16, 7, padding=3), nn.LeakyReLU(0.1), nn.Conv1d(16, 1, 7, padding=3), nn.Tanh()
        )
        critic = nn.Sequential(
            nn.Conv1d(1, 16, 15, 2, 7), nn.LeakyReLU(0.1), nn.Conv1d(16, 32, 15, 2, 7), nn.LeakyReLU(0.1)
        )
        critic.append(nn.Conv1d(32, 1, 3, 1, 1))
        of_generator = torch.optim.AdamW(generator.parameters(), 1.0)
        of_critic = torch.optim.AdamW(critic.parameters(), 1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(8):
            mel = torch.randn(4, 8, 128)
            wave = torch.tanh(mel.mean(1, keepdim=True))
            with torch.autocast("cpu", dtype=torch.float16):
                made = generator(mel)
                real, fake = critic(wave), critic(made.detach())
            loss = (1 - real.float()).square().mean() + fake.float().square().mean()
            of_critic.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(of_critic)
            with torch.autocast("cpu", dtype=torch.float16):
                fake = critic(made)
            loss = (1 - fake.float()).square().mean() + 45 * F.l1_loss(made.float(), wave)
            of_generator.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(of_generator)
            scaler.update()

    run = guard(body)
    assert errors_of(run) == ["divergence"]
    assert run.first.evidence["began_at_step"] == 0


# --- what looks like it ---------------------------------------------------------------------------------------------------


def growing_returns(bad_at: int | None) -> None:
    """A value function whose targets grow by 6 % a step, and its weights with them."""
    seed_everything()
    value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(value.parameters(), lr=3e-2)
    for step in range(120):
        states = torch.randn(128, 4)
        returns = (1.06**step) * (1 + states[:, :1] ** 2)
        if step == bad_at:
            returns[7] = 1e25
        loss = F.mse_loss(value(states), returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            return


@pytest.mark.parametrize(("bad_at", "told"), [(None, []), (112, ["overflow"])])
def test_loss_that_grows_by_design_and_one_bad_batch(guard: Guard, bad_at: int | None, told: list[str]) -> None:
    assert errors_of(guard(lambda: growing_returns(bad_at))) == told


def test_weights_that_one_bad_batch_has_thrown_away_are_its_consequence(guard: Guard) -> None:
    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
        target = torch.randn(16, 1)
        for step in range(60):
            x = torch.randn(64, 16)
            if step == 40:
                x[0] = 1e21
            loss = F.mse_loss(model(x), (x.clamp(-9, 9) @ target).sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert errors_of(run) == ["overflow"]
    assert run.first.step == 40
    assert run.first.occurrences > 1


def test_counts_of_every_kind(guard: Guard) -> None:
    """A loss that is a sum over 1 to 4,096 tokens goes up and down by three orders of magnitude."""

    def body() -> Any:
        seed_everything()
        model = nn.Sequential(nn.Embedding(30, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 30))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(40):
            tokens = torch.randint(0, 30, (int(torch.randint(1, 9, ()).item()) ** 4,))
            logits = model(tokens)
            if step == 36:
                logits = logits * 3e38 * 1e3
            loss = F.cross_entropy(logits, (tokens + 1) % 30, reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not loss.isfinite():
                return

    assert errors_of(guard(body)) == ["overflow"]


@pytest.mark.filterwarnings("ignore")
def test_clipping_in_the_loop_of_lightning(guard: Guard) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Regression(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch: Any, _: int) -> Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=2.0)

    def body() -> None:
        seed_everything()
        batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(40)]
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
        trainer.fit(Regression(), torch.utils.data.DataLoader(batches, batch_size=None))

    run = guard(body)
    assert errors_of(run) == ["divergence"]
    (clip,) = (fix for fix in run.first.fixes if fix.action == "clip-gradients")
    assert clip.how.startswith("let Lightning clip: Trainer(gradient_clip_val=")


def test_its_end_may_be_the_norm_that_gradients_are_clipped_by(guard: Guard) -> None:
    """Their squares leave float32 before any value of the forward pass does."""

    def body() -> None:
        torch.manual_seed(0)
        hidden = [layer for _ in range(10) for layer in (nn.Linear(32, 32), nn.ReLU())]
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *hidden, nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=60.0)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 60.0 * min(1.0, (step + 1) / 8)
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    run = guard(body)
    assert run.faults == 0
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.evidence["ended_as"]) == ("divergence", 1, "overflow")
    assert "clip_grad_norm_" in incident.location.code
    assert [fix.action for fix in incident.fixes] == ["lower-learning-rate"]  # it clips already
