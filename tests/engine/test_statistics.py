from __future__ import annotations

import copy

import pytest
import torch
from engine_loops import MODES, made, model_of, train
from torch import Tensor, nn

import ampguard
from ampguard.engine.checkpoint.seal import seal_of
from ampguard.engine.statistics import LARGEST, Statistics
from ampguard.errors import NonfiniteError

NAN = float("nan")


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_bad_batch_leaves_the_statistics_as_they_were(
    mode: str, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    amp = made(mode)
    train(amp, range(first))
    before = buffers(model_of(amp))
    train(amp, range(first, first + 2), spoil=dict.fromkeys((first, first + 1), NAN))
    assert_same(before, buffers(model_of(amp)))
    assert "`statistics.running_mean`, `statistics.running_var` hold the values of before again" in caplog.text
    assert "every evaluation" not in caplog.text
    amp.state_dict()
    train(amp, range(first + 2, first + 5))
    assert amp.steps == first + 3


def test_the_statistics_of_an_error_that_is_caught_are_put_back() -> None:
    amp = made("bf16", on_nonfinite="raise")
    train(amp, range(2))
    before = buffers(model_of(amp))
    with pytest.raises(NonfiniteError):
        train(amp, range(2, 3), spoil={2: NAN})
    assert_same(before, buffers(model_of(amp)))


def test_a_batch_that_is_skipped_for_its_gradients_stays_in_the_statistics_as_in_pytorch() -> None:
    amp = made("fp16", init_scale=2.0**40)
    train(amp, range(1))
    assert amp.steps == 0
    assert not torch.equal(model_of(amp).statistics.running_mean, torch.zeros(32))


@pytest.mark.parametrize("bad", range(3))
def test_a_window_is_taken_out_whole(bad: int) -> None:
    amp = made("bf16", accumulate=3)
    train(amp, range(3))
    before = buffers(model_of(amp))
    train(amp, range(3, 6), spoil={3 + bad: NAN})
    assert_same(before, buffers(model_of(amp)))


def test_two_optimizers_that_step_one_after_the_other() -> None:
    torch.manual_seed(0)
    nets = {name: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for name in ("one", "two")}
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}
    amp = ampguard.Amp(nets, optimizers, precision="fp32")

    def step(spoil: bool) -> None:
        x = torch.randn(8, 4)
        with amp.autocast():
            good = nets["one"](x).square().mean()
            bad = nets["two"](x * (NAN if spoil else 1.0)).square().mean()
        amp.backward([good])
        amp.step("one")
        amp.backward([bad])
        amp.step("two")

    step(False)
    before = buffers(nets["two"])
    moved = buffers(nets["one"])
    step(True)
    assert_same(before, buffers(nets["two"]))
    assert not torch.equal(moved["1.running_mean"], nets["one"][1].running_mean)


class Keeping(nn.Module):
    """Buffers of every kind: written in place, made anew, never written, infinite on purpose, too large to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("codebook", torch.ones(2, 2))
        self.register_buffer("average", torch.zeros(2, 2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("still", torch.ones(2, 2))
        self.register_buffer("mask", torch.tensor([[0.0, -torch.inf]]))
        self.register_buffer("queue", torch.zeros(LARGEST + 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codebook.lerp_(x, 0.5)
            self.average = 0.9 * self.average + x
            self.count += 1
            self.queue[0] = x[0, 0]
        return self.weight * x


def test_other_buffers_that_a_forward_pass_writes() -> None:
    model = Keeping()
    amp = ampguard.Amp(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")

    def step(value: float) -> None:
        with amp.autocast():
            loss = model(torch.full((2, 2), value)).sum()
        amp.backward(loss)
        amp.step()

    for value in (1.0, 2.0):
        step(value)
    before = buffers(model)
    step(NAN)
    after = buffers(model)
    assert after.pop("queue").isnan().any()
    assert_same({name: before[name] for name in after}, after)
    assert amp.poisoned_buffers() == ["queue"]


def test_a_verdict_that_comes_a_window_late_finds_the_values_from_before_the_bad_batch() -> None:
    model = nn.BatchNorm1d(3)
    kept = Statistics({"model": model})
    kept.before_forward()
    model(torch.randn(4, 3))
    kept.end_window()
    before = buffers(model)
    for _ in range(2):
        kept.before_forward()
        model(torch.full((4, 3), NAN))
        kept.end_window()
    assert kept.put_back() == ["running_mean", "running_var"]
    assert_same(before, buffers(model))
    assert kept.put_back() == []


def test_after_a_state_was_loaded_nothing_older_comes_back() -> None:
    amp = made("fp32")
    train(amp, range(3))
    state = copy.deepcopy(amp.state_dict())
    train(amp, range(3, 5))
    amp.load_state_dict(state)
    before = buffers(model_of(amp))
    train(amp, range(5, 6), spoil={5: NAN})
    assert_same(before, buffers(model_of(amp)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("saved_at", range(3, 7))
def test_a_run_that_is_continued_inside_a_window_puts_the_same_statistics_back(mode: str, saved_at: int) -> None:
    whole = made(mode, accumulate=3)
    train(whole, range(saved_at))
    state = copy.deepcopy(whole.state_dict())
    train(whole, range(saved_at, 7), spoil={5: NAN})

    second = made(mode, seed=5, accumulate=3)
    train(second, range(1))
    second.load_state_dict(state)
    train(second, range(saved_at, 7), spoil={5: NAN})
    assert_same(buffers(model_of(whole)), buffers(model_of(second)))
    assert whole.state_dict()["seal"] == second.state_dict()["seal"]


def test_a_state_of_before_statistics_were_in_it_can_be_loaded() -> None:
    first = made("fp16", accumulate=3)
    train(first, range(4))
    state = copy.deepcopy(first.state_dict())
    del state["progress"]["statistics"], state["seal"]
    second = made("fp16", seed=5, accumulate=3)
    second.load_state_dict({**state, "seal": seal_of(state)})
    train(second, range(4, 6))
    assert second.steps == 2
