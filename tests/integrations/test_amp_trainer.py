"""detectron2's and FastReID's trainer: both signatures, hooks, errors, flat buffers, checkpoints, precision by config."""

from __future__ import annotations

import copy
import io
import logging
import types
from typing import Any

import pytest
import torch
from contiguous_params import ContiguousParams
from digits_loops import accuracy, batches, furthest, network, weights
from torch import Tensor, nn

import ampguard
from ampguard.errors import ProtocolError, SetupError
from ampguard.integrations.d2 import AMPTrainer
from ampguard.integrations.training_loop import SimpleTrainer


class Detector(nn.Module):
    """Takes a batch, returns a dictionary of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.dtypes: list[torch.dtype] = []

    def forward(self, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        scores = self.body(data[0])
        self.dtypes.append(scores.dtype)
        return {
            "loss_cls": nn.functional.cross_entropy(scores, data[1]),
            "loss_size": 1e-3 * scores.float().pow(2).mean(),
        }


class Watching:
    """A hook that notes when it is called."""

    trainer: Any

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_train(self) -> None:
        self.calls.append("before_train")

    def before_step(self) -> None:
        self.calls.append(f"before {self.trainer.iter}")

    def after_backward(self) -> None:
        assert self.trainer.model.body[-1].weight.grad is not None
        self.calls.append(f"backward {self.trainer.grad_scaler.get_scale():g}")

    def after_step(self) -> None:
        self.calls.append(f"after {self.trainer.storage.latest()['total_loss'] > 0}")

    def after_train(self) -> None:
        self.calls.append("after_train")


def trained(count: int, *args: Any, bad: tuple[int, ...] = (), lr: float = 3e-3, **words: Any) -> AMPTrainer:
    model = Detector()
    trainer = AMPTrainer(model, list(batches(count, bad)), torch.optim.AdamW(model.parameters(), lr), *args, **words)
    trainer.train(0, count)
    return trainer


def over_flat(zero_grad: bool = False, **words: Any) -> tuple[AMPTrainer, list[Tensor]]:
    model = Detector()
    wrapper = ContiguousParams(model)
    optimizer = torch.optim.AdamW(wrapper.contiguous(), 3e-3)
    before = weights(model)
    trainer = AMPTrainer(model, list(batches(60)), optimizer, wrapper, **words)
    if zero_grad:
        trainer.register_hooks([types.SimpleNamespace(before_step=optimizer.zero_grad)])
    trainer.train(0, 60)
    return trainer, before


def test_hooks_are_called_in_their_order() -> None:
    model, hook = Detector(), Watching()
    trainer = AMPTrainer(model, list(batches(2)), torch.optim.SGD(model.parameters(), 0.1), 1)
    trainer.register_hooks([hook, None])
    trainer.train(0, 2)
    step = ["backward 65536", "after True"]
    assert hook.calls == ["before_train", "before 0", *step, "before 1", *step, "after_train"]
    assert trainer.iter == 2
    assert isinstance(trainer, SimpleTrainer)


def test_it_learns_as_a_loop_by_hand_does() -> None:
    trainer = trained(10)
    model = Detector()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 3e-3), torch.amp.GradScaler("cpu")
    for batch in batches(10):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = sum(model(batch).values())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert furthest(trainer.model, model) < 1e-6
    assert set(trainer.model.dtypes) == {torch.float16}


@pytest.mark.parametrize("zero_grad", [False, True])
def test_flat_buffers_learn(zero_grad: bool) -> None:
    trainer, before = over_flat(zero_grad)
    assert accuracy(trainer.model.body) > 0.85
    assert all(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert furthest(trainer.model, trained(60).model) < 1e-5  # as without flat buffers


def test_pytorch_alone_fails_on_them() -> None:
    """What the trainer is there for: FastReID's own step, on the same buffers."""
    model = Detector()
    optimizer = torch.optim.AdamW(ContiguousParams(model).contiguous(), 3e-3)
    scaler, before = torch.amp.GradScaler("cpu"), weights(model)
    optimizer.zero_grad()
    scaler.scale(sum(model(next(batches(1))).values())).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("cleared", ["model", "optimizer", "both"])
