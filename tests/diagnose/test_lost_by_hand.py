"""Updates that the script makes by itself and that are below the spacing of its weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, seed_everything

Guard = Callable[..., Watched]
Update = Callable[[list[Tensor], list[Tensor], list[Tensor], float], None]
STEPS = 60
SMALL = {torch.bfloat16: 1e-4, torch.float16: 1e-5}


@torch.no_grad()
def in_place(weights: list[Tensor], slopes: list[Tensor], momenta: list[Tensor], rate: float) -> None:
    for weight, slope in zip(weights, slopes, strict=True):
        weight -= rate * slope


def by_data(weights: list[Tensor], slopes: list[Tensor], momenta: list[Tensor], rate: float) -> None:
    for weight, slope, momentum in zip(weights, slopes, momenta, strict=True):
        momentum.mul_(0.5).add_(slope)
        weight.data.add_(momentum, alpha=-rate)


@torch.no_grad()
def all_at_once(weights: list[Tensor], slopes: list[Tensor], momenta: list[Tensor], rate: float) -> None:
    torch._foreach_mul_(momenta, 0.5)
    torch._foreach_add_(momenta, slopes)
    torch._foreach_sub_(weights, torch._foreach_mul(momenta, rate))


def new_data(weights: list[Tensor], slopes: list[Tensor], momenta: list[Tensor], rate: float) -> None:
    for weight, slope in zip(weights, slopes, strict=True):
        weight.data = weight.data - rate * slope


def through_float32(weights: list[Tensor], slopes: list[Tensor], momenta: list[Tensor], rate: float) -> None:
    """Computed in float32, and rounded away where it is put back."""
    for weight, slope in zip(weights, slopes, strict=True):
        weight.data.copy_(weight.detach().float() - rate * slope.float())


UPDATES: list[Update] = [in_place, by_data, all_at_once, new_data, through_float32]


def train(update: Update, dtype: torch.dtype, has_modules: bool, rate: float, steps: int = STEPS) -> list[object]:
    seed_everything()
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    weights: list[Tensor] = list(model.parameters())
    if not has_modules:
        weights = [w.detach().clone().requires_grad_() for w in weights]
    momenta = [torch.zeros_like(w) for w in weights]
    inputs, labels = torch.randn(512, 16).to(dtype), torch.randint(4, (512,))
    for _ in range(steps):
        chosen = torch.randint(512, (64,))
        x = inputs[chosen]
        out = model(x) if has_modules else F.linear(torch.tanh(F.linear(x, *weights[:2])), *weights[2:])
        loss = F.cross_entropy(out.float(), labels[chosen])
        if has_modules:
            loss.backward()
            slopes = [w.grad for w in weights if w.grad is not None]
        else:
            slopes = list(torch.autograd.grad(loss, weights))
        update(weights, slopes, momenta, rate)
        for w in weights:
            w.grad = None
    return [bits(t) for t in (*weights, *momenta, torch.get_rng_state())]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("has_modules", [True, False])
@pytest.mark.parametrize("dtype", list(SMALL))
def test_update_that_is_rounded_away(update: Update, has_modules: bool, dtype: torch.dtype, guard: Guard) -> None:
    bare = train(update, dtype, has_modules, SMALL[dtype])
    run = guard(lambda: train(update, dtype, has_modules, SMALL[dtype]))
    assert run.result == bare
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.phase) == ("lost-update", "warning", "optimizer")
    assert incident.location is not None
    assert incident.location.function == update.__name__
    assert incident.evidence["moves_in_float32"] >= 0.9
    assert incident.evidence["update"] < incident.evidence["spacing"]
    assert [fix.action for fix in incident.fixes if fix.verified] == ["fp32-parameters", "master-weights"]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("has_modules", [True, False])
def test_update_that_moves_the_weights(update: Update, has_modules: bool, guard: Guard) -> None:
    assert guard(lambda: train(update, torch.bfloat16, has_modules, 0.3)).causes == []


def test_weights_that_are_copied_from_float32_ones(guard: Guard) -> None:
    """Nothing is lost: what the float32 weights gather shows in the low ones sooner or later."""

    def body() -> None:
        masters = [torch.randn(32, 16) * 0.2, torch.zeros(32) + 0.5]
        weights = [m.bfloat16().requires_grad_() for m in masters]
        for _ in range(STEPS):
            F.linear(torch.randn(8, 16).bfloat16(), *weights).float().square().mean().backward()
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    assert weight.grad is not None
                    master -= 1e-5 * weight.grad.float()
                    weight.copy_(master)
                    weight.grad = None

    assert guard(body).causes == []


def test_a_loop_that_updates_by_hand_does_not_hold_on_to_gradients(guard: Guard) -> None:
    """Each update starts from the last one's weights: the record of a step does not reach back to the first."""
    seen: list[weakref.ref[Tensor]] = []

    def body() -> int:
        model = nn.Linear(8, 4)
        for _ in range(100):
            model(torch.randn(4, 8)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 1e-3 * p.grad
                    seen.append(weakref.ref(p.grad))
                    p.grad = None
        return sum(ref() is not None for ref in seen)

    run = guard(body)
    assert run.result <= 4
    assert len(run.session._recorder.log.record.events) < 64
