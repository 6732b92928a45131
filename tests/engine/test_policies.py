from __future__ import annotations

import copy
import logging
import math
from pathlib import Path

import pytest
import torch
from engine_loops import MODES, batch, loss_of, made, model_of, same, train, weights

import ampguard
from ampguard.engine.policies import Rollback
from ampguard.errors import CheckpointError, NonfiniteError, SetupError

NAN = float("nan")


@pytest.mark.parametrize("mode", MODES)
def test_skip_leaves_the_weights_alone_and_says_so(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    amp = made(mode)
    train(amp, range(3))
    parameters = [p.detach().clone() for p in model_of(amp).parameters()]
    steps, scale = amp.steps, amp.get_scale()
    caplog.clear()
    train(amp, range(3, 4), spoil={3: NAN})
    assert same(parameters, list(model_of(amp).parameters()))
    assert amp.steps == steps
    assert amp.get_scale() == (scale / 2 if amp.mode.scales_loss else 1.0)
    assert f"step {amp.verdicts.attempts - 1} of `AdamW`: the loss is not finite" in caplog.text
    assert "skipped (1 in a row" in caplog.text


@pytest.mark.parametrize("mode", ["fp16", "O2"])
def test_an_inf_that_a_clamp_hides_is_skipped_all_the_same(mode: str) -> None:
    amp = made(mode)
    train(amp, range(3))
    parameters = [p.detach().clone() for p in model_of(amp).parameters()]
    amp.backward(loss_of(amp, 3))
    next(p for p in model_of(amp).parameters() if p.grad is not None).grad.view(-1)[0] = math.inf
    amp.unscale_()
    torch.nn.utils.clip_grad_value_(list(model_of(amp).parameters()), 0.5)
    assert amp.step().skipped
    assert same(parameters, list(model_of(amp).parameters()))
    amp.backward(loss_of(amp, 4))  # and what was found then is not held against the next step
    amp.unscale_()
    assert not amp.step().skipped


def test_a_settling_scale_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    amp = made("fp16", init_scale=2.0**24)
    with caplog.at_level(logging.INFO, "ampguard"):
        train(amp, range(15))
    assert 0 < amp.steps < 15
    assert "the loss scale is halved" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("policy", ["skip", "raise", "rollback"])
@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16-true"])
def test_no_policy_goes_on_for_ever(mode: str, policy: str) -> None:
    amp = made(mode, on_nonfinite=policy, patience=4)
    train(amp, range(3))
    with pytest.raises(NonfiniteError) as caught:
        train(amp, range(3, 30), spoil=dict.fromkeys(range(3, 30), NAN))
    if policy != "raise":
        assert str(caught.value).startswith("4 steps in a row were skipped.")
    assert "ampguard run" in str(caught.value)
    assert "inner.weight" in caught.value.parameters
    assert all(p.isfinite().all() for p in model_of(amp).parameters())


@pytest.mark.parametrize("bad", [("one",), ("one", "two")])
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_so_many_in_a_row_are_steps_of_one_optimizer(mode: str, bad: tuple[str, ...]) -> None:
    """One optimizer's good steps do not hide that the other never steps; two that are bad do not count twice."""
    nets = {name: torch.nn.Linear(4, 1) for name in ("one", "two")}
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}
    amp = ampguard.Amp(nets, optimizers, precision=mode, patience=4)

    def step() -> None:
        for name, net in nets.items():
            with amp.autocast():
                loss = net(torch.ones(2, 4)).mean() * (NAN if name in bad else 1.0)
            amp.backward(loss, optimizers=name)
            amp.step(name)

    for _ in range(3):
        step()
    with pytest.raises(NonfiniteError, match="4 steps in a row"):
        step()
    assert amp.verdicts.in_a_row == 4


def test_a_row_goes_on_after_a_resume() -> None:
    def begun() -> ampguard.Amp:
        net = torch.nn.Linear(4, 1)
        return ampguard.Amp(net, torch.optim.SGD(net.parameters(), 0.1), precision="fp32", patience=4)

    def step(amp: ampguard.Amp) -> None:
        amp.backward(model_of(amp)(torch.ones(2, 4)).mean() * NAN)
        amp.step()

    first, resumed = begun(), begun()
    step(first), step(first)
    resumed.load_state_dict(first.state_dict())
    assert resumed.verdicts.in_a_row == 2
    step(resumed)
    with pytest.raises(NonfiniteError, match="4 steps in a row"):
        step(resumed)


