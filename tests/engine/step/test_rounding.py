"""Updates that bfloat16 alone would lose arrive: on average by chance, exactly by compensation."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn, optim

from ampguard.engine.step import RoundedUpdate, check_gradients, compensated_round_, stochastic_round_
from ampguard.engine.step.rounding import BLOCK, joined
from ampguard.errors import UsageError

Rounding = Literal["stochastic", "kahan"]
bf16 = torch.bfloat16


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rounded(value: Tensor, seed: int = 0) -> Tensor:
    target = torch.empty(value.shape, dtype=bf16)
    stochastic_round_(target, value, generator(seed))
    return target


@pytest.mark.parametrize("value", [1.001, -1.001, 3.14159, 1e-20, -7e30, 1e-40, 0.0041])
def test_the_mean_is_exact_and_only_neighbours_occur(value: float) -> None:
    count = 200_000
    results = rounded(torch.full((count,), value)).double()
    exact = torch.tensor(value, dtype=torch.float32).double().item()
    low, high = results.min().item(), results.max().item()
    assert low <= exact <= high
    assert set(results.unique().tolist()) == {low, high}
    assert torch.nextafter(torch.tensor(low, dtype=bf16), torch.tensor(math.inf, dtype=bf16)).item() == high
    spread = (high - exact) * (exact - low)  # the variance of a coin with these two sides
    assert abs(results.mean().item() - exact) < 5 * math.sqrt(spread / count)


def test_neighbouring_elements_are_independent() -> None:
    """Two elements share a random number of 32 bits; they must not share their luck."""
    up = (rounded(torch.full((100_000,), 1.0 + 2.0**-8)).float() > 1.0).double()
    assert up.mean() == pytest.approx(0.5, abs=0.01)
    for distance in (1, 2, 3):
        assert (up[distance:] * up[:-distance]).mean() == pytest.approx(0.25, abs=0.01)


def test_what_bfloat16_holds_stays() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-133, 3.3895e38, math.inf, -math.inf]).to(bf16)
    for seed in range(20):
        assert torch.equal(rounded(held.float(), seed), held)
    payloads = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert all(rounded(payloads, seed).isnan().all() for seed in range(20))


def test_any_shape_and_layout() -> None:
    value = torch.randn(7, BLOCK // 5, generator=generator())
    for view in (value, value.t(), value[:, ::3], value[0, 0], value[:0]):
        target = torch.empty_like(view, dtype=bf16)
        stochastic_round_(target, view, generator())
        assert ((target.float() - view).abs() <= view.abs() * 2.0**-7).all()


def test_only_float32_into_bfloat16() -> None:
    with pytest.raises(UsageError, match=r"float16.*master weights"):
        stochastic_round_(torch.zeros(2, dtype=torch.float16), torch.zeros(2))
    with pytest.raises(UsageError, match="float64"):
        stochastic_round_(torch.zeros(2, dtype=bf16), torch.zeros(2, dtype=torch.float64))


def test_the_rest_holds_what_rounding_left_over() -> None:
    value = torch.randn(10_000, generator=generator())
    target, rest = torch.empty(10_000, dtype=bf16), torch.empty(10_000, dtype=bf16)
    compensated_round_(target, rest, value)
    assert torch.equal(target, value.to(bf16))
    torch.testing.assert_close(joined(target, rest), value, rtol=2.0**-16, atol=0.0)
    compensated_round_(target[:2], rest[:2], torch.tensor([math.inf, math.nan]))
    assert rest[:2].tolist() == [0.0, 0.0]


def train(rounding: Rounding | None, kind: type[optim.Optimizer], dtype: torch.dtype, **options: Any) -> Tensor:
    """Weights of 1.0 after 300 steps whose updates are a tenth of bfloat16's spacing there."""
    p = nn.Parameter(torch.ones(4096, dtype=dtype))
    optimizer = kind([p], **options)
    update = RoundedUpdate(optimizer, rounding) if rounding else None
    for number in range(300):
        p.grad = torch.full_like(p, 0.5 + 0.5 * (number % 2))
        if update is None:
            optimizer.step()
        else:
            update.apply(check_gradients([p]))
    return p.detach().double()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"lr": 5e-4}),
        (optim.SGD, {"lr": 5e-5, "momentum": 0.9}),
        (optim.SGD, {"lr": 1e-3, "weight_decay": 1e-1}),
        (optim.AdamW, {"lr": 5e-4}),
        (optim.AdamW, {"lr": 1e-5, "weight_decay": 30.0}),
        (optim.RMSprop, {"lr": 5e-4}),
        (optim.Adagrad, {"lr": 1e-3}),
    ],
)
def test_small_updates_and_decay_arrive(
    rounding: Rounding, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    truth = train(None, kind, torch.float32, **options).mean().item()
    ours = train(rounding, kind, bf16, **options)
    way = 1.0 - truth
    assert way > 0.01
    assert ours.mean().item() == pytest.approx(truth, abs=0.03 * way + 2e-3)


def test_plain_bfloat16_would_stand_still() -> None:
    """What the two tests above save."""
    assert torch.equal(train(None, optim.SGD, bf16, lr=5e-4, fused=False), torch.ones(4096, dtype=torch.float64))


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_skipped_step_changes_nothing(rounding: Rounding) -> None:
    p = nn.Parameter(torch.randn(100, generator=generator()).to(bf16))
    optimizer = optim.AdamW([p], lr=0.1)
    update = RoundedUpdate(optimizer, rounding)
    p.grad = torch.ones_like(p)
    update.apply(check_gradients([p]))
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    p.grad[3] = math.inf
    update.apply(check_gradients([p]))
    assert torch.equal(p, before)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, state["state"][0][key])
    assert optimizer.param_groups[0]["params"] == [p]
    with update.in_float32():  # as on an accelerator, where the optimizer alone knows that it skips
        pass
    assert torch.equal(p, before)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_saved_run_goes_on_bitwise(rounding: Rounding) -> None:
    def gradients(number: int) -> Tensor:
        return torch.randn(500, generator=generator(number)).to(bf16)

    def steps(p: nn.Parameter, update: RoundedUpdate, numbers: range) -> None:
        for number in numbers:
            p.grad = gradients(number)
            update.apply(check_gradients([p]), 1.0)

    def fresh() -> tuple[nn.Parameter, RoundedUpdate]:
        p = nn.Parameter(torch.ones(500, dtype=bf16))
        return p, RoundedUpdate(optim.AdamW([p], lr=1e-3), rounding, seed=7)

    whole, update = fresh()
    steps(whole, update, range(8))
    first, update = fresh()
    steps(first, update, range(5))
    saved = copy.deepcopy((first.detach(), update.optimizer.state_dict(), update.state_dict()))
    second, update = fresh()
    with torch.no_grad():
        second.copy_(saved[0])
    update.optimizer.load_state_dict(saved[1])
    update.load_state_dict(saved[2])
    assert update.optimizer.state[second]["exp_avg"].dtype is torch.float32
    steps(second, update, range(5, 8))
    assert torch.equal(whole, second)
    with pytest.raises(UsageError, match="rounding="):
        update.load_state_dict({"rounding": "other", "generators": {}})


def test_the_scripts_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    train("stochastic", optim.SGD, bf16, lr=0.1)
    assert torch.equal(before, torch.get_rng_state())


def test_mixed_and_unused_parameters_and_written_back_gradients() -> None:
    low, full, unused = (nn.Parameter(torch.ones(64, dtype=t)) for t in (bf16, torch.float32, bf16))
    optimizer = optim.AdamW([{"params": [low, unused]}, {"params": [full]}], lr=0.01)
    update = RoundedUpdate(optimizer, "kahan")
    for _ in range(3):
        low.grad, full.grad = torch.full_like(low, 8.0), torch.full_like(full, 8.0)
        update.apply(check_gradients([low, full, unused], torch.tensor(8.0)), write_back=True)
    assert low.grad.tolist() == full.grad.tolist() == [1.0] * 64
    torch.testing.assert_close(low.float(), full, rtol=2.0**-8, atol=0.0)
    assert unused not in optimizer.state
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [[id(low), id(unused)], [id(full)]]


def test_an_unknown_rounding() -> None:
    with pytest.raises(UsageError, match="'upwards'"):
        RoundedUpdate(optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "upwards")  # type: ignore[arg-type]
