"""Memory that no operator writes to: NumPy fills it here, as a Triton kernel or a C++ extension does on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]
Kernel = Callable[[np.ndarray], np.ndarray]
BAD = 3


def applied(kernel: Kernel, x: Tensor, y: Tensor) -> None:
    """Write `kernel` of `x` to `y`, computed in float32, as kernels do."""
    with np.errstate(all="ignore"):
        y.numpy()[...] = kernel(x.detach().numpy().astype(np.float32)).astype(y.numpy().dtype)


class Unseen(torch.autograd.Function):
    """`kernel` into memory that `memory` asks for; its derivative is taken to be 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Kernel, memory: Callable[[Tensor], Tensor]) -> Tensor:
        y = memory(x)
        applied(kernel, x, y)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None, None


class Act(nn.Module):
    def __init__(self, kernel: Kernel, memory: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kernel, self.memory = kernel, memory

    def forward(self, x: Tensor) -> Tensor:
        return Unseen.apply(x, self.kernel, self.memory)  # type: ignore[no-any-return]


def train(
    kernel: Kernel, memory: Callable[[Tensor], Tensor], amp: bool = True, size: float = 1.0
) -> Callable[[], None]:
    """Two such activations behind one another; a sample of step `BAD` is `size` times as large as the others."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), Act(kernel, memory), nn.Linear(8, 8), Act(kernel, memory), nn.Linear(8, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp)
        for step in range(BAD + 2):
            x = torch.randn(16, 4)
            x[5] *= size if step == BAD else 1.0
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                loss = nn.functional.smooth_l1_loss(model(x), x[:, :1])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return body


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "empty_like": torch.empty_like,
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "flat": lambda x: torch.empty(x.numel(), dtype=x.dtype).view(x.shape),
    "zeros_like": torch.zeros_like,
    "clone": torch.clone,
}


@pytest.mark.parametrize("how", MEMORY)
def test_a_result_that_does_not_fit_float16(how: str, guard: Guard) -> None:
    run = guard(train(lambda x: np.maximum(x, 0) ** 2, MEMORY[how], size=2000.0))
    first = run.first
    assert (run.faults, run.causes) == (0, ["fp16-overflow"]), run.stderr
    assert (first.step, first.phase, first.module, first.op, first.dtype) == (BAD, "forward", "1", None, "float16")
    assert first.evidence["max_abs_fp32"] > 65504
    assert {fix.action: fix.verified for fix in first.fixes}["force-fp32"]


def test_one_that_float32_does_not_hold(guard: Guard) -> None:
    """A kernel that computes in the type of its memory."""

    def squared(x: Tensor, y: Tensor) -> None:
        with np.errstate(all="ignore"):
            y.numpy()[...] = x.detach().numpy() ** 16

    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            squared(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            return grad

    class Powers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Wide.apply(x)  # type: ignore[no-any-return]

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Powers(), nn.LayerNorm(8))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(BAD + 1):
            x = torch.randn(16, 4) * (1e4 if step == BAD else 0.1)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, ["overflow"]), run.stderr
    assert (run.first.step, run.first.module, run.first.op) == (BAD, "1", None)


def test_a_kernel_that_fails_in_any_precision(guard: Guard) -> None:
    """What it does is not seen: where it begins is said, and no more."""
    run = guard(train(lambda x: x / np.where(np.abs(x) > 40, 0, 1), torch.empty_like, amp=False, size=400.0))
    first = run.first
    assert (run.faults, run.causes) == (0, ["unexplained"]), run.stderr
    assert (first.step, first.module, first.op, first.evidence["is_unseen"]) == (BAD, "1", None, True)
    assert first.location is not None
    assert "torch.empty_like" in first.location.code or "memory(x)" in first.location.code


def test_a_kernel_that_only_hands_on_what_it_was_given(guard: Guard) -> None:
    """The chain goes on behind it, to the input that is not finite."""
    run = guard(train(lambda x: x * 0.5, torch.empty_like, size=float("inf")))
    assert run.causes == ["nonfinite-input"], run.stderr
    assert run.first.step == BAD


def test_memory_that_nobody_writes_to(guard: Guard) -> None:
    """New memory holds NaN, as it may."""

    class Forgets(nn.Module):
        forgetful = False

        def forward(self, x: Tensor) -> Tensor:
            room = torch.empty_like(x)
            if not self.forgetful:
                room.copy_(x)
            return x + room

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Forgets(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(BAD + 1):
            model[1].forgetful = step == BAD
            optimizer.zero_grad()
            model(torch.randn(16, 4)).mean().backward()
            optimizer.step()

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        run = guard(body)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (run.faults, run.causes) == (0, ["unexplained"]), run.stderr
    assert (run.first.module, run.first.evidence["is_unwritten"]) == ("1", True)
    assert [(fix.action, fix.verified) for fix in run.first.fixes] == [("initialise-parameter", True)]


def test_a_mask_that_is_filled_unseen_is_meant(guard: Guard) -> None:
    """-Inf in float32 as well: what has no key left is a softmax of nothing."""

    class Attends(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = torch.empty(len(x), 6, dtype=x.dtype)
            mask.numpy()[...] = np.where(np.arange(6) < lengths.numpy()[:, None], 0, -np.inf)
            return (x + mask).softmax(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.attend = nn.Linear(4, 6), Attends()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.attend(self.fc(x), lengths)  # type: ignore[no-any-return]

    def body() -> None:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(BAD + 1):
            lengths = torch.randint(1, 7, (16,))
            if step == BAD:
                lengths[3] = 0
            optimizer.zero_grad()
            model(torch.randn(16, 4), lengths).square().mean().backward()
            optimizer.step()

    run = guard(body)
    assert run.causes == ["masked-softmax"], run.stderr


class Squared(torch.autograd.Function):
    """A kernel in both directions. Its derivative reaches further than itself where `boost` is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boost: float) -> Tensor:
        y = torch.empty_like(x)
        applied(lambda values: np.maximum(values, 0) ** 2, x, y)
        ctx.save_for_backward(x)
        ctx.boost = boost
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)  # <- the derivative's memory
        factor = grad.numpy().astype(np.float32) * ctx.boost
        applied(lambda values: 2 * np.maximum(values, 0) * factor, x, dx)
        return dx, None


class Square(nn.Module):
    boost = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x, self.boost)  # type: ignore[no-any-return]


def differentiate(ends: str) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Square(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(BAD + 2):
            x = torch.randn(16, 4)
            model[1].boost = 1e8 if step == BAD and ends == "kernel" else 1.0
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x).float()
                if step == BAD and ends == "loss":
                    out = torch.cat([out[:5] * 0.0, out[5:]])
                loss = out.square().sum(1).sqrt().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return body


def test_a_derivative_that_does_not_fit_float16(guard: Guard) -> None:
    run = guard(differentiate("kernel"))
    first = run.first
    assert (run.faults, run.causes) == (0, ["gradient-overflow"]), run.stderr
    assert (first.step, first.module, first.op, first.dtype) == (BAD, "1", None, "float16")
    assert first.location is not None
    assert "the derivative's memory" in first.location.code or "dx = torch.empty_like(x)" in first.location.code
    assert first.evidence["max_abs_fp32"] > 65504


def test_a_derivative_that_is_given_bad(guard: Guard) -> None:
    """It hands on what the loss's own derivative is."""
    run = guard(differentiate("loss"))
    assert (run.faults, run.causes) == (0, ["singular-gradient"]), run.stderr
    assert (run.first.step, run.first.module) == (BAD, None)
