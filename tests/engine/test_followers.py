"""What follows a step waits for it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from engine_loops import Net, loss_of, model_of, train
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampguard
from ampguard.engine.policies import Rollback
from ampguard.errors import SetupError

NAN = float("nan")


def setup(precision: str = "fp16") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_scheduler_stands_still_where_a_step_is_skipped() -> None:
    model, optimizer = setup()
    scheduler = StepLR(optimizer, 1, 0.5)
    amp = ampguard.Amp(model, optimizer, "fp16", schedulers=scheduler, init_scale=2.0**26)
    rates = []
    for number in range(14):
        amp.backward(loss_of(amp, number))
        skipped = amp.step().skipped
        rates.append((skipped, scheduler.get_last_lr()[0]))
    assert [s for s, _ in rates].count(True) > 2
    for (_, before), (skipped, after) in itertools.pairwise(rates):
        assert after == (before if skipped else before / 2)


def test_inside_a_window_nothing_follows() -> None:
    model, optimizer = setup()
    scheduler = StepLR(optimizer, 1, 0.5)
    amp = ampguard.Amp(model, optimizer, "bf16", schedulers=[scheduler], accumulate=3)
    train(amp, range(7))
    assert scheduler.last_epoch == 2


def test_an_average_waits_too() -> None:
    model, optimizer = setup()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    amp = ampguard.Amp(model, optimizer, "bf16", ema=average)
    train(amp, range(5), spoil={2: NAN})
    assert int(average.n_averaged) == 4
    assert all(p.isfinite().all() for p in average.parameters())


def test_an_average_of_another_kind() -> None:
    class Ema:
        calls = 0

        def update(self, model: torch.nn.Module) -> None:
            assert isinstance(model, Net)
            self.calls += 1

    model, optimizer = setup()
    ema = Ema()
    train(ampguard.Amp(model, optimizer, "bf16", ema=[(ema, model)]), range(3))
    assert ema.calls == 3


def test_two_optimizers_with_a_scheduler_each() -> None:
    torch.manual_seed(0)
    a, b = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
    opt_a, opt_b = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (a, b))
    schedulers = [CosineAnnealingLR(opt_b, 10), LambdaLR(opt_a, lambda step: 0.5**step)]
    amp = ampguard.Amp([a, b], {"a": opt_a, "b": opt_b}, "fp32", schedulers=schedulers)
    for _ in range(2):
        amp.backward(a(torch.ones(1, 8)).sum())
        amp.step("a")
    assert opt_a.param_groups[0]["lr"] == 0.25
    assert opt_b.param_groups[0]["lr"] == 1.0


def test_what_cannot_follow_is_refused() -> None:
    model, optimizer = setup()
    with pytest.raises(SetupError, match="ReduceLROnPlateau needs a metric"):
        ampguard.Amp(model, optimizer, schedulers=ReduceLROnPlateau(optimizer))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SetupError, match="the StepLR in schedulers= belongs to none of the optimizers"):
        ampguard.Amp(model, optimizer, schedulers=StepLR(other, 1))
    with pytest.raises(SetupError, match="ema= takes objects with update_parameters"):
        ampguard.Amp(model, optimizer, ema=model)
    assert model_of(ampguard.Amp(model, optimizer)) is model


@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-true"])
def test_an_average_of_low_weights_is_kept_in_float32(mode: str) -> None:
    """In O2 of the master weights: a share of 1e-4 of a step is far below float16's own spacing."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    amp = ampguard.Amp(model, optimizer, mode, ema=average, init_scale=64.0)
    kept = [p.detach().clone() for p in average.module.parameters()]
    for number in range(4):
        train(amp, range(number, number + 1))
        with amp.mode.in_float32():
            now = [p.detach().float().clone() for p in model.parameters()]
        kept = now if number == 0 else [0.5 * old + 0.5 * new for old, new in zip(kept, now, strict=True)]
    for mine, expected in zip(average.module.parameters(), kept, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)
    if mode == "O2":
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(torch.equal(new, master) for new, master in zip(now, held, strict=True))


class CopiedEma:
    """As many scripts write it: a copy of the model, and no state of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module, self.decay = copy.deepcopy(model), 0.9

    def update(self, model: torch.nn.Module) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 1 - self.decay)


def test_an_average_that_keeps_a_copy_is_rolled_back_and_saved_with_it() -> None:
    model, optimizer = setup()
    amp = ampguard.Amp(model, optimizer, "bf16", ema=(average := CopiedEma(model)), on_nonfinite=Rollback(every=1))
    train(amp, range(3))
    before = [p.clone() for p in average.module.parameters()]
    saved = copy.deepcopy(amp.state_dict())
    train(amp, range(3, 4), spoil={3: NAN})
    assert all(torch.equal(p, b) for p, b in zip(average.module.parameters(), before, strict=True))
    train(amp, range(4, 6))
    amp.load_state_dict(saved)
    assert all(torch.equal(p, b) for p, b in zip(average.module.parameters(), before, strict=True))


def test_an_average_that_cannot_be_saved_is_refused_with_what_to_do() -> None:
    class Shadow:
        def update(self, model: torch.nn.Module) -> None:
            pass

    model, optimizer = setup()
    amp = ampguard.Amp(model, optimizer, "bf16", ema=Shadow())
    with pytest.raises(SetupError, match=r"the Shadow in ema= cannot be saved.*\n.*give it both"):
        amp.state_dict()


def test_a_loop_that_steps_them_too_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = setup()
    schedulers = [StepLR(optimizer, 1, 0.5), ChainedScheduler([StepLR(optimizer, 2, 0.5)])]
    amp = ampguard.Amp(model, optimizer, "fp16", schedulers=schedulers, init_scale=16.0)
    for number in range(5):
        train(amp, range(number, number + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert [line for line in caplog.messages if "too, between two calls" in line] == [
        f"the {name} in schedulers= is stepped by something else too, between two calls of amp.step(): its schedule runs "
        "faster than it says. Delete scheduler.step() in the loop, or leave the scheduler out of schedulers=."
        for name in ("StepLR", "ChainedScheduler")
    ]


def test_schedulers_that_nobody_else_steps_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = setup()
    scheduler = StepLR(optimizer, 3, 0.5)
    amp = ampguard.Amp(
        model, optimizer, "fp16", schedulers=scheduler, init_scale=2.0**20, on_nonfinite=Rollback(every=2)
    )
    train(amp, range(6), {3: NAN})
    state = copy.deepcopy(amp.state_dict())
    train(amp, range(3))
    for _ in range(3):
        amp.load_state_dict(state)
        train(amp, range(1))
    assert not [line for line in caplog.messages if "schedulers=" in line]


def test_one_that_is_given_twice_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = StepLR(optimizer, 1, 0.5)
    average = AveragedModel(model)
    with pytest.raises(SetupError, match="schedulers= holds one StepLR twice"):
        ampguard.Amp(model, optimizer, "fp32", schedulers=[scheduler, scheduler])
    with pytest.raises(SetupError, match="ema= holds one AveragedModel twice"):
        ampguard.Amp(model, optimizer, "fp32", ema=[average, average])
