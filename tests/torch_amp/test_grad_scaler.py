"""What PyTorch promises of GradScaler holds under the guard: a scaled training is an unscaled one, bit for bit unguarded."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from installed import installed
from torch import Tensor, nn

Holds = Callable[[Callable[[], Any]], None]
Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Training:
    """One of two trainings that must come out alike: with the scaler, or without any (the control)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    criterion: nn.Module
    skipped: int
    """The number of the batch whose gradients overflow, where a scaler looks at them."""
    uses_scaler: bool

    def overflows(self, number: int) -> bool:
        return self.scaler.is_enabled() and number == self.skipped

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.uses_scaler else loss).backward()

    def spoil(self, number: int) -> None:
        """Make the gradients of one batch infinite, as an overflow does."""
        if self.uses_scaler and self.overflows(number):
            gradient = self.model[1].weight.grad  # type: ignore[index]
            gradient.data.fill_(math.inf)

    def update(self, number: int) -> None:
        """Step; the control leaves out the step that the scaler skips."""
        if self.uses_scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.overflows(number):
            self.optimizer.step()

    def state(self) -> list[Any]:
        return [list(self.model.parameters()), self.optimizer.state_dict(), self.scaler.state_dict()]


Run = Callable[[Training, Batches], None]


def scaled_as_unscaled(
    run: Run, unskipped: int, skipped: int, atol: float = 1e-7, kind: type = torch.optim.SGD, **options: Any
) -> list[Any]:
    """`run` with a scaler, enabled and not, ends where the control ends; and the scale has moved as it should."""
    states = []
    for enabled in (True, False):
        case = installed("common_cuda", "_create_scaling_case")
        control, scaling, control_optimizer, scaling_optimizer, data, criterion, skip = case(
            device="cpu", optimizer_ctor=kind, optimizer_kwargs=options or None
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_factor=2.0, enabled=enabled, growth_interval=1)
        plain = Training(control, control_optimizer, scaler, criterion, skip, uses_scaler=False)
        scaled = Training(scaling, scaling_optimizer, scaler, criterion, skip, uses_scaler=True)
        run(plain, data)
        run(scaled, data)
        assert scaled.scaler.get_scale() == (128.0 * 2.0**unskipped * 0.5**skipped if enabled else 1.0)
        for c, s in zip(control.parameters(), scaling.parameters(), strict=True):
            torch.testing.assert_close(c, s, atol=atol, rtol=1e-5)
            if not (enabled and skipped):
                torch.testing.assert_close(c.grad, s.grad, atol=max(atol, 1e-5), rtol=1e-5)
        states += [plain.state(), scaled.state()]
    return states


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD, foreach": (torch.optim.SGD, {"foreach": True}),
    "SGD, fused": (torch.optim.SGD, {"fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True, "lr": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True, "lr": 0.1}),
    "Adagrad, fused": (torch.optim.Adagrad, {"fused": True, "lr": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pickles", [False, True], ids=["", "pickled after each step"])
def test_basic(name: str, pickles: bool, holds: Holds) -> None:
    kind, options = OPTIMIZERS[name]

    def run(training: Training, data: Batches) -> None:
        for number, (x, y) in enumerate(data):
            training.optimizer.zero_grad()
            training.backward(training.criterion(training.model(x), y))
            training.spoil(number)
            training.update(number)
            if pickles:
                training.scaler = pickle.loads(pickle.dumps(training.scaler))

    atol = 1e-7 if kind is torch.optim.SGD else 1e-4
    holds(lambda: scaled_as_unscaled(run, 3, 1, atol, kind, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype, holds: Holds) -> None:
    def run(training: Training, data: Batches) -> None:
        for number, (x, y) in enumerate(data):
            training.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=training.uses_scaler):
                loss = training.criterion(training.model(x), y)
            training.backward(loss)
            training.spoil(number)
            training.update(number)

    holds(lambda: scaled_as_unscaled(run, 3, 1, atol=0.1, lr=0.1))


def test_clipping_by_a_scaled_limit(holds: Holds) -> None:
    def run(training: Training, data: Batches) -> None:
        for number, (x, y) in enumerate(data):
            training.optimizer.zero_grad()
            training.backward(training.criterion(training.model(x), y))
            limit = 0.2 * (training.scaler.get_scale() if training.uses_scaler else 1.0)
            nn.utils.clip_grad_norm_(training.model.parameters(), limit)
            training.spoil(number)
            training.update(number)

    holds(lambda: scaled_as_unscaled(run, 3, 1, atol=1e-5))


def test_clipping_what_was_unscaled_before(holds: Holds) -> None:
    def run(training: Training, data: Batches) -> None:
        for number, (x, y) in enumerate(data):
            training.optimizer.zero_grad()
            training.backward(training.criterion(training.model(x), y))
            training.spoil(number)
            if training.uses_scaler:
                training.scaler.unscale_(training.optimizer)
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.2, error_if_nonfinite=False)
            training.update(number)

    holds(lambda: scaled_as_unscaled(run, 3, 1, atol=1e-5))


def test_accumulation(holds: Holds) -> None:
    def run(training: Training, data: Batches) -> None:
        training.optimizer.zero_grad()
        training.skipped = -1
        for number, (x, y) in enumerate(data):
            training.backward(training.criterion(training.model(x), y) / 2)
            if number % 2:
                training.update(number)
                if number < len(data) - 1:
                    training.optimizer.zero_grad()

    holds(lambda: scaled_as_unscaled(run, 2, 0, atol=1e-5))


def test_penalty_on_unscaled_gradients(holds: Holds) -> None:
    """Double backward: scaled gradients are taken, divided by the scale, and become part of the loss."""

    def run(training: Training, data: Batches) -> None:
        for number, (x, y) in enumerate(data):
            training.optimizer.zero_grad()
            loss = training.criterion(training.model(x), y)
            parameters = list(training.model.parameters())
            scale = training.scaler.get_scale() if training.uses_scaler else 1.0
            scaled = training.scaler.scale(loss) if training.uses_scaler else loss
            slopes = torch.autograd.grad(scaled, parameters, create_graph=True)
            norm = torch.stack([(slope / scale).pow(2).sum() for slope in slopes]).sum().sqrt()
            training.backward(loss + norm)
            training.spoil(number)
            training.update(number)

    holds(lambda: scaled_as_unscaled(run, 3, 1, atol=1e-3, lr=0.01))


@pytest.mark.parametrize("enabled", [True, False])
def test_several_models_losses_and_optimizers(enabled: bool, holds: Holds) -> None:
    """Both losses reach both models; one optimizer's gradients overflow, and only its step is skipped."""

    def body() -> list[Any]:
        case = installed("common_cuda", "_create_scaling_case")
        pair = installed("common_cuda", "_create_scaling_models_optimizers")
        control0, scaled0, control_optimizer0, scaled_optimizer0, data, criterion, skip = case(device="cpu")
        control1, scaled1, control_optimizer1, scaled_optimizer1 = pair(device="cpu")
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_factor=2.0, enabled=enabled, growth_interval=1)

        def losses(one: nn.Module, two: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            a, b = one(x), two(x)
            return criterion(0.3 * a + 0.7 * b, y), criterion(0.6 * a - 0.4 * b, y)

        for number, (x, y) in enumerate(data):
            control_optimizer0.zero_grad()
            control_optimizer1.zero_grad()
            first, second = losses(control0, control1, x, y)
            first.backward(retain_graph=True)
            second.backward()
            control_optimizer0.step()
            if not enabled or number != skip:
                control_optimizer1.step()
        for number, (x, y) in enumerate(data):
            scaled_optimizer0.zero_grad()
            scaled_optimizer1.zero_grad()
            first, second = losses(scaled0, scaled1, x, y)
            scaler.scale(first).backward(retain_graph=True)
            scaler.scale(second).backward()
            if enabled and number == skip:
                scaled1[1].weight.grad.data.fill_(math.inf)
            scaler.unscale_(scaled_optimizer0)
            scaler.step(scaled_optimizer0)
            scaler.step(scaled_optimizer1)
            scaler.update()

        assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
        for control, scaled in ((control0, scaled0), (control1, scaled1)):
            for c, s in zip(control.parameters(), scaled.parameters(), strict=True):
                torch.testing.assert_close(c, s, rtol=1e-5, atol=1e-6)
        return [list(m.parameters()) for m in (control0, scaled0, control1, scaled1)]

    holds(body)


@pytest.mark.parametrize("lazy", [True, False])
def test_state_dict(lazy: bool, holds: Holds) -> None:
    def body() -> list[Any]:
        one = torch.amp.GradScaler("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
        two = torch.amp.GradScaler("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
        two._init_growth_tracker = 7
        if lazy:
            two.scale(torch.full((1,), 4.0))
        two.load_state_dict(one.state_dict())
        assert (two.get_scale(), two.get_growth_factor()) == (3.0, 4.0)
        assert (two.get_backoff_factor(), two.get_growth_interval()) == (0.5, 2)
        assert two._init_growth_tracker == 0
        return [two.state_dict()]

    holds(body)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize("coalesced", [True, False])
def test_unscale_sparse(bad: float | None, coalesced: bool, holds: Holds) -> None:
    def body() -> list[Any]:
        indices = torch.tensor([[0, 1, 1], [2, 0, 2]]) if coalesced else torch.tensor([[0, 1, 0], [2, 0, 2]])
        values = torch.tensor([16.0, bad if bad is not None else 32.0, 64.0])
        gradient = torch.sparse_coo_tensor(indices, values, torch.Size([2, 3]))
        expected = gradient.to_dense() / 4
        parameter = torch.zeros(2, 3, requires_grad=True)
        parameter.grad = gradient.coalesce() if coalesced else gradient
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if bad is None:
            torch.testing.assert_close(parameter.grad.to_dense(), expected)
            torch.testing.assert_close(parameter.detach(), -expected)
        else:
            assert not parameter.count_nonzero()
        assert scaler.get_scale() == (4.0 if bad is None else 2.0)
        return [parameter, parameter.grad.to_dense()]

    holds(body)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_of_a_module(holds: Holds) -> None:
    def body() -> list[Any]:
        model = nn.EmbeddingBag(8, 4, mode="sum", sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(torch.randint(0, 8, (5, 3)))
            scaler.scale(out.pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [list(model.parameters()), scaler.state_dict()]

    holds(body)


def small_training() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)


def test_closure_is_refused(holds: Holds) -> None:
    def body() -> list[Any]:
        model, optimizer, scaler = small_training()
        scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, closure=lambda: torch.zeros(()))
        return [list(model.parameters())]

    holds(body)


def unscaled_twice(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscaled_after_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def stepped_twice(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.step(optimizer)


def never_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    model(torch.ones(3, 4)).sum().backward()
    scaler.step(optimizer)


def without_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(torch.ones(3, 4)).sum())
    scaler.step(optimizer)


def in_float16(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    model.half()
    scaler.scale(model(torch.ones(3, 4).half()).float().sum()).backward()
    scaler.unscale_(optimizer)


MISUSES: dict[str, tuple[Callable[..., None], type[Exception], str]] = {
    "unscaled twice": (unscaled_twice, RuntimeError, "already been called on this optimizer"),
    "unscaled after step": (unscaled_after_step, RuntimeError, "being called after step"),
    "stepped twice": (stepped_twice, RuntimeError, "already been called since the last update"),
    "never scaled": (never_scaled, AssertionError, "_scale is None"),
    "without gradients": (without_gradients, AssertionError, "No inf checks"),
    "in float16": (in_float16, ValueError, "unscale FP16 gradients"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_in_the_same_words(name: str, holds: Holds) -> None:
    misuse, kind, words = MISUSES[name]

    def body() -> list[Any]:
        model, optimizer, scaler = small_training()
        with pytest.raises(kind, match=words) as raised:
            misuse(model, optimizer, scaler)
        return [str(raised.value), list(model.parameters())]

    holds(body)


class TakesTheScaler(torch.optim.Optimizer):
    """An optimizer that unscales by itself and is given the scaler."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.1})
        self.given: list[Any] = []

    def step(self, closure: Any = None, *, grad_scaler: torch.amp.GradScaler | None = None) -> None:  # type: ignore[override]
        assert isinstance(grad_scaler, torch.amp.GradScaler)
        self.given.append(grad_scaler.get_scale())
        grad_scaler._check_inf_per_device(self)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_optimizer_that_is_given_the_scaler(holds: Holds) -> None:
    def body() -> list[Any]:
        model = nn.Linear(4, 2)
        optimizer, scaler = TakesTheScaler(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            scaler.scale(model(torch.ones(3, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.given == [8.0, 8.0]
        return [optimizer.given]

    holds(body)


@pytest.mark.parametrize("name", ["SGD", "SGD, foreach", "AdamW, foreach"])
def test_gradients_made_bad_between_unscale_and_step(name: str, holds: Holds) -> None:
    """The scaler has looked already: the step is not skipped, and the parameters are poisoned."""
    kind, options = OPTIMIZERS[name]

    def body() -> list[Any]:
        model, _, _, _, data, criterion, _ = installed("common_cuda", "_create_scaling_case")(device="cpu")
        optimizer = kind(model.parameters(), **{"lr": 0.1, **options})  # type: ignore[call-arg]
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        for x, y in data:
            optimizer.zero_grad()
            scaler.scale(criterion(model(x), y)).backward()
            scaler.unscale_(optimizer)
            for number, parameter in enumerate(model.parameters()):
                parameter.grad.fill_(math.inf if number % 2 else math.nan)
            scaler.step(optimizer)
            scaler.update()
        assert not any(p.isfinite().all() for p in model.parameters())
        return [list(model.parameters()), scaler.state_dict()]

    holds(body)


def test_lists_and_dicts_of_losses_are_scaled(holds: Holds) -> None:
    def body() -> list[Any]:
        model, optimizer, scaler = small_training()
        out = model(torch.ones(3, 4))
        scaled = scaler.scale([out.sum(), (out.mean(), out.pow(2).mean())])
        torch.autograd.backward([scaled[0], *scaled[1]])
        scaler.step(optimizer)
        scaler.update(new_scale=4.0)
        assert scaler.get_scale() == 4.0
        return [list(model.parameters())]

    holds(body)
