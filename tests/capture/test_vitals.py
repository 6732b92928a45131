"""The vital signs are the true ones, cost a known number of looks, and a watched training ends as an unwatched one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, fingerprint, seed_everything

from ampguard import compat
from ampguard.capture.root_calls import pace
from ampguard.capture.sampling import allowance, weights
from ampguard.capture.sampling.allowance import Allowance
from ampguard.capture.sampling.later import NumbersLater
from ampguard.capture.sampling.weights import slice_of
from ampguard.replay.activations import ActivationSampling, peaks_of
from ampguard.report.history import ActivationRow, StepRow, read_history

Guard = Callable[..., Watched]


def steps_of(run: Watched) -> list[StepRow]:
    path = run.session.path
    assert path is not None
    with read_history(path) as history:
        return list(history.steps())


def small_model() -> nn.Sequential:
    seed_everything()
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 6), torch.randint(3, (8,))


def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allowance, "is_due", lambda self, step: True)
    nothing_compiled(monkeypatch)


def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have compiled something in this process; then no activation is sampled."""
    monkeypatch.setattr(compat, "has_compiled", lambda: False)


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_losses_and_clipped_norms_are_those_of_the_script(guard: Guard) -> None:
    def body() -> list[tuple[float, float]]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(5):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            seen.append((loss.item(), norm.item()))
        return seen

    run = guard(body)

    assert [(row.loss, row.grad_norm) for row in steps_of(run)] == run.result
    assert [row.skipped for row in steps_of(run)] == [False] * 5
    assert [row.scale for row in steps_of(run)] == [None] * 5
    assert all(row.seconds is not None and row.seconds > 0 for row in steps_of(run))


