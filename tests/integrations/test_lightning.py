"""The precision plugin in the real Trainer, with Lightning's own plugin as control, under both package names."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_loops import furthest
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of many kinds
lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("pytorch_lightning")

from lightning_modules import (  # noqa: E402
    PACKAGES,
    classifier,
    fit,
    line_of,
    norm,
    one_backward,
    own_plugin,
    several,
)

from ampguard.errors import NonfiniteError, ProtocolError  # noqa: E402
from ampguard.integrations.lightning import GuardedPrecision  # noqa: E402

PL = PACKAGES[0]
guarded = functools.partial(GuardedPrecision, "16-mixed", "cpu")
each_package = pytest.mark.parametrize("package", PACKAGES)


def norms(package: str, plugin: Any, **words: Any) -> Any:
    module = several(package, **words)
    fit(package, module, plugin, batches=4)
    return module


@each_package
def test_of_three_optimizers_one_overflows(package: str) -> None:
    true = norms(package, None)
    theirs = norms(package, own_plugin(package), burst=((1, 0),))
    ours = norms(package, guarded(), burst=((1, 0),))
    assert theirs.norms[1][1:] == pytest.approx([2 * n for n in true.norms[1][1:]], rel=2e-3)
    for number in range(4):
        assert ours.norms[number][1:] == pytest.approx(true.norms[number][1:], rel=2e-3)
    assert ours.scales == [65536.0, 32768.0, 32768.0, 32768.0]


def test_whichever_overflows_the_others_are_right() -> None:
    true = norms(PL, None)
    for bad in range(3):
        ours = norms(PL, guarded(), burst=((2, bad),))
        others = [i for i in range(3) if i != bad]
        assert [ours.norms[2][i] for i in others] == pytest.approx([true.norms[2][i] for i in others], rel=2e-3)
        assert ours.scales == [65536.0, 65536.0, 32768.0, 32768.0]


def all_burst(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    one_backward(module, optimizers, [loss * 1e36 for loss in losses] if number == 1 else losses, number)


def test_the_scale_is_updated_once_an_iteration() -> None:
    assert norms(PL, own_plugin(PL), step=all_burst).scales == [65536.0, 8192.0, 8192.0, 8192.0]
    assert norms(PL, guarded(), step=all_burst).scales == [65536.0, 32768.0, 32768.0, 32768.0]


def test_it_grows_once_an_iteration_too() -> None:
    assert norms(PL, guarded(growth_interval=2)).scales == [65536.0, 131072.0, 131072.0, 262144.0]


WAYS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.5},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


@pytest.mark.parametrize("words", WAYS, ids=str)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_one_optimizer_learns_as_with_lightnings_own(precision: str, words: dict[str, Any]) -> None:
    theirs, ours = classifier(PL), classifier(PL)
    bad = (4,) if precision == "16-mixed" and not words else ()
    fit(PL, theirs, own_plugin(PL, precision), batches=9, bad=bad, **words)
    fit(PL, ours, GuardedPrecision(precision, "cpu"), batches=9, bad=bad, **words)
    assert furthest(theirs, ours) < 1e-6


@each_package
def test_it_is_a_plugin_of_the_package(package: str) -> None:
    ours = classifier(package)
    trainer = fit(package, ours, guarded(), gradient_clip_val=1e-9)
    assert trainer.precision == "16-mixed"
    assert furthest(ours, classifier(package)) < 0.02  # AdamW: eight steps of 1e-3 at the most
    assert 0 < norm(ours) < 2e-9  # clipping has come through, by this package's own hooks


def test_float16_is_real_on_the_cpu() -> None:
    seen: list[torch.dtype] = []
    module = classifier(PL)
    module.net[0].register_forward_hook(lambda *hooked: seen.append(hooked[2].dtype))
    fit(PL, module, guarded(), batches=1)
    assert seen == [torch.float16]


def test_a_bad_step_changes_nothing_in_bfloat16_either() -> None:
    for plugin, is_poisoned in ((own_plugin(PL, "bf16-mixed"), True), (GuardedPrecision("bf16-mixed", "cpu"), False)):
        module = several(PL, step=nan_losses, lr=0.1)
        fit(PL, module, plugin, batches=3)
        assert any(bool(p.isnan().any()) for p in module.parameters()) is is_poisoned


def nan_losses(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    one_backward(module, optimizers, [losses[0] * float("nan"), *losses[1:]] if number == 1 else losses, number)


def clip_by_hand(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(torch.stack(losses).sum())
    for optimizer in optimizers:
        module.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


def test_manual_clipping_clips_true_gradients() -> None:
    theirs, ours = norms(PL, own_plugin(PL), step=clip_by_hand), norms(PL, guarded(), step=clip_by_hand)
    assert theirs.norms[0] == pytest.approx([0.05 / 65536] * 3, rel=1e-3)  # clipped while scaled, then divided
    assert ours.norms[0] == pytest.approx([0.05] * 3, rel=1e-3)


def clip_past_the_plugin(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(torch.stack(losses).sum())
    for optimizer in optimizers:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
        optimizer.step()


@pytest.mark.parametrize(("step", "count"), [(clip_past_the_plugin, 3), (clip_by_hand, 0)])
def test_clipping_scaled_gradients_is_told_once(step: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ampguard"):
        norms(PL, guarded(), step=step)
    told = [message for message in caplog.messages if "call self.clip_gradients" in message]
    assert len(told) == len([m for m in caplog.messages if "changed" in m]) == count  # of each optimizer


def test_a_fused_optimizer_is_clipped() -> None:
    def fused(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, 1e-3, fused=True)

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(PL, classifier(PL, optimizer=fused), own_plugin(PL), gradient_clip_val=0.5)
    plain, quick = classifier(PL), classifier(PL, optimizer=fused)
    fit(PL, plain, guarded(), gradient_clip_val=0.5)
    fit(PL, quick, guarded(), gradient_clip_val=0.5)
    assert furthest(plain, quick) < 1e-6


# --- loss.backward() in the place of manual_backward ------------------------------------------------------------------


def raw(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    torch.stack(losses).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def raw_second(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad()
        if loss is losses[0]:
            module.manual_backward(loss)
        else:
            loss.backward()
        optimizer.step()


def past_the_plugin(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    module.manual_backward(torch.stack(losses).sum())
    for optimizer in module.optimizers(use_pl_optimizer=False):
        optimizer.step()


def test_a_step_past_the_plugin_is_refused() -> None:
    """On gradients that are still scaled."""
    with pytest.raises(ProtocolError, match=r"times too large(?s:.*)optimizer that self\.optimizers\(\) gives") as told:
        norms(PL, guarded(), step=past_the_plugin)
    assert told.value.cause == "bypassed-scaler"


@pytest.mark.parametrize("step", [raw, raw_second])
def test_backward_in_place_of_manual_backward_is_told_with_its_line(step: Any) -> None:
    with pytest.raises(ProtocolError) as told:
        norms(PL, guarded(), step=step)
    assert told.value.cause == "unscaled-backward"
    backward = line_of(step, ").backward()" if step is raw else "loss.backward()")
    assert f"loss.backward() at test_lightning.py:{backward}:" in str(told.value)
    assert f"  at   test_lightning.py:{line_of(step, 'optimizer.step()')}" in str(told.value)
    assert "call self.manual_backward(loss) instead of loss.backward()" in str(told.value)
    assert "lightning/" not in str(told.value)


def assigned(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    weights = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for p, gradient in zip(weights, torch.autograd.grad(torch.stack(losses).sum(), weights), strict=True):
        p.grad = gradient
    for optimizer in optimizers:
        optimizer.step()


def test_assigned_gradients_are_not_put_down_to_a_backward_call() -> None:
    with pytest.raises(ProtocolError) as told:
        norms(PL, guarded(), step=assigned)
    assert told.value.cause == "unscaled-backward"
    assert "loss.backward()" not in str(told.value)
    assert "multiply by the loss scale what is written to .grad by hand" in str(told.value)


def sharpness_aware(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    torch.stack(losses).sum().backward(retain_graph=True)  # its gradients are thrown away
    one_backward(module, optimizers, losses, number)


def scaled_by_hand(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.trainer.scaler.scale(torch.stack(losses).sum()).backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("step", [sharpness_aware, scaled_by_hand])
def test_backward_that_does_no_harm_is_let_be(step: Any) -> None:
    assert norms(PL, guarded(), step=step).norms[3] == pytest.approx(norms(PL, None).norms[3], rel=2e-3)


def test_without_a_loss_scale_it_is_harmless() -> None:
    norms(PL, GuardedPrecision("bf16-mixed", "cpu"), step=raw)


def test_no_gradient_at_all() -> None:
    def forgetful(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
        module.manual_backward(losses[0])
        optimizers[1].step()

    with pytest.raises(ProtocolError, match="none of its 2 parameters has a gradient") as told:
        norms(PL, guarded(), step=forgetful)
    assert f"test_lightning.py:{line_of(forgetful, '.step()')}" in str(told.value)


# --- other orders of calls --------------------------------------------------------------------------------------------


def one_after_the_other(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad()
        module.manual_backward(loss)
        optimizer.step()


def toggled(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for i, optimizer in enumerate(optimizers):
        module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        module.manual_backward(losses[i] + 0 * losses[i - 1].detach())
        optimizer.step()
        module.untoggle_optimizer(optimizer)


def with_closures(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer, loss in zip(optimizers, losses, strict=True):

        def closure(optimizer: Any = optimizer, loss: Tensor = loss) -> None:
            optimizer.zero_grad()
            module.manual_backward(loss)

        optimizer.step(closure=closure)


def first_only_sometimes(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    chosen = range(3) if number % 2 else range(1, 3)
    one_after_the_other(module, [optimizers[i] for i in chosen], [losses[i] for i in chosen], number)


def first_twice(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    optimizers[0].zero_grad()
    module.manual_backward(losses[0] * 1, retain_graph=True)
    optimizers[0].step()
    one_after_the_other(module, optimizers, losses, number)


ORDERS = [one_after_the_other, toggled, with_closures, first_only_sometimes, first_twice]


@pytest.mark.parametrize("step", ORDERS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_any_order(step: Any, bad: int) -> None:
    true = norms(PL, None, step=step)
    ours = norms(PL, guarded(), step=step, burst=((1, bad),))
    for number in range(4):
        for i in range(3):
            is_left_over = step is first_only_sometimes and i == 0 and number % 2 == 0
            if (number, i) != (1, bad) and not is_left_over:
                assert ours.norms[number][i] == pytest.approx(true.norms[number][i], rel=2e-3), (number, i)
    assert ours.scales[-1] == 32768.0 if step is not first_twice or bad else 16384.0


def accumulated(module: Any, optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    """The first optimizer steps in every batch, the others in every second: their gradients wait for it."""
    module.manual_backward(torch.stack(losses).sum() / 2)
    for i, optimizer in enumerate(optimizers):
        if i == 0 or number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False) if i != 0 or number % 2 == 0 else optimizer.zero_grad()


def test_gradients_that_wait_follow_the_scale() -> None:
    def weights_of(plugin: Any, burst: Any) -> list[Tensor]:
        module = several(PL, step=accumulated, lr=0.1, burst=burst)
        fit(PL, module, plugin, batches=6)
        return [p.detach() for part in list(module.parts)[1:] for p in part.parameters()]

    true, ours = weights_of(None, ()), weights_of(guarded(), ((0, 0), (2, 0)))
    assert max(float((a - b).abs().max()) for a, b in zip(true, ours, strict=True)) < 1e-4


# --- state ------------------------------------------------------------------------------------------------------------


@each_package
@pytest.mark.parametrize("direction", ["theirs to ours", "ours to theirs", "ours to ours"])
def test_checkpoints_are_exchanged(package: str, direction: str, tmp_path: Any) -> None:
    def plugin(name: str) -> Any:
        return guarded() if name == "ours" else own_plugin(package)

    first, second = direction.split(" to ")
    trainer = fit(package, classifier(package), plugin(first), bad=(3,))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["MixedPrecision"] == {
        "scale": 32768.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 4,
    }
    resumed = fit(package, classifier(package), plugin(second), max_epochs=2, ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.scaler.get_scale() == 32768.0
    assert resumed.scaler.state_dict()["_growth_tracker"] == 12


def test_a_scaler_of_ones_own_says_how_to_begin() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_factor=4.0, growth_interval=2)
    plugin = GuardedPrecision("16-mixed", "cpu", scaler)
    fit(PL, classifier(PL), plugin, batches=4)
    assert plugin.scaler.get_scale() == 128.0 * 16


def test_a_scaler_that_is_switched_off_stays_off() -> None:
    plugin = GuardedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    scales = []
    module = classifier(PL)
    module.on_after_backward = lambda: scales.append(plugin.scaler.get_scale())
    fit(PL, module, plugin, batches=2)
    assert scales == [1.0, 1.0]
    assert not plugin.scaler.is_enabled()
    assert not plugin.engine.result.skipped


def test_copies_and_pickles() -> None:
    plugin = guarded(init_scale=512.0)
    for again in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert isinstance(again, GuardedPrecision)
        assert isinstance(again, lightning.plugins.MixedPrecision)
        assert again.state_dict() == plugin.state_dict()


def test_models_are_copied_and_saved_as_ever(tmp_path: Path) -> None:
    module = classifier(PL)
    fit(PL, module, guarded(), batches=2)
    assert furthest(module.net, copy.deepcopy(module.net)) == 0.0
    torch.save(module.net, tmp_path / "net.pt")
    again = torch.load(tmp_path / "net.pt", weights_only=False)
    again(torch.ones(1, 1, 8, 8)).sum().backward()
    assert furthest(module.net, again) == 0.0


def test_one_plugin_for_two_trainings() -> None:
    plugin = guarded(init_scale=2.0**10, growth_interval=8)
    fit(PL, classifier(PL), plugin, batches=4)
    fit(PL, several(PL), plugin, batches=4)
    assert plugin.scaler.get_scale() == 2.0**11


def test_a_run_in_which_no_step_succeeds_ends() -> None:
    with pytest.raises(NonfiniteError, match="3 steps in a row were skipped"):
        fit(PL, classifier(PL), guarded(patience=3), batches=9, bad=tuple(range(9)))


def test_words_of_the_optimizers_own_step() -> None:
    seen: list[dict[str, Any]] = []

    class Talkative(torch.optim.SGD):
        def step(self, closure: Any = None, **words: Any) -> Any:
            seen.append(words)
            return super().step(closure)

    module = classifier(PL, optimizer=lambda p: Talkative(p, 0.1))
    original = type(module).optimizer_step

    def with_words(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure, word=batch_idx)

    module.__class__.optimizer_step = with_words
    assert original is not with_words
    fit(PL, module, guarded(), batches=2)
    assert seen == [{"word": 0}, {"word": 1}]


def test_a_training_step_may_return_nothing() -> None:
    module = classifier(PL)
    step = module.training_step
    module.training_step = lambda batch, batch_idx: None if batch_idx == 1 else step(batch, batch_idx)
    fit(PL, module, guarded(), batches=3)


def test_lbfgs_is_lightnings_own_in_bfloat16_and_refused_in_float16() -> None:
    module = classifier(PL, optimizer=lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2))
    with pytest.raises(Exception, match="LBFGS"):
        fit(PL, module, guarded(), batches=1)
    fit(PL, module, GuardedPrecision("bf16-mixed", "cpu"), batches=1)
