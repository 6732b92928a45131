"""The gradients of a recorded step are replayed bit for bit: whatever the way in which the script differentiates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backward_bits import (
    LAST,
    STEPS,
    Compared,
    Shifted,
    at_bad_gradients,
    compared,
    mlp,
    replays_bitwise,
    spoil,
    training,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import seed_everything

from ampguard.capture.record import BadResult
from ampguard.capture.recorder import FlightRecorder
from ampguard.errors import ChangedSinceError
from ampguard.replay.rebuild import Replayer


def cross_entropy(model: nn.Module, step: int) -> Tensor:
    return F.cross_entropy(spoil(model(torch.randn(6, 4)), step), torch.randint(0, 5, (6,)))


# --- how backward is called ------------------------------------------------------------------------------------------


def test_backward_from_gradients(tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 5)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            out = spoil(model(torch.randn(6, 4)), step)
            out.backward(torch.linspace(-1, 1, 30).reshape(6, 5))
            optimizer.step()

    replays_bitwise(body, tmp_path)


def test_several_losses_differentiated_at_once(tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 5)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            out = model(torch.randn(6, 4))
            losses = [out.pow(2).mean(), spoil(out, step).abs().sum(-1)]
            torch.autograd.backward(losses, [torch.tensor(0.5), torch.ones(6)])
            optimizer.step()

    replays_bitwise(body, tmp_path)


def test_one_graph_differentiated_twice(tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 5)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            out = model(torch.randn(6, 4))
            out.abs().mean().backward(retain_graph=True)
            spoil(out, step).pow(2).mean().backward()
            optimizer.step()

    replays_bitwise(body, tmp_path)


def test_gradients_handed_on_across_a_cut(tmp_path: Path) -> None:
    """Gradient caching: the graph is cut behind the encoder and differentiated in two parts."""
    seed_everything()
    encoder, head = mlp(4, 8, 6), mlp(6, 5)

    def body() -> None:
        optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            features = encoder(torch.randn(6, 4))
            cut = features.detach().requires_grad_()
            F.cross_entropy(head(spoil(cut, step)), torch.arange(6) % 5).backward()
            features.backward(cut.grad)
            optimizer.step()

    replays_bitwise(body, tmp_path)


def test_gradients_discarded_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Sharpness-aware training, gradient surgery: the gradients of the first pass are read and cleared."""
    seed_everything()
    model = Shifted(mlp(4, 8, 5))

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            cross_entropy(model.net, -1).backward()
            optimizer.zero_grad()
            (cross_entropy(model.net, -1) + model.spoilt(step)).backward()
            optimizer.step()

    replays_bitwise(body, tmp_path)


@pytest.mark.parametrize("bad_micro_step", [0, 1, 2])
def test_accumulation(bad_micro_step: int, tmp_path: Path) -> None:
    seed_everything()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 5))

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro_step in range(3):
                (cross_entropy(model, step if micro_step == bad_micro_step else -1) / 3).backward()
            optimizer.step()

    replays_bitwise(body, tmp_path)


def test_accumulation_over_a_loader(tmp_path: Path) -> None:
    """The window ends by the number of the batch; gradients are cleared after the step."""
    seed_everything()
    model = mlp(4, 8, 5)
    data = torch.utils.data.TensorDataset(torch.randn(36, 4), torch.randint(0, 5, (36,)))

    def body() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=6)):
            loss = F.cross_entropy(spoil(model(x), LAST if number == 4 else 0), y)
            (loss / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    replays_bitwise(body, tmp_path)


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("unscales", [False, True])
def test_scaler(micro_steps: int, unscales: bool, tmp_path: Path) -> None:
    seed_everything()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 5))

    def body() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        for step in range(STEPS):
            optimizer.zero_grad()
            for _ in range(micro_steps):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = cross_entropy(model, step)
                scaler.scale(loss / micro_steps).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    replays_bitwise(body, tmp_path)


