"""Rules over many steps decide from numbers: each is shown the numbers of its cause, and those that only look like it."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampguard.capture.sampling.vitals import StepVitals
from ampguard.capture.sampling.weights import WeightSample
from ampguard.diagnose.dynamics import divergence as divergence_rule
from ampguard.diagnose.dynamics import fits, forecast
from ampguard.diagnose.dynamics.alone import update_alone
from ampguard.diagnose.dynamics.divergence import divergence, rise_of
from ampguard.diagnose.dynamics.finding import Situation
from ampguard.diagnose.dynamics.forecast import outlook_of
from ampguard.diagnose.dynamics.lost_update import spacing_of
from ampguard.diagnose.dynamics.optimizer_underflow import poisoned
from ampguard.diagnose.dynamics.scale_collapse import scale_collapse
from ampguard.diagnose.dynamics.trajectory import RECENT_STEPS, THINNED, Peak, Thinned, Trajectory
from ampguard.incident import Incident
from ampguard.replay.activations import Place

LIMIT = 65504.0
PLACE = Place("block", "aten.bmm.default", "model.py", 3, torch.float16)
OVERFLOW = Incident(
    step=0, rank=0, mode="train", phase="forward", severity="error", cause="overflow", module="fc", op="aten.mul.Tensor",
    dtype="float32", location=None, explanation="mul leaves float32's range.",
)  # fmt: skip


def of_losses(losses: Sequence[float]) -> Trajectory:
    trajectory = Trajectory()
    for step, loss in enumerate(losses):
        trajectory.add(StepVitals(step, loss=loss))
    return trajectory


def judged(losses: Sequence[float], weights_grew: float | None = 5.0, cause: str = "overflow") -> Incident | None:
    situation = Situation(of_losses(losses), len(losses))
    incident = Incident(**{f: getattr(OVERFLOW, f) for f in OVERFLOW.__struct_fields__} | {"cause": cause})
    situation.failure = incident
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence_rule, "growth_of_weights", lambda situation, began: weights_grew)
        return divergence(situation)


# --- divergence -------------------------------------------------------------------------------------------------------

NOISY = [2.0 + 0.3 * math.sin(7 * i) for i in range(50)]


def test_exponential_rise_is_divergence_and_its_beginning_is_found() -> None:
    answer = judged(NOISY + [2.5 * 3**i for i in range(1, 12)])

    assert answer is not None
    assert answer.cause == "divergence"
    assert answer.evidence["began_at_step"] in range(47, 53)
    assert answer.evidence["ended_as"] == "overflow"
    assert {fix.action for fix in answer.fixes} == {"lower-learning-rate", "clip-gradients"}
    assert all(fix.verified is None for fix in answer.fixes)
    assert (answer.module, answer.op) == ("fc", "aten.mul.Tensor")


def test_divergence_from_the_first_step_on() -> None:
    answer = judged([10.0**i for i in range(12)])
    assert answer is not None
    assert answer.evidence["began_at_step"] <= 1


def test_slow_noisy_rise_is_divergence() -> None:
    noise = random.Random(3)
    losses = NOISY + [2.0 * 1.1**i * math.exp(noise.gauss(0, 0.4)) for i in range(60)]
    answer = judged(losses)
    assert answer is not None
    assert 40 <= answer.evidence["began_at_step"] <= 70


@pytest.mark.parametrize(
    "losses",
    [
        NOISY,
        [*NOISY, 1e6],
        [*NOISY, 1e9, 2.0, 2.1],
        [5.0 * 0.95**i for i in range(80)],
        [1e-9 * (1 + (i * 37 % 11)) for i in range(60)],
        [3.0, 2.9],
        [],
        [1000.0 * 0.9**i for i in range(40)] + [15.0 * 1.3**i for i in range(8)],
    ],
    ids=["healthy", "bad batch", "spike", "falling", "converged", "two steps", "nothing", "below where it began"],
)
def test_what_is_no_divergence(losses: list[float]) -> None:
    assert rise_of(of_losses(losses)) is None
    assert judged(losses) is None


def test_growing_data_is_no_divergence() -> None:
    """The loss rises and the weights do not: larger and larger batches."""
    rising = NOISY + [2.5 * 3**i for i in range(1, 12)]
    assert judged(rising, weights_grew=1.02) is None
    assert judged(rising, weights_grew=1.5) is not None


@pytest.mark.parametrize("cause", ["nonfinite-input", "mask-overflow", "masked-softmax", "division-by-zero"])
def test_other_causes_keep_their_names(cause: str) -> None:
    assert judged(NOISY + [2.5 * 3**i for i in range(1, 12)], cause=cause) is None


def test_infinite_losses_do_not_enter_the_history() -> None:
    trajectory = of_losses([1.0, math.inf, math.nan, 2.0])
    assert [value for _, value in trajectory.loss_series()] == [1.0, 2.0]


# --- scale-collapse ---------------------------------------------------------------------------------------------------


def scaled(skips: Sequence[bool], scale: float = 65536.0, loss: float = 1.0) -> tuple[Trajectory, Incident | None]:
    trajectory, answer = Trajectory(), None
    for step, skipped in enumerate(skips):
        trajectory.add(StepVitals(step, loss=loss, scale=scale, skipped=skipped))
        answer = answer or scale_collapse(Situation(trajectory, step))
        scale = scale / 2 if skipped else scale
    return trajectory, answer


def test_scale_that_falls_and_falls_has_collapsed() -> None:
    _, answer = scaled([False] * 10 + [True] * 20)
    assert answer is not None
    assert answer.step == answer.evidence["since_step"] == 10
    assert answer.evidence["scale_before"] == 65536.0
    assert 18 <= answer.evidence["noticed_at_step"] <= 22


def test_collapse_with_a_success_now_and_then() -> None:
    _, answer = scaled([False] * 5 + [True, True, True, True, True, False] * 8)
    assert answer is not None


@pytest.mark.parametrize(
    "skips",
    [[True] * 12 + [False] * 50, ([False] * 20 + [True]) * 10, [True] * 5 + [False] * 9 + [True] * 5 + [False] * 9],
    ids=["settling", "now and then", "twice"],
)
def test_settling_scaler_has_not_collapsed(skips: list[bool]) -> None:
    assert scaled(skips)[1] is None


@pytest.mark.parametrize("begins", [2.0**26, 16384.0], ids=["a new scaler", "the same"])
def test_a_scaler_that_begins_anew_far_above_the_old_level(begins: float) -> None:
    trajectory, answer = Trajectory(), None
    for step in range(50):
        scale = 8192.0 if step < 30 else begins / 2.0 ** (step - 30)
        trajectory.add(StepVitals(step, loss=1.0, scale=scale, skipped=step >= 30 and scale > 8.0))
        answer = answer or scale_collapse(Situation(trajectory, step))
    assert (answer is None) == (begins > 16384.0)


def test_collapse_from_the_start_is_told_when_the_scale_is_below_one() -> None:
    _, answer = scaled([True] * 20)
    assert answer is not None
    assert answer.evidence["scale"] < 1


def test_bad_losses_are_told_as_themselves() -> None:
    assert scaled([True] * 40, loss=math.nan)[1] is None


def test_what_makes_every_step_fail_is_not_told_twice() -> None:
    trajectory, _ = scaled([False] * 10 + [True] * 20)
    situation = Situation(trajectory, 30)
    for cause, told in (("singular-gradient", False), ("gradient-overflow", True), ("loss-scale-overflow", True)):
        fields = {f: getattr(OVERFLOW, f) for f in OVERFLOW.__struct_fields__} | {"cause": cause, "occurrences": 20}
        situation.known = Incident(**fields)
        answer = scale_collapse(situation)
        assert (answer is not None) == told
        if answer is not None:
            assert (answer.module, answer.op) == ("fc", "aten.mul.Tensor")


@pytest.mark.parametrize(("occurrences", "last_step", "told"), [(9, 19, False), (1, 10, True), (4, 19, True)])
def test_what_makes_every_step_fail_and_is_not_counted_any_more(occurrences: int, last_step: int, told: bool) -> None:
    trajectory, _ = scaled([False] * 10 + [True] * 40)
    situation = Situation(trajectory, 50)
    fields = {f: getattr(OVERFLOW, f) for f in OVERFLOW.__struct_fields__} | {"cause": "singular-gradient"}
    fields |= {"occurrences": occurrences, "evidence": {"last_step": last_step}}
    situation.known = Incident(**fields)
    assert (scale_collapse(situation) is not None) == told


# --- the optimizer's own arithmetic -------------------------------------------------------------------------------------


def stepped(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, gradient: float, **options: object
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype))
    optimizer = kind([parameter], **options)  # type: ignore[arg-type]
    parameter.grad = torch.full_like(parameter, gradient)
    parameter.grad[0] = 0.5
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_eps_of_zero_poisons_and_is_found(kind: type[torch.optim.Optimizer]) -> None:
    parameter, optimizer = stepped(kind, torch.float16, 1e-5, lr=1e-3, eps=1e-8)
    found = poisoned(optimizer, False)
    assert found is not None
    assert found.parameter is parameter
    assert found.bad.tolist() == list(range(4, 12))
    assert found.update.first_bad_op is not None


def test_float32_and_a_sane_eps_are_not_accused() -> None:
    for dtype, eps in ((torch.float32, 1e-8), (torch.float16, 1e-4), (torch.bfloat16, 1e-8)):
        _, optimizer = stepped(torch.optim.Adam, dtype, 1e-5, lr=1e-3, eps=eps)
        assert poisoned(optimizer, False) is None


def test_bad_gradients_are_not_the_optimizers_fault() -> None:
    _, optimizer = stepped(torch.optim.Adam, torch.float16, math.inf, lr=1e-3, eps=1e-8)
    assert poisoned(optimizer, False) is None


def test_update_alone_is_the_update_and_touches_nothing() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = torch.randn(5, 3)
        optimizer.step()
    calls: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    before = (parameter.detach().clone(), {k: v.clone() for k, v in optimizer.state[parameter].items()})
    random_state = torch.get_rng_state()

    update = update_alone(optimizer, parameter, torch.arange(15))
    handle.remove()

    assert update is not None
    assert calls == [], "nobody who watches optimizers sees it"
    assert parameter.equal(before[0])
    assert all(optimizer.state[parameter][k].equal(v) for k, v in before[1].items())
    assert torch.get_rng_state().equal(random_state)
    optimizer.step()
    torch.testing.assert_close(update.after, parameter.detach().reshape(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, 0.3, -5.7, 1000.0, 3e-4])
def test_spacing_is_the_distance_to_the_next_number(dtype: torch.dtype, value: float) -> None:
    here = torch.tensor([value], dtype=dtype)
    up = torch.tensor([abs(here.item())], dtype=dtype)
    following = (up.view(torch.int16) + 1).view(dtype)
    assert float(spacing_of(here.float(), dtype)) == pytest.approx((following.double() - up.double()).item())


# --- the forecast -----------------------------------------------------------------------------------------------------


def course(
    size_at: Callable[[int], float], steps: range, noise: float = 0.02, rate: Callable[[int], float] = lambda s: 0.1
) -> list[tuple[int, forecast.Outlook]]:
    """What the forecast says after each sample of a growing series."""
    random_numbers = random.Random(1)
    peak, said = Peak(), []
    for step in steps:
        peak.steps.append(step)
        peak.sizes.append(size_at(step) * math.exp(random_numbers.gauss(0, noise)))
        peak.rates.append(rate(step))
        found = outlook_of(PLACE, peak, LIMIT) if peak.sizes[-1] > forecast.NEAR * LIMIT else None
        if found is not None:
            said.append((step, found))
    return said


GROWING = {
    "linear": (lambda s: 30.0 * s + 100, range(0, 2180, 30)),
    "exponential": (lambda s: 10 * math.exp(s / 200), range(0, 1750, 20)),
    "quadratic": (lambda s: 0.02 * s * s + 5, range(0, 1800, 25)),
    "square root": (lambda s: 1000.0 * math.sqrt(s + 1), range(0, 4290, 60)),
    "from a high level": (lambda s: 20_000 + 20.0 * s, range(0, 2270, 30)),
    "late": (lambda s: 3000.0 if s < 1500 else 3000 * math.exp((s - 1500) / 300), range(0, 2400, 20)),
}
LEVELLING = {
    "saturating below": (lambda s: 45_000 * (1 - math.exp(-s / 400)) + 10, range(0, 6000, 30)),
    "logistic": (lambda s: 50_000 / (1 + math.exp(-(s - 1500) / 200)), range(0, 5000, 25)),
    "stable at 60,000": (lambda s: 60_000.0, range(0, 4000, 20)),
    "logarithmic": (lambda s: 5000 * math.log(s + 2), range(0, 6000, 30)),
    "a step up": (lambda s: 20_000.0 if s < 1000 else 40_000.0, range(0, 4000, 20)),
    "rising and falling": (lambda s: 45_000 * math.sin(math.pi * s / 4000) + 10, range(0, 4000, 25)),
    "spikes": (lambda s: 64_000.0 if s % 370 == 0 else 32_000.0, range(0, 6000, 10)),
    "small": (lambda s: 10 + 0.1 * s, range(0, 4000, 20)),
}


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("name", GROWING)
def test_forecast_speaks_before_the_overflow(name: str, noise: float) -> None:
    size_at, steps = GROWING[name]
    overflow = next(s for s in range(100_000) if size_at(s) > LIMIT)

    said = course(size_at, steps, noise)

    assert said, "it never spoke"
    step, outlook = said[0]
    assert step < overflow
    assert outlook.steps_left <= 4 * (overflow - step) + 100


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("name", LEVELLING)
def test_forecast_is_silent_where_growth_ends(name: str, noise: float) -> None:
    size_at, steps = LEVELLING[name]
    if name == "logistic":
        noise /= 10  # its turning point cannot be seen through more
    assert course(size_at, steps, noise) == []


def test_forecast_waits_while_the_learning_rate_rises() -> None:
    def grown(step: int) -> float:
        return 40.0 * min(step, 1000) + 100

    assert course(grown, range(0, 3000, 20), rate=lambda step: min(step, 1000) / 1000) == []


def test_noisy_series_leaves_with_its_largest_values() -> None:
    random_numbers = random.Random(3)
    values = {s: (10_000 + 10.0 * s) * math.exp(random_numbers.gauss(0, 0.2)) for s in range(0, 6000, 20)}
    overflow = next(s for s, value in values.items() if value > LIMIT)
    median_overflows = (LIMIT - 10_000) // 10

    said = course(lambda s: values[s], range(0, overflow, 20), noise=0)

    assert overflow < 0.7 * median_overflows
    assert said
    ends = sorted(step + outlook.steps_left for step, outlook in said)
    assert ends[len(ends) // 2] < (overflow + median_overflows) / 2


def test_one_spike_is_no_trend() -> None:
    assert fits.growth(range(20), [5.0] * 19 + [5000.0]) is None
    assert fits.growth(range(20), [float(i + 1) for i in range(20)]) is not None


def test_growth_extrapolates_what_it_sees() -> None:
    linear = fits.growth(range(0, 300, 10), [100.0 + s for s in range(0, 300, 10)])
    assert linear is not None
    assert linear.steps_to(590, horizon=1000) == pytest.approx(200, abs=25)
    assert linear.steps_to(1e6, horizon=1000) is None
    doubling = fits.growth(range(0, 300, 10), [2.0 ** (s / 50) for s in range(0, 300, 10)])
    assert doubling is not None
    assert doubling.steps_to(2.0**8, horizon=1000) == pytest.approx(110, abs=40)


@pytest.mark.parametrize("steps", [range(0, 120, 8), [2, 8, 16, 32, 64, 66, 67, 68, 69, 70, 71, 73, 74, 75, 76, 77]])
@pytest.mark.parametrize("factor", [1.3, 1.95, 4.0])
def test_steps_that_are_left_however_unevenly_it_was_looked(steps: Sequence[int], factor: float) -> None:
    rate = math.log(20) / (steps[-1] - steps[0])
    sizes = [math.exp(rate * step) for step in steps]
    found = fits.growth(steps, sizes)
    assert found is not None
    assert found.steps_to(factor * sizes[-1], horizon=1000) == pytest.approx(math.log(factor) / rate, rel=0.15, abs=4)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_trajectory_is_bounded() -> None:
    trajectory = Trajectory()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for step in range(20_000):
        trajectory.add(StepVitals(step, loss=1.0, grad_norm=1.0))
        trajectory.activations(step, {PLACE: 1.0}, 0.1)
    import weakref

    for step in range(1000):
        trajectory.look(WeightSample(step, weakref.ref(optimizer), 0.1, 1.0, 1.0, 1.0, []))
    assert len(trajectory.recent) == RECENT_STEPS
    assert len(trajectory.losses.points) <= THINNED
    assert len(trajectory.peaks[PLACE].sizes) < 200
    assert len(trajectory.looks) < 200


def test_thinned_series_spans_the_whole_run() -> None:
    series = Thinned(64)
    for step in range(10_000):
        series.add(step, float(step))
    steps = [step for step, _ in series.points]
    assert len(steps) <= 64
    assert steps[0] == 0
    assert steps[-1] > 9_000
    assert len({b - a for a, b in itertools.pairwise(steps)}) <= 2


def test_the_losses_of_an_optimizer_that_is_gone_are_nobodys() -> None:
    kept, gone = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    turns = [(weakref.ref(gone), 1.0), (weakref.ref(kept), 2.0)]
    course = Trajectory()
    course.add_turns(0, turns)
    del gone
    for step in (1, 2):
        course.add_turns(step, [*turns, *turns])
    assert course.order == (0, id(kept), 0, id(kept))
    assert course.of(kept).loss_series()[-1] == (2, 4.0)