def test_gradients_that_were_taken_out_of_their_buffer_come_back(cleared: str) -> None:
    model = Detector()
    wrapper = ContiguousParams(model)
    optimizer = torch.optim.SGD(wrapper.contiguous(), 0.1)
    trainer = AMPTrainer(model, list(batches(4)), optimizer, wrapper, zero_grad_before_forward=True)
    for holder in {"model": [model], "optimizer": [optimizer], "both": [model, optimizer]}[cleared]:
        holder.zero_grad()
    before = weights(model)
    trainer.train(0, 2)  # FastReID's own check, that the buffers are still used, is made in every step
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_step_on_stale_buffers_is_refused() -> None:
    """Somebody clears the model's gradients in the middle of a step, by setting them to None."""
    model = Detector()
    wrapper = ContiguousParams(model)
    trainer = AMPTrainer(model, list(batches(4)), torch.optim.SGD(wrapper.contiguous(), 0.1), wrapper)
    trainer.register_hooks([types.SimpleNamespace(after_backward=model.zero_grad)])
    with pytest.raises(ProtocolError, match="stale-parameters"):
        trainer.train(0, 1)


def test_a_bad_loss_ends_the_run_before_it_does_harm() -> None:
    model = Detector()
    trainer = AMPTrainer(model, list(batches(9, bad=(5,))), torch.optim.AdamW(model.parameters(), 1e-3))
    with pytest.raises(FloatingPointError, match=r"at iteration=5!\nloss_dict = .*loss_cls.*\nampguard: run the same"):
        trainer.train(0, 9)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_guards_answer_is_in_the_error(tmp_path: Any) -> None:
    model = Detector()
    trainer = AMPTrainer(model, list(batches(9, bad=(5,))), torch.optim.AdamW(model.parameters(), 1e-3))
    with (
        pytest.raises(
            FloatingPointError, match=r"iteration=5!\n.*\nampguard: fp16-overflow in step 5: .*65504"
        ) as raised,
        ampguard.watch(out=tmp_path / "run"),
    ):
        trainer.train(0, 9)
    assert "test_amp_trainer.py" in str(raised.value)
    assert "fix " in str(raised.value)


def test_gradients_that_overflow_are_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    trainer = AMPTrainer(model, list(batches(3)), optimizer)
    trainer.grad_scaler.update(2.0**24)
    with caplog.at_level("INFO", "ampguard"):
        trainer.train(0, 3)
    assert trainer.grad_scaler.get_scale() == 2.0**21
    assert "first in `body." in caplog.text
    assert not optimizer.state


@pytest.mark.parametrize("first", ["detectron2", "fastreid"])
def test_a_scaler_of_ones_own_is_used(first: str) -> None:
    calls = []

    class Told(torch.amp.GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **words: Any) -> None:
            calls.append(type(optimizer).__name__)
            super().step(optimizer, *args, **words)

    scaler = Told("cpu", init_scale=256.0)
    trainer = trained(3, *((None, scaler) if first == "fastreid" else (1, False, scaler)))
    assert trainer.grad_scaler is scaler
    assert calls == ["AdamW"] * 3
    assert trainer.state_dict()["grad_scaler"]["scale"] == 256.0