def test_overflow_by_the_loss_scale(tmp_path: Path) -> None:
    """Bad without any help: the scale is too high for float16."""
    seed_everything()
    model = mlp(4, 64, 5)

    def body() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(torch.randn(6, 4) * 3), torch.randn(6, 5))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    replays_bitwise(body, tmp_path)


def test_backward_into_some_of_the_parameters(tmp_path: Path) -> None:
    seed_everything()
    one, two = mlp(4, 8, 5), mlp(4, 8, 5)

    def body() -> None:
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            a, b = one(torch.randn(6, 4)), two(torch.randn(6, 4))
            first, second = (a * b).pow(2).mean(), (spoil(b, step) - a).abs().mean()
            first.backward(retain_graph=True, inputs=list(one.parameters()))
            second.backward(inputs=list(two.parameters()))
            optimizer.step()

    replays_bitwise(body, tmp_path)


# --- derivatives of derivatives --------------------------------------------------------------------------------------


def penalty(critic: nn.Module, step: int) -> Tensor:
    real, fake = torch.randn(6, 4), torch.randn(6, 4)
    share = torch.rand(6, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    norm = spoil(slope, step).pow(2).sum(-1).add(1e-6).sqrt()
    return critic(fake).mean() - critic(real).mean() + 10 * (norm - 1).pow(2).mean()


def test_gradient_penalty_with_finite_gradients(tmp_path: Path) -> None:
    seed_everything()
    critic = Shifted(mlp(4, 8, 8, 1))
    replays_bitwise(training(critic, lambda _, step: penalty(critic.net, -1) + critic.spoilt(step)), tmp_path)


def test_gradient_penalty(tmp_path: Path) -> None:
    seed_everything()
    replays_bitwise(training(mlp(4, 8, 8, 1), penalty), tmp_path, some_finite=False)


def test_gradient_penalty_under_autocast(tmp_path: Path) -> None:
    seed_everything()

    def in_low_precision(critic: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return penalty(critic, step)

    replays_bitwise(training(mlp(4, 8, 8, 1), in_low_precision), tmp_path, some_finite=False)


def test_penalty_on_the_gradients_of_the_parameters(tmp_path: Path) -> None:
    seed_everything()
    model = Shifted(mlp(4, 8, 5))

    def loss_of(_: nn.Module, step: int) -> Tensor:
        loss = F.cross_entropy(model.net(torch.randn(6, 4)), torch.arange(6) % 5)
        gradients = torch.autograd.grad(loss, list(model.net.parameters()), create_graph=True)
        return loss + 0.1 * sum(g.pow(2).sum() for g in gradients) + model.spoilt(step)

    replays_bitwise(training(model, loss_of), tmp_path)


def test_inner_loop_of_meta_learning(tmp_path: Path) -> None:
    seed_everything()
    model = Shifted(mlp(4, 8, 5))

    def loss_of(_: nn.Module, step: int) -> Tensor:
        state = dict(model.net.named_parameters())
        for _ in range(2):
            out = torch.func.functional_call(model.net, state, (torch.randn(6, 4),))
            gradients = torch.autograd.grad(out.pow(2).mean(), list(state.values()), create_graph=True)
            state = {name: p - 0.1 * g for (name, p), g in zip(state.items(), gradients, strict=True)}
        return torch.func.functional_call(model.net, state, (torch.randn(6, 4),)).pow(2).mean() + model.spoilt(step)

    replays_bitwise(training(model, loss_of), tmp_path)


def test_adversarial_example(tmp_path: Path) -> None:
    """The gradient with respect to the input is taken first, as a number, and used for a second pass."""
    seed_everything()
    model = mlp(4, 8, 5)

    def loss_of(_: nn.Module, step: int) -> Tensor:
        x, y = torch.randn(6, 4), torch.arange(6) % 5
        change = torch.zeros_like(x).requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x + change), y), change)
        return F.cross_entropy(spoil(model(x + 0.1 * slope.sign()), step), y)

    replays_bitwise(training(model, loss_of), tmp_path)


# --- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_closure(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 5)

    def body() -> None:
        optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)

    replays_bitwise(body, tmp_path)