def test_raise_ends_the_run_at_once_but_lets_a_scale_settle() -> None:
    amp = made("fp16", on_nonfinite="raise", init_scale=2.0**24)
    train(amp, range(15))
    assert amp.steps < 15
    with pytest.raises(NonfiniteError, match="the loss is not finite"):
        train(amp, range(15, 16), spoil={15: NAN})
    amp = made("bf16", on_nonfinite="raise")
    amp.backward(next(iter(model_of(amp).parameters())).sum().sqrt() * float("inf"))
    with pytest.raises(NonfiniteError):
        amp.step()


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "fp16", "O2", "bf16-true"])
def test_rollback_goes_back_to_the_last_good_state(mode: str, on_disk: bool, tmp_path: Path) -> None:
    policy = Rollback(every=2, folder=tmp_path / "snapshots" if on_disk else None)
    amp = made(mode, on_nonfinite=policy)
    train(amp, range(5))
    good = weights(amp)
    optimizer_steps = amp.optimizers["AdamW"].state_dict()["state"][0]["step"].item()
    train(amp, range(5, 6), spoil={5: NAN})
    statistics = model_of(amp).statistics.running_mean
    assert policy.rollbacks == 1
    assert statistics.isfinite().all()
    assert amp.steps in (4, 5)
    now = amp.optimizers["AdamW"].state_dict()["state"][0]["step"].item()
    assert now in (optimizer_steps, optimizer_steps - 1)
    if amp.steps == 5:
        assert same(good, weights(amp))
    amp.state_dict()
    train(amp, range(6, 12))
    assert amp.steps >= 10
    assert (tmp_path / "snapshots" / "last-good.pt").exists() is on_disk


def test_rollback_from_the_very_first_step() -> None:
    amp = made("bf16", on_nonfinite="rollback")
    train(amp, range(1), spoil={0: NAN})
    assert model_of(amp).statistics.running_mean.isfinite().all()
    train(amp, range(1, 4))
    assert amp.steps == 3


@pytest.mark.parametrize("on_disk", [False, True])
def test_rollback_goes_no_further_back_than_to_what_was_loaded(on_disk: bool, tmp_path: Path) -> None:
    first = made("fp16")
    train(first, range(5))
    second = made("fp16", seed=5, on_nonfinite=Rollback(folder=tmp_path if on_disk else None))
    train(second, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, range(5, 6), spoil={5: NAN})
    assert second.steps == first.steps == 5
    assert same(weights(first), weights(second))


def test_the_random_streams_are_not_set_back() -> None:
    amp = made("bf16", on_nonfinite=Rollback(every=1))
    train(amp, range(2))
    before = torch.get_rng_state()
    train(amp, range(2, 3), spoil={2: NAN})
    assert not torch.equal(before, torch.get_rng_state())


def test_nonfinite_parameters_are_named() -> None:
    amp = made("fp32", max_grad_norm=math.inf)
    train(amp, range(1))
    loss = model_of(amp).head.weight.sum() + (model_of(amp).inner.bias * torch.inf).sum()
    amp.backward(loss)
    result = amp.step()
    assert result.skipped
    assert not result.stepped
    assert result.nonfinite == ("inner.bias",)
    assert repr(result) == "StepResult(skipped=True, grad_norm=inf, loss_scale=1)"


def test_parameters_of_o2_are_named_as_the_model_does() -> None:
    amp = made("O2", name_nonfinite=True)
    train(amp, range(1), spoil={0: NAN})
    model = model_of(amp)
    amp.backward((model.inner.bias.float() * torch.inf).sum())
    assert amp.step().nonfinite == ("inner.bias",)


def test_unknown_policies_and_numbers() -> None:
    with pytest.raises(SetupError, match="unknown on_nonfinite='ignore'"):
        made(on_nonfinite="ignore")
    with pytest.raises(SetupError, match="patience=-1"):
        made(patience=-1)
    with pytest.raises(SetupError, match="at least 1"):
        Rollback(every=0)


def test_a_policy_of_ones_own() -> None:
    seen = []

    class Note(ampguard.engine.policies.Policy):
        def on_bad_step(self, amp: ampguard.Amp, bad: ampguard.engine.policies.BadStep) -> None:
            seen.append((bad.step, bad.loss_is_finite, bad.loss_scale))

    amp = made("fp32", on_nonfinite=Note())
    train(amp, range(4), spoil={2: NAN})
    assert seen == [(2, False, 1.0)]


def test_a_damaged_snapshot_on_disk_is_said(tmp_path: Path) -> None:
    amp = made("bf16", on_nonfinite=Rollback(every=1, folder=tmp_path))
    train(amp, range(3))
    (tmp_path / "last-good.pt").write_bytes(b"cut off")
    before = [p.detach().clone() for p in model_of(amp).parameters()]
    with pytest.raises(CheckpointError, match=r"last-good\.pt' is truncated"):
        train(amp, range(3, 4), spoil={3: NAN})
    assert same(before, list(model_of(amp).parameters()))