def test_hooks_may_unscale_and_clip() -> None:
    model, norms = Detector(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = AMPTrainer(model, list(batches(3)), optimizer)

    def clip() -> None:
        norms.append(float(trainer.grad_scaler.unscale_(optimizer)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)

    before = weights(model)
    trainer.register_hooks([types.SimpleNamespace(after_backward=clip)])
    trainer.train(0, 3)
    moved = torch.nn.utils.get_total_norm([a - b for a, b in zip(before, weights(model), strict=True)])
    assert all(0.1 < norm < 20 for norm in norms)
    assert 0 < float(moved) <= 3.01e-5


@pytest.mark.parametrize("unscales", [False, True])
def test_a_hook_that_clips_scaled_gradients_is_told_once(unscales: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = AMPTrainer(model, list(batches(3)), optimizer)

    def clip() -> None:
        if unscales:
            trainer.grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)

    trainer.register_hooks([types.SimpleNamespace(after_backward=clip)])
    with caplog.at_level(logging.WARNING, "ampguard"):
        trainer.train(0, 3)
    assert ["trainer.grad_scaler.unscale_" in told for told in caplog.messages] == ([] if unscales else [True])


def test_options_of_both_signatures() -> None:
    assert set(trained(2, precision=torch.bfloat16).model.dtypes) == {torch.bfloat16}
    logged = trained(2, 1, True, log_grad_scaler=True)
    assert [value for _, value in logged.storage.history["[metric]grad_scaler"]] == [65536.0] * 2
    assert logged.zero_grad_before_forward
    assert trained(2, param_wrapper=None).param_wrapper is None
    with pytest.raises(SetupError, match=r"torch\.int8"):
        trained(1, precision=torch.int8)
    with pytest.raises(TypeError, match="precisoin"):
        trained(1, precisoin=torch.float16)


def test_a_subclass_keeps_its_methods() -> None:
    class Counting(AMPTrainer):
        steps = 0

        def run_step(self) -> None:
            self.steps += 1
            super().run_step()

    model = Detector()
    trainer = Counting(model, list(batches(3)), torch.optim.SGD(model.parameters(), 0.1))
    trainer.train(0, 3)
    assert trainer.steps == 3
    assert isinstance(trainer, Counting)


def config(enabled: bool, **more: Any) -> types.SimpleNamespace:
    amp = types.SimpleNamespace(ENABLED=enabled, **more)
    return types.SimpleNamespace(SOLVER=types.SimpleNamespace(AMP=amp))


@pytest.mark.parametrize(
    ("cfg", "dtype"),
    [
        (config(True), torch.float16),
        (config(False), torch.float32),
        (config(True, PRECISION="bfloat16"), torch.bfloat16),
        (types.SimpleNamespace(train=types.SimpleNamespace(amp=types.SimpleNamespace(enabled=True))), torch.float16),
    ],
)
def test_precision_by_config(cfg: Any, dtype: torch.dtype) -> None:
    model = Detector()
    wrapper = ContiguousParams(model)
    optimizer = torch.optim.AdamW(wrapper.contiguous(), 3e-3)
    before = weights(model)
    trainer = AMPTrainer.from_config(cfg, model, list(batches(3)), optimizer, wrapper)
    trainer.train(0, 3)
    assert set(model.dtypes) == {dtype}
    assert trainer.grad_scaler.is_enabled() == (dtype == torch.float16)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_scaler_is_in_the_trainers_state() -> None:
    trainer = trained(4)
    trainer.grad_scaler.update(512.0)
    state = copy.deepcopy((trainer.model.state_dict(), trainer.state_dict()))
    assert state[1]["iteration"] == 4
    again = trained(1)
    again.model.load_state_dict(state[0])
    again.load_state_dict(state[1])
    assert again.grad_scaler.get_scale() == 512.0
    rest = list(batches(4, seed=2))
    for one in (trainer, again):
        one._iterator = iter(rest)
        one.train(4, 8)
    assert furthest(trainer.model, again.model) == 0.0
    older = {key: value for key, value in state[1].items() if key != "grad_scaler"}
    again.load_state_dict(older)


def test_fastreids_checkpoint_carries_the_scaler_with_the_optimizer() -> None:
    """FastReID's Checkpointer saves the model, the optimizer and the schedulers, and no trainer."""
    trainer, _ = over_flat()
    trainer.grad_scaler.update(512.0)
    file = io.BytesIO()
    torch.save(trainer.optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    again, _ = over_flat()
    again.optimizer.load_state_dict(saved)
    assert again.grad_scaler.get_scale() == 512.0
    plain = torch.optim.AdamW(ContiguousParams(Detector()).contiguous(), 3e-3)
    plain.load_state_dict(saved)
    assert "grad_scaler" not in plain.state_dict()
