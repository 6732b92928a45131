"""Save and resume: bitwise the uninterrupted run; whatever does not belong here is refused before anything changes."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_loops import MODES, Net, loss_of, made, model_of, same, train, weights
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

import ampguard
from ampguard.engine.checkpoint import seal
from ampguard.engine.policies import Rollback
from ampguard.errors import CheckpointError, PoisonedStateError

NAN = float("nan")


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(mode: str, accumulate: int) -> None:
    options = {"accumulate": accumulate, "max_grad_norm": 1.0, "init_scale": 2.0**18, "growth_interval": 3}
    whole = made(mode, **options)
    losses = train(whole, range(17))

    first = made(mode, **options)
    train(first, range(7))  # odd, and in the middle of a window of three
    state = through_a_file(first.state_dict())
    train(first, range(2))

    second = made(mode, seed=5, **options)
    train(second, range(1 if accumulate > 1 else 3))
    torch.manual_seed(99)
    second.load_state_dict(state)
    assert train(second, range(7, 17)) == losses[7:]
    assert same(weights(whole), weights(second))
    assert whole.state_dict()["seal"] == second.state_dict()["seal"]
    assert whole.get_scale() == second.get_scale()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_resumed_run_is_rolled_back_to_the_state_of_the_uninterrupted_one(
    on_disk: bool, accumulate: int, tmp_path: Path
) -> None:
    def begun(name: str, seed: int = 0) -> ampguard.Amp:
        policy = Rollback(every=4, folder=tmp_path / name if on_disk else None)
        return made("bf16", seed=seed, accumulate=accumulate, on_nonfinite=policy)

    whole, second = begun("whole"), begun("second", seed=5)
    train(whole, range(10))
    state = through_a_file(whole.state_dict())
    losses = train(whole, range(10, 40), spoil={13: NAN})
    assert whole.policy.rollbacks == 1
    train(second, range(2))
    second.load_state_dict(state)
    assert train(second, range(10, 40), spoil={13: NAN})[4:] == losses[4:]
    assert second.policy.rollbacks == 1
    assert same(weights(whole), weights(second))


@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "fp16", "O2", "O3"])
def test_a_state_between_backward_and_step_goes_on(mode: str, spoilt: bool, is_unscaled: bool) -> None:
    """Gradients that the loop had divided are not divided again; an overflow that it has clamped since is remembered."""

    def begun() -> ampguard.Amp:
        amp = made(mode, max_grad_norm=1.0)
        train(amp, range(3))
        amp.backward(loss_of(amp, 3) * (torch.inf if spoilt else 1.0))
        if is_unscaled:
            amp.unscale_()
            for p in amp.optimizers["AdamW"].param_groups[0]["params"]:
                p.grad.nan_to_num_().clamp_(-1, 1)
        return amp

    whole = begun()
    state = through_a_file(whole.state_dict())
    whole.step()
    losses = train(whole, range(4, 7))
    second = made(mode, seed=5, max_grad_norm=1.0)
    second.load_state_dict(state)
    second.step()
    assert train(second, range(4, 7)) == losses
    assert same(weights(whole), weights(second))
    assert whole.get_scale() == second.get_scale()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "nearest"])
def test_every_rounding_of_bf16_true_resumes(rounding: str) -> None:
    whole = made("bf16-true", rounding=rounding)
    losses = train(whole, range(12))
    first = made("bf16-true", rounding=rounding)
    train(first, range(5))
    state = through_a_file(first.state_dict())
    second = made("bf16-true", seed=3, rounding=rounding)
    second.load_state_dict(state)
    assert train(second, range(5, 12)) == losses[5:]
    assert same(weights(whole), weights(second))
    other = {"stochastic": "kahan", "kahan": "nearest", "nearest": "stochastic"}[rounding]
    with pytest.raises(CheckpointError, match=f"made with rounding='{rounding}', this Amp has '{other}'"):
        made("bf16-true", rounding=other).load_state_dict(first.state_dict())


def with_followers(seed: int) -> ampguard.Amp:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 0.05, total_steps=50)
    average = AveragedModel(model)
    return ampguard.Amp(model, optimizer, "fp16", schedulers=scheduler, ema=average, init_scale=1024.0)


def test_schedulers_averages_and_random_streams_go_on() -> None:
    first, second = with_followers(0), with_followers(1)
    train(first, range(5))
    state = through_a_file(first.state_dict())
    random_now = (random.random(), float(np.random.rand()), float(torch.rand(())))
    losses = train(first, range(5, 9))
    second.load_state_dict(state)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == random_now
    assert train(second, range(5, 9)) == losses
    averages = [amp.followers.averages[0][0].state_dict() for amp in (first, second)]
    assert same(list(averages[0].values()), list(averages[1].values()))
    assert first.followers.schedulers[0].get_last_lr() == second.followers.schedulers[0].get_last_lr()


def test_a_file_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amp, path = made("O2"), tmp_path / "run.pt"
    train(amp, range(3))
    amp.save(path)
    other = made("O2", seed=4)
    other.load(path)
    assert same(weights(amp), weights(other))
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        amp.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_named(part: float, tmp_path: Path) -> None:
    amp, path = made("fp16"), tmp_path / "run.pt"
    train(amp, range(2))
    amp.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    before = weights(amp)
    with pytest.raises(CheckpointError, match=r"run\.pt' is truncated, altered, or no file of amp.save\(\)"):
        amp.load(path)
    assert same(before, weights(amp))
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        amp.load(tmp_path / "none.pt")


def test_a_file_with_an_altered_byte_is_named(tmp_path: Path) -> None:
    """Each byte of what describes the state, a bit of it changed: refused, or without consequence."""
    amp, path = made("fp16"), tmp_path / "run.pt"
    train(amp, range(2))
    amp.save(path)
    whole = path.read_bytes()
    start = whole.index(b"data.pkl")
    refused = 0
    for place in range(start, start + 1500, 7):
        altered = bytearray(whole)
        altered[place] ^= 1 << place % 8
        path.write_bytes(altered)
        try:
            amp.load(path)
        except CheckpointError:
            refused += 1
    assert refused > 150


Damage = Callable[[dict[str, Any]], Any]


def damage_weight(state: dict[str, Any]) -> None:
    state["models"]["Net"]["inner.weight"][0, 0] += 1e-3


def damage_moment(state: dict[str, Any]) -> None:
    state["optimizers"]["AdamW"]["state"][0]["exp_avg"].mul_(2)


def damage_rate(state: dict[str, Any]) -> None:
    state["optimizers"]["AdamW"]["param_groups"][0]["lr"] = 1.0


def damage_nan(state: dict[str, Any]) -> None:
    state["models"]["Net"]["inner.weight"][0, 0] = NAN


def drop_key(state: dict[str, Any]) -> None:
    del state["optimizers"]


def drop_tensor(state: dict[str, Any]) -> None:
    state["models"]["Net"]["inner.wieght"] = state["models"]["Net"].pop("inner.weight")


def drop_group(state: dict[str, Any]) -> None:
    state["optimizers"]["AdamW"]["param_groups"][0]["params"].pop()


def damage_scale(state: dict[str, Any]) -> None:
    state["scale"]["scale"] = 7.0


def other_format(state: dict[str, Any]) -> None:
    state["ampguard"] = 99


def drop_seal(state: dict[str, Any]) -> None:
    del state["seal"]


def drop_groups(state: dict[str, Any]) -> None:
    del state["optimizers"]["AdamW"]["param_groups"]


def drop_found_infs(state: dict[str, Any]) -> None:
    del state["progress"]["found_infs"]


def drop_unscaled(state: dict[str, Any]) -> None:
    del state["progress"]["unscaled"]


def empty_models(state: dict[str, Any]) -> None:
    state["models"] = None


DAMAGES: dict[Damage, str] = {
    drop_groups: "a part of it is missing or of another kind (KeyError: 'param_groups')",
    drop_found_infs: "KeyError: 'found_infs'",
    drop_unscaled: "does not match its seal",
    empty_models: "a part of it is missing or of another kind",
    damage_weight: "does not match its seal",
    damage_moment: "does not match its seal",
    damage_rate: "does not match its seal",
    damage_scale: "does not match its seal",
    damage_nan: "`inner.weight` of the model `Net` holds NaN or Inf",
    drop_key: "it lacks 'optimizers'",
    drop_seal: "it lacks 'seal'",
    drop_tensor: r"`inner.wieght` may be `inner.weight`",
    drop_group: "parameter groups of",
    other_format: "format 99",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(damage: Damage) -> None:
    amp = made("fp16")
    train(amp, range(3))
    state = copy.deepcopy(amp.state_dict())
    train(amp, range(3, 6))
    before = amp.state_dict()["seal"], weights(amp)
    damage(state)
    with pytest.raises(CheckpointError, match="the checkpoint was not loaded") as caught:
        amp.load_state_dict(state)
    assert DAMAGES[damage] in str(caught.value)
    assert same(before[1], weights(amp))
    assert amp.state_dict()["seal"] == before[0]


def test_a_state_of_an_optimizer_that_has_not_stepped_is_whole_too() -> None:
    state = copy.deepcopy(made("fp16").state_dict())
    amp = made("fp16", seed=1)
    before = weights(amp)
    del state["optimizers"]["AdamW"]["state"]
    with pytest.raises(CheckpointError, match="KeyError: 'state'"):
        amp.load_state_dict(state)
    assert same(before, weights(amp))


def test_a_seal_that_saw_no_empty_containers_still_holds() -> None:
    state = copy.deepcopy(made("fp16").state_dict())
    state["seal"] = seal._seal_of(seal.leaves({key: value for key, value in state.items() if key != "seal"}))
    amp = made("fp16", seed=1)
    amp.load_state_dict(state)
    assert same(list(state["models"]["Net"].values()), weights(amp))


def test_a_state_kept_by_reference_is_seen_to_have_changed() -> None:
    amp = made("fp32")
    train(amp, range(2))
    state = amp.state_dict()
    train(amp, range(2, 4))
    with pytest.raises(CheckpointError, match=r"copy it \(copy.deepcopy\)"):
        amp.load_state_dict(state)


@pytest.mark.parametrize("mode", ["fp32", "O2", "bf16"])
def test_another_mode_is_refused(mode: str) -> None:
    amp = made("fp16")
    with pytest.raises(CheckpointError, match=f"made with precision='fp16', this Amp has '{mode}'"):
        made(mode).load_state_dict(amp.state_dict())


def test_another_model_optimizer_or_window_is_refused() -> None:
    state = made("fp16").state_dict()
    small = torch.nn.Linear(8, 1)
    with pytest.raises(CheckpointError, match=r"its models are \['Net'\], this Amp has \['Linear'\]"):
        ampguard.Amp(small, torch.optim.AdamW(small.parameters())).load_state_dict(state)
    wide = Net()
    wide.head = torch.nn.Linear(32, 2)
    with pytest.raises(
        CheckpointError, match=r"`head.weight` of the model `Net` is \(1, 32\) float32, here it is \(2, 32\)"
    ):
        ampguard.Amp(wide, torch.optim.AdamW(wide.parameters())).load_state_dict(state)
    net = Net()
    sgd = {"AdamW": torch.optim.SGD(net.parameters(), lr=0.1)}
    with pytest.raises(CheckpointError, match="`AdamW` is of another kind"):
        ampguard.Amp(net, sgd).load_state_dict(state)
    with pytest.raises(CheckpointError, match="accumulate=1, this Amp has 2"):
        made("fp16", accumulate=2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="is no state of Amp"):
        made("fp16").load_state_dict(net.state_dict())


def test_other_schedulers_are_refused_and_nothing_is_loaded() -> None:
    first = with_followers(0)
    train(first, range(3))
    state = first.state_dict()
    for scheduler, says in (
        (lambda o: StepLR(o, 2), r"its schedulers are \['OneCycleLR'\], this Amp has \['StepLR'\]"),
        (lambda o: [StepLR(o, 2), StepLR(o, 3)], "it holds 1 schedulers, this Amp has 2"),
    ):
        refused_scheduler(state, scheduler, says)
    chained = refused_scheduler(None, lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 2)], [2]))
    longer = lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 2), ConstantLR(o)], [2, 4])  # noqa: E731
    refused_scheduler(chained, longer, r"\['SequentialLR of 2'\], this Amp has \['SequentialLR of 3'\]")
    picky = refused_scheduler(None, lambda o: [StepLR(o, 2), Picky(o, 3)])
    refused_scheduler(picky, lambda o: [StepLR(o, 5), Picky(o, 4)], "a scheduler does not take its state .*of 4 steps")


class Picky(StepLR):
    """Refuses what was saved with another `step_size`, after it has begun to load it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = self.step_size
        super().load_state_dict(state)
        if state["step_size"] != before:
            raise ValueError(f"a decay of {before} steps")