def test_statistics_that_nobody_could_put_back_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    amp = made("fp32")
    for number in range(5):
        x, y = batch(number)
        if number in (2, 3):
            x[0, 0] = NAN
        amp.backward(torch.nn.functional.mse_loss(model_of(amp)(x), y))  # outside amp.autocast(): nothing was kept
        amp.step()
    said = [record.getMessage() for record in caplog.records if "every evaluation will use" in record.getMessage()]
    assert len(said) == 1
    assert "`statistics.running_mean`, `statistics.running_var`" in said[0]
    assert "mask" not in said[0]
    caplog.clear()
    amp = made("bf16", on_nonfinite="rollback")
    train(amp, range(5), spoil={2: NAN})
    assert "every evaluation" not in caplog.text
    assert amp.poisoned_buffers() == []


@pytest.mark.parametrize("mode", ["fp16", "fp32"])
def test_the_advice_is_about_this_step_and_this_precision(mode: str) -> None:
    amp = made(mode, on_nonfinite="raise")
    with pytest.raises(NonfiniteError) as caught:
        train(amp, range(1), spoil={0: NAN})
    assert "the batch or the weights hold NaN or Inf, or an operation of the forward pass" in str(caught.value)
    assert "skipping" not in str(caught.value)
    assert ("precision='bf16'" in str(caught.value)) is (mode == "fp16")


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_a_batch_that_is_rolled_back_is_left_out_by_all_optimizers(mode: str) -> None:
    """The second is still to step when the first goes back: its gradients are gone, and so is the batch."""
    torch.manual_seed(0)
    body, head = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
    optimizers = {"body": torch.optim.SGD(body.parameters(), 0.1), "head": torch.optim.SGD(head.parameters(), 0.1)}
    amp = ampguard.Amp([body, head], optimizers, mode, on_nonfinite=Rollback(every=1), init_scale=64.0)
    skipped = []
    for number in range(4):
        x = torch.full((4, 8), NAN if number == 2 else 1.0)
        before = head.weight.detach().clone()
        with amp.autocast():
            loss = head(body(x)).float().square().mean()
        amp.backward(loss)
        skipped += [amp.step("body").skipped, amp.step("head").skipped]
        assert torch.equal(before, head.weight) is (number == 2)
    assert skipped == [False] * 4 + [True] * 2 + [False] * 2


def _of_two(mode: str, on_nonfinite: str | Rollback, **options: object) -> tuple[ampguard.Amp, list[torch.nn.Module]]:
    torch.manual_seed(0)
    nets = [torch.nn.Linear(6, 3), torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))]
    optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in zip("ab", nets, strict=True)}
    return ampguard.Amp(nets, optimizers, mode, on_nonfinite=on_nonfinite, init_scale=256.0, **options), nets


def _losses_of_two(amp: ampguard.Amp, nets: list[torch.nn.Module], bad: str) -> list[torch.Tensor]:
    with amp.autocast():
        return [
            net(torch.randn(4, 6)).float().square().mean() * (NAN if name == bad else 1.0)
            for name, net in zip("ab", nets, strict=True)
        ]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("bad", "first", "second"), [("b", "a", "b"), ("a", "b", "a")])