@pytest.mark.parametrize("unscales", [True, False])
def test_scale_skips_and_the_unscaled_norm(unscales: bool, guard: Guard) -> None:
    """A norm that is read while the gradients are scaled is divided by the scale."""

    def body() -> list[float]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        norms = []
        for step in range(4):
            x, y = batch()
            loss = F.cross_entropy(model(x), y) * (1e38 if step == 2 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
            norms.append(norm if unscales else norm / 512)
            scaler.step(optimizer)
            scaler.update()
        return norms

    run = guard(body)
    rows = steps_of(run)

    assert [row.skipped for row in rows] == [False, False, True, False]
    assert [row.scale for row in rows] == [512.0, 512.0, 512.0, 256.0]
    assert [row.grad_norm for row in rows[:2]] == pytest.approx(run.result[:2])
    assert rows[2].loss == pytest.approx(1e38, rel=1.0)
    assert rows[2].grad_norm is not None
    assert math.isnan(rows[2].grad_norm), "an infinite norm is not kept as a number"


def test_sampled_norm_and_update_ratio_are_the_true_ones(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    every_step(monkeypatch)

    def body() -> list[tuple[float, float]]:
        model = nn.Linear(6, 3, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        truth = []
        for _ in range(4):
            x, y = batch()
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            assert model.weight.grad is not None
            norm = model.weight.grad.norm().item() / 64
            truth.append((norm, 0.1 * norm / model.weight.detach().norm().item()))
            scaler.step(optimizer)
            scaler.update()
        return truth

    run = guard(body)
    rows = steps_of(run)

    assert [row.grad_norm for row in rows] == pytest.approx([norm for norm, _ in run.result], rel=1e-5)
    assert [row.update_ratio for row in rows] == pytest.approx([ratio for _, ratio in run.result], rel=1e-4)


def test_losses_of_one_iteration_are_added_up(guard: Guard) -> None:
    def body() -> list[float]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sums = []
        for _ in range(3):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(4):
                x, y = batch()
                loss = F.cross_entropy(model(x), y) / 4
                loss.backward()
                total += loss.item()
            optimizer.step()
            sums.append(total)
        return sums

    run = guard(body)
    assert [row.loss for row in steps_of(run)] == pytest.approx(run.result)


def test_fused_optimizer_that_skips_itself_is_seen(guard: Guard) -> None:
    def body() -> None:
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        for step in range(4):
            x, y = batch()
            loss = F.cross_entropy(model(x), y) * (1e38 if step == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    run = guard(body)
    assert [row.skipped for row in steps_of(run)] == [False, True, False, False]


# --- observing changes nothing ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.gelu(self.norm(self.fc(x)))).relu_()


@pytest.mark.parametrize("kind", ["adamw-scaler", "sgd", "half-adam", "fused-scaler"])
def test_sampled_steps_are_bitwise_the_unsampled_ones(kind: str, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    every_step(monkeypatch)

    def body() -> dict[str, Any]:
        seed_everything()
        model = nn.Sequential(Block(), Block(), nn.Linear(12, 3))
        if kind == "half-adam":
            model = model.half()
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if kind == "sgd"
            else torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=kind == "fused-scaler")
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled="scaler" in kind)
        for _ in range(8):
            x, y = torch.randn(16, 12), torch.randint(3, (16,))
            with torch.autocast("cpu", dtype=torch.float16, enabled="scaler" in kind):
                output = model(x.half() if kind == "half-adam" else x)
                loss = F.cross_entropy(output.float(), y) + (output * output).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return fingerprint(model, optimizer, scaler)

    plain = body()
    run = guard(body)

    assert run.faults == 0, run.stderr
    assert run.report.status == "clean", run.stderr
    assert [key for key in plain if run.result[key] != plain[key]] == []
    assert run.session._dynamics.trajectory.looks, "it must have looked for this test to mean anything"
    if kind != "sgd":
        assert run.session._dynamics.trajectory.peaks


def test_everything_is_put_back(guard: Guard) -> None:
    from torch.nn.utils import clip_grad

    places: list[tuple[Any, str]] = [(torch.autograd, "backward"), (torch.amp.GradScaler, "unscale_")]
    places += [(torch.amp.GradScaler, "step"), (nn.Module, "__call__"), (clip_grad, "_get_total_norm")]
    before = [getattr(owner, name) for owner, name in places]

    guard(lambda: None)

    assert all(getattr(o, n) is old for (o, n), old in zip(places, before, strict=True))


@pytest.mark.parametrize("name", ["norm_seen", "before_update", "after_update", "iteration_ended", "flush"])
def test_fault_in_a_vital_sign_leaves_the_training_alone(
    name: str, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampguard.capture.sampling.vitals import Vitals

    def broken(*args: object) -> None:
        raise RuntimeError("injected")

    def body() -> dict[str, Any]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(4):
            x, y = batch()
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return fingerprint(model, optimizer, scaler)

    plain = body()
    monkeypatch.setattr(Vitals, name, broken)
    run = guard(body)

    assert run.faults == 1, run.stderr
    assert run.result == plain
    assert run.report.steps == 4, "the guard itself goes on"


# --- sampled maxima ---------------------------------------------------------------------------------------------------


def activations_of(run: Watched, module: str, op: str) -> list[ActivationRow]:
    path = run.session.path
    assert path is not None
    with read_history(path) as history:
        return [row for row in history.activations(module) if row.op == op]


def test_maxima_name_module_operator_and_line(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    every_step(monkeypatch)

    results: list[torch.Tensor] = []

    class Loud(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results.append(x.detach())
            return x * 100

    def body() -> None:
        model = nn.Sequential(nn.Linear(6, 4), Loud(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x, y = batch()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    rows = activations_of(run, "1", "aten.mul.Tensor")

    assert [row.step for row in rows] == [1, 2]
    assert {row.dtype for row in rows} == {"float16"}
    assert rows[0].file == str(Path(__file__))
    source = Path(__file__).read_text().splitlines()
    assert rows[0].line is not None
    assert source[rows[0].line - 1].strip() == "return x * 100"
    assert [row.max_abs for row in rows] == [(x * 100).abs().max().item() for x in results[1:]]


def test_a_target_without_gradients_is_sampled_also_when_its_calls_are_no_longer_kept(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_step(monkeypatch)
    monkeypatch.setattr(pace, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(pace, "SHARE", 0.0)

    def body() -> None:
        model = nn.Sequential(nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            x, _ = batch()
            with torch.autocast("cpu", dtype=torch.float16):
                with torch.no_grad():
                    target = model(x + 1).float()
                loss = F.mse_loss(model(x).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    rows = activations_of(run, "0", "aten.addmm.default")
    source = Path(__file__).read_text().splitlines()
    lines = {source[row.line - 1].strip() for row in rows if row.line is not None and row.step == 11}
    assert lines == {"target = model(x + 1).float()", "loss = F.mse_loss(model(x).float(), target)"}


def test_an_evaluation_is_watched_for_a_few_calls_only() -> None:
    sampling = ActivationSampling(None, NumbersLater(), lambda *args: None)  # type: ignore[arg-type]
    with torch.no_grad():
        assert [sampling.wants_call() for _ in range(9)] == [True] * 4 + [False] * 5
    assert sampling.wants_call()
    sampling.iteration_ended(1, 0.1)
    with torch.inference_mode():
        assert not sampling.wants_call()


def test_masks_and_infinities_are_no_activations() -> None:
    places = [object()] * 3  # type: ignore[var-annotated]

    class Half:
        dtype = torch.float16

    places = [Half(), Half(), Half()]
    peaks = peaks_of(places, [-65504.0, 5.0, -math.inf, 7.0, -9.0, 3.0])  # type: ignore[arg-type]
    assert list(peaks.values()) == [5.0, 7.0, 9.0]


def test_runs_without_float16_are_left_alone(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    original = ActivationSampling.watch
    every_step(monkeypatch)
    monkeypatch.setattr(ActivationSampling, "watch", lambda self, event: looks.append(event) or original(self, event))

    def body() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(15):
            x, y = batch()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    guard(body)
    assert 3 <= len({event.updates_before for event in looks if hasattr(event, "updates_before")}) <= 6


def test_compiled_modules_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_compiled(monkeypatch)
    sampling = ActivationSampling(None, NumbersLater(), lambda *args: None)  # type: ignore[arg-type]
    assert sampling.is_due(2)
    monkeypatch.setattr(compat, "has_compiled", lambda: True)
    assert not sampling.is_due(2)


# --- the allowance ----------------------------------------------------------------------------------------------------


def test_looks_never_take_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(allowance.time, "perf_counter", lambda: clock[0])
    share, look, step_seconds = 0.004, 0.005, 0.007
    a = Allowance(share, frozenset({0, 1, 2, 4}))
    spent = []
    for step in range(20_000):
        clock[0] += step_seconds
        if a.is_due(step):
            a.spend(look)
            spent.append(step)
    assert spent[:4] == [0, 1, 2, 4]
    later = [step for step in spent if step > 4]
    assert share * 0.8 < len(later) * look / clock[0] < share * 1.1
    assert max(b - a for a, b in itertools.pairwise(later)) < 800  # what the first steps took is made up for


def test_attention_costs_its_share_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(allowance.time, "perf_counter", lambda: clock[0])
    a = Allowance(0.004, frozenset({0, 1, 2, 4}))
    counts = [0, 0, 0]
    for step in range(30_000):
        clock[0] += 0.007
        if step in (10_000, 20_000):
            a.attend(0.03 if step == 10_000 else 0.0)
        if a.is_due(step):
            a.spend(0.005)
            counts[step // 10_000] += 1
    assert counts[1] > 5 * counts[0]
    assert counts[2] <= counts[0] + 5


def test_a_short_run_that_grows_is_looked_at_before_much_was_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(allowance.time, "perf_counter", lambda: clock[0])
    a = Allowance(0.004, frozenset({2}), cheap=0.002)
    seen = []
    for step in range(1, 400):
        clock[0] += 0.0014
        if step == 128:
            a.attend(0.03)
        if a.is_due(step):
            a.spend(0.0012)
            seen.append(step)
    assert seen[:7] == [2, 8, 16, 32, 64, 128, 133]
    assert 20 < len([step for step in seen if step > 128]) <= 0.1 / 0.0012 + 0.03 * clock[0] / 0.0012


def test_slices_are_the_same_elements_each_time_and_small() -> None:
    for tensor in (torch.randn(3), torch.randn(300, 70), torch.randn(8, 6, 5, 5).to(memory_format=torch.channels_last)):
        assert slice_of(tensor).numel() <= 4096
        assert slice_of(tensor).equal(slice_of(tensor))
        assert slice_of(tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    values = torch.randn(10, 7)
    assert slice_of(values.t()).sort().values.equal(values.flatten().sort().values)


def test_numbers_come_in_the_order_in_which_they_were_asked_for() -> None:
    later, got = NumbersLater(), []
    later.ask([torch.tensor(1.5), 2.0, None], got.append)
    later.ask([torch.tensor(True)], got.append)
    assert got == [[1.5, 2.0, None], [1.0]]


def test_a_slow_first_look_does_not_end_looking() -> None:
    a = Allowance(weights.SHARE, weights.FIRST_STEPS)
    seen = []
    for step in range(1, 40):
        if a.is_due(step):
            seen.append(step)
            a.spend(0.5)  # a machine that is busy with something else
    assert seen == [1, 2, 4, 8, 16]