def refused_scheduler(state: dict[str, Any] | None, schedulers: Callable[[Any], Any], says: str = "") -> dict[str, Any]:
    """The state of an Amp with these schedulers, which refuses the given one and stays as it is."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    average = AveragedModel(model)
    amp = ampguard.Amp(model, optimizer, "fp16", schedulers=schedulers(optimizer), ema=average, init_scale=1024.0)
    train(amp, range(1))
    own = copy.deepcopy(amp.state_dict())
    if state is not None:
        with pytest.raises(CheckpointError, match=says):
            amp.load_state_dict(state)
        assert amp.state_dict()["seal"] == own["seal"]
    return own


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    amp = made("fp16")
    with pytest.raises(CheckpointError, match=r"was not written: there is no folder .*none"):
        amp.save(tmp_path / "none" / "run.pt")
    with pytest.raises(CheckpointError, match="was not written: it is a folder"):
        amp.save(tmp_path)
    with pytest.raises(CheckpointError, match="it is no file"):
        amp.load(tmp_path)


def test_a_poisoned_state_is_not_saved(tmp_path: Path) -> None:
    amp = made("fp16")
    train(amp, range(2))
    amp.state_dict()
    with torch.no_grad():
        model_of(amp).inner.weight[0, 0] = NAN
    with pytest.raises(PoisonedStateError, match=r"`models.Net.inner.weight` hold NaN or Inf"):
        amp.save(tmp_path / "bad.pt")
    assert not list(tmp_path.iterdir())


def test_poisoned_statistics_and_moments_are_seen_and_masks_are_not() -> None:
    amp = made("bf16")
    train(amp, range(2))
    assert not model_of(amp).mask.isfinite().all()
    model_of(amp)(torch.full((4, 8), NAN))
    with pytest.raises(PoisonedStateError, match=r"statistics\.running_mean"):
        amp.state_dict()
    amp = made("bf16")
    train(amp, range(2))
    amp.optimizers["AdamW"].state_dict()["state"][1]["exp_avg"][0] = torch.inf
    with pytest.raises(PoisonedStateError, match=r"optimizers\.AdamW\.state\.1\.exp_avg"):
        amp.state_dict()


@pytest.mark.parametrize("saved_by", ["plain", "compiled", "an earlier version"])
def test_a_compiled_model_and_a_plain_one_load_each_others(saved_by: str) -> None:
    def made_of_two(is_compiled: bool, names: tuple[str, ...] = ()) -> ampguard.Amp:
        first, second = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
        models = [torch.compile(first, backend="eager") if is_compiled else first, second]
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
        return ampguard.Amp(dict(zip(names, models, strict=True)) if names else models, optimizer, "bf16")

    old_names = ("OptimizedModule", "Linear") if saved_by == "an earlier version" else ()
    saved = made_of_two(saved_by != "plain", old_names)
    amp = made_of_two(saved_by == "plain")
    assert list(amp.models) == ["Linear 0", "Linear 1"]
    amp.load_state_dict(saved.state_dict())
    for mine, other in zip(amp.models.values(), saved.models.values(), strict=True):
        assert same(list(mine.parameters()), list(other.parameters()))