def test_closure_called_several_times(tmp_path: Path) -> None:
    """LBFGS: the parameters change between two calls of the closure."""
    seed_everything()
    model = mlp(4, 5)
    x, y = torch.randn(6, 4), torch.arange(6) % 5
    calls = 0

    def body() -> None:
        nonlocal calls
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Tensor:
            nonlocal calls
            optimizer.zero_grad()
            loss = F.cross_entropy(spoil(model(x), LAST if calls == 4 else 0), y)
            calls += 1
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    replays_bitwise(body, tmp_path)


def three_optimizers(order: tuple[int, ...]) -> Callable[[], None]:
    """One backward pass; the gradients of the first two parts are bad, those of the third are finite."""
    parts = [mlp(4, 6), mlp(6, 6), mlp(6, 5)]

    def body() -> None:
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = spoil(parts[1](parts[0](torch.randn(6, 4))), step)
            F.cross_entropy(parts[2](hidden), torch.arange(6) % 5).backward()
            for number in order:
                optimizers[number].step()

    return body


def test_one_backward_and_three_optimizers(tmp_path: Path) -> None:
    """Each optimizer is asked about its own gradients, the first one before anything has changed."""
    seed_everything()

    def look(recorder: FlightRecorder, bad: BadResult) -> list[bool]:
        try:
            outcome = Replayer(bad, recorder).run()
        except ChangedSinceError:
            return []
        return [outcome.is_exact, outcome.is_bad, *(c.is_same for c in compared(outcome, bad))]

    first, *_ = at_bad_gradients(three_optimizers((0, 1, 2)), tmp_path, look)
    assert first == [True] * 4


def test_one_backward_and_an_optimizer_that_stepped_before(tmp_path: Path) -> None:
    """Its parameters are no longer what they were: the replay runs with the present ones and does not claim more."""
    seed_everything()

    def look(recorder: FlightRecorder, bad: BadResult) -> tuple[bool, bool]:
        with pytest.raises(ChangedSinceError):
            Replayer(bad, recorder)
        outcome = Replayer(bad, recorder, as_it_is_now=True).run()
        return outcome.is_bad, outcome.is_exact

    first, *_ = at_bad_gradients(three_optimizers((2, 1, 0)), tmp_path, look)
    assert first == (True, False)


def test_gan(tmp_path: Path) -> None:
    """Two optimizers, two backward passes; the generator's gradients are bad."""
    seed_everything()
    generator, critic = Shifted(mlp(3, 8, 4)), mlp(4, 8, 1)

    def body() -> None:
        makes, judges = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
        for step in range(STEPS):
            fake = generator.net(torch.randn(6, 3))
            judges.zero_grad()
            loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(torch.randn(6, 4))).mean()
            loss.backward()
            judges.step()
            makes.zero_grad()
            (F.softplus(-critic(fake)).mean() + generator.spoilt(step)).backward()
            makes.step()

    replays_bitwise(body, tmp_path)


def test_gradients_put_into_the_parameters_by_hand(tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 5)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            gradients = torch.autograd.grad(cross_entropy(model, step), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

    def look(recorder: FlightRecorder, bad: BadResult) -> tuple[bool, bool, list[bool]]:
        outcome = Replayer(bad, recorder).run()
        replayed = [tensor for _, tensor in outcome.targets]
        pairs = zip(model.parameters(), replayed, strict=True)
        return outcome.is_bad, outcome.is_exact, [p.grad is not None and Compared(p.grad, g).is_same for p, g in pairs]

    assert at_bad_gradients(body, tmp_path, look) == [(True, True, [True] * 4)]


def test_student_with_an_averaged_teacher(tmp_path: Path) -> None:
    """The teacher is changed in place between the steps; its features enter the loss."""
    seed_everything()
    student = mlp(4, 8, 5)
    teacher = copy.deepcopy(student)

    def body() -> None:
        optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
        for step in range(STEPS):
            x = torch.randn(6, 4)
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            optimizer.zero_grad()
            F.kl_div(spoil(student(x), step).log_softmax(-1), wanted, reduction="batchmean").backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)

    replays_bitwise(body, tmp_path)