@pytest.mark.parametrize(("mode", "window"), [("fp16", 1), ("fp16", 2), ("O2", 2), ("O3", 2)])
def test_a_bad_loss_is_known_to_the_optimizer_that_it_has_reached(
    mode: str, window: int, bad: str, first: str, second: str, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever has stepped since the backward passes: it is no loss scale that settles."""

    def iteration(bad: str) -> list[ampguard.StepResult]:
        losses = _losses_of_two(amp, nets, bad)
        if at_once:
            amp.backward(losses)
        else:
            for name, loss in zip("ab", losses, strict=True):
                amp.backward(loss, name)
        return [amp.step(first), amp.step(second)]

    amp, nets = _of_two(mode, "skip", accumulate=window)
    for micro_step in range(window):
        results = iteration(bad if not micro_step else "")
    assert [result.skipped for result in results] == [False, True]
    assert f"`{bad}`: the loss is not finite" in caplog.text
    amp, nets = _of_two(mode, "raise", accumulate=window)
    if window > 1:
        iteration(bad)
    with pytest.raises(NonfiniteError, match=f"`{bad}`: the loss is not finite"):
        iteration(bad if window == 1 else "")


def test_a_bad_loss_is_forgotten_with_its_gradients() -> None:
    """The next bad step of the optimizer may be no more than a loss scale that settles."""
    amp, nets = _of_two("fp16", "raise")
    losses = _losses_of_two(amp, nets, "b")
    amp.backward(losses[0], "a")
    amp.backward(losses[1], "b")
    amp.step("a")
    amp.optimizers["b"].zero_grad()
    losses = _losses_of_two(amp, nets, "")
    amp.backward(losses[1], "b")
    nets[1][0].weight.grad[0, 0] = torch.inf
    assert amp.step("b").skipped


def test_a_bad_loss_whose_gradients_the_loop_carries_on() -> None:
    body, head = torch.nn.Linear(6, 4), torch.nn.Linear(4, 1)
    optimizers = {"body": torch.optim.SGD(body.parameters(), 0.1), "head": torch.optim.SGD(head.parameters(), 0.1)}
    amp = ampguard.Amp([body, head], optimizers, "fp16", on_nonfinite="raise", init_scale=256.0)
    with amp.autocast():
        features = body(torch.ones(2, 6))
        cut = features.detach().requires_grad_()
        loss = head(cut).float().mean() * NAN
    amp.backward(loss)
    features.backward(cut.grad)
    with pytest.raises(NonfiniteError, match="`body`: the loss is not finite"):
        amp.step("body")


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "fp16", "O2", "bf16-true"])
def test_a_loss_that_was_computed_before_a_rollback_is_left_out(mode: str, later: bool) -> None:
    """It is differentiated afterwards; with `later` something is computed from it first."""
    amp, nets = _of_two(mode, Rollback(every=1))
    skipped = []
    for number in range(4):
        loss_a, loss_b = _losses_of_two(amp, nets, "a" if number == 1 else "")
        amp.backward(loss_a, "a")
        skipped.append(amp.step("a").skipped)
        before = weights(amp)
        amp.backward(loss_b * 0.5 if later else loss_b, "b")
        skipped.append(amp.step("b").skipped)
        assert same(before, weights(amp)) is (number == 1)
    assert skipped == [False, False, True, True, False, False, False, False]


def test_the_second_loss_of_a_gan_whose_first_was_rolled_back() -> None:
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    critic = torch.nn.Linear(4, 1)
    optimizers = {"g": torch.optim.SGD(generator.parameters(), 0.1), "c": torch.optim.SGD(critic.parameters(), 0.1)}
    amp = ampguard.Amp([generator, critic], optimizers, "fp32", on_nonfinite=Rollback(every=1))
    for number in range(4):
        before = generator[0].weight.detach().clone()
        with amp.autocast():
            fake = generator(torch.randn(4, 4))
            loss_c = critic(fake.detach()).mean() * (NAN if number == 1 else 1.0)
        amp.backward(loss_c, "c")
        amp.step("c")
        with amp.autocast():
            loss_g = -critic(fake).mean()
        amp.backward(loss_g, "g")
        assert amp.step("g").skipped is (number == 1)
        assert torch.equal(before, generator[0].weight) is (number == 1)


def test_an_error_of_the_loops_own_is_no_batch_that_was_left_out() -> None:
    amp, nets = _of_two("fp32", Rollback(every=1))
    loss_a, _ = _losses_of_two(amp, nets, "a")
    amp.backward(loss_a, "a")
    assert amp.step("a").skipped
    hidden = nets[0](torch.randn(4, 6)).sigmoid()
    hidden.data.add_(1), hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        amp.backward(hidden.mean(), "a")


def test_a_snapshot_amid_an_iteration_brings_no_gradients_back() -> None:
    """When it is taken, the other optimizer is still to step: on gradients that turn out to be bad."""
    amp, nets = _of_two("fp16", Rollback(every=1))
    skipped = []
    for number in range(4):
        losses = _losses_of_two(amp, nets, "a" if number == 1 else "")
        amp.backward(losses)
        skipped += [amp.step("b").skipped, amp.step("a").skipped]
    assert skipped == [False, False, False, True, False, False, False, False]


def test_a_rollback_counts_steps_as_its_bad_step_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    amp = made("bf16", on_nonfinite=Rollback(every=2))
    train(amp, range(6), spoil={1: NAN, 4: NAN})
    told = [record.getMessage() for record in caplog.records if "back to" in record.getMessage()]
    assert [text.partition(" of ")[0] for text in told] == ["step 1", "step 4"]
    assert "back to the state before step 0," in told[0]
    assert "back to the state before step 4," in told[1]
    for wrong in (1.5, True, math.inf):
        with pytest.raises(SetupError, match="a whole number of at least 1"):
            Rollback(every=wrong)
