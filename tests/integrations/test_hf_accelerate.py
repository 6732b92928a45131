"""`prepare(accelerator)` with the real Accelerate, its own scaler as control.

Accelerate leaves fp16 off on the CPU. The control is what it does on a GPU: autocast and a GradScaler, switched on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_loops import IMAGES, LABELS, batches, furthest, network
from several_optimizers import Step, losses_of, one_backward
from torch import Tensor, nn

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import GradScalerKwargs  # noqa: E402
from lightning_modules import line_of, norm  # noqa: E402

import ampguard  # noqa: E402
from ampguard.errors import NonfiniteError, ProtocolError, SetupError  # noqa: E402
from ampguard.integrations.hf import prepare  # noqa: E402


def accelerator(kind: str, precision: str = "fp16", **words: Any) -> Any:
    """`theirs`, or `ours`."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    made = accelerate.Accelerator(mixed_precision=precision, cpu=True, **words)
    if kind == "ours":
        prepare(made)
    elif precision == "fp16":
        made.native_amp, made.scaler = True, torch.amp.GradScaler("cpu")
    return made


def trained(kind: str, precision: str = "fp16", clip: float | None = None, window: int = 1, **words: Any) -> nn.Module:
    """A network after 8 steps, and what Accelerate said of each of them (`model.skips`, `model.rates`)."""
    bad = words.pop("bad", ())
    fused = words.pop("fused", None)
    acc = accelerator(kind, precision, gradient_accumulation_steps=window, **words)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    wrapped, optimizer, scheduler = acc.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    skips, rates = [], []
    for x, y in batches(8 * window, bad):
        with acc.accumulate(wrapped):
            acc.backward(nn.functional.cross_entropy(wrapped(x), y))
            if clip is not None and acc.sync_gradients:
                acc.clip_grad_norm_(wrapped.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if acc.sync_gradients:
            skips.append(optimizer.step_was_skipped)
            rates.append(scheduler.get_last_lr()[0])
    model.skips, model.rates, model.accelerator = skips, rates, acc  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.parametrize("words", [{}, {"clip": 0.5}, {"clip": 0.5, "window": 3}], ids=str)
def test_one_optimizer_learns_as_with_accelerates_own(precision: str, words: dict[str, Any]) -> None:
    bad = (4,) if precision == "fp16" and not words else ()
    theirs, ours = trained("theirs", precision, bad=bad, **words), trained("ours", precision, bad=bad, **words)
    assert furthest(theirs, ours) < 1e-6
    assert ours.skips == theirs.skips == [number in bad for number in range(8)]
    assert ours.rates == theirs.rates


@pytest.mark.parametrize("by_hand", [True, False])
def test_clipping_scaled_gradients_is_told_once(by_hand: bool, caplog: pytest.LogCaptureFixture) -> None:
    acc, model = accelerator("ours"), network()
    wrapped, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with caplog.at_level(logging.WARNING, "ampguard"):
        for x, y in batches(3):
            optimizer.zero_grad(set_to_none=False)
            acc.backward(nn.functional.cross_entropy(wrapped(x), y))
            (nn.utils.clip_grad_norm_ if by_hand else acc.clip_grad_norm_)(model.parameters(), 0.1)
            optimizer.step()
    assert ["accelerator.clip_grad_norm_" in told for told in caplog.messages] == ([True] if by_hand else [])


def test_a_fused_optimizer_says_that_it_was_skipped() -> None:
    ours = trained("ours", bad=(4,), fused=True)
    assert ours.skips == [False] * 4 + [True] + [False] * 3
    assert furthest(ours, trained("ours", bad=(4,))) < 1e-6


def test_float16_is_real_on_the_cpu() -> None:
    def seen_by(make: Callable[[], Any]) -> set[torch.dtype]:
        acc, seen = make(), set()
        model = acc.prepare(nn.Linear(4, 4))
        model.register_forward_hook(lambda *hooked: seen.add(hooked[2].dtype))
        with acc.autocast():
            seen.add((torch.ones(1, 4) @ torch.ones(4, 4)).dtype)
        return seen

    AcceleratorState._reset_state(True)
    assert seen_by(lambda: accelerate.Accelerator(mixed_precision="fp16", cpu=True)) == {torch.float32}
    assert seen_by(lambda: accelerator("ours")) == {torch.float16}


# --- several optimizers -----------------------------------------------------------------------------------------------


def clipped(acc: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    acc.backward(torch.stack(losses).sum())
    acc.clip_grad_norm_(parts[0].parameters(), 1e9)  # which divides the gradients of all of them
    for optimizer in optimizers:
        optimizer.step()


def clipped_one_by_one(acc: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for part, optimizer, loss in zip(parts, optimizers, losses, strict=True):
        optimizer.zero_grad()
        acc.backward(loss)
        acc.clip_grad_norm_(part.parameters(), 1e9)
        optimizer.step()


def through_the_other(acc: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    """The second loss leaves gradients in the first part, too, which are thrown away; as a generator's does."""
    for i, optimizer in enumerate(optimizers):
        optimizer.zero_grad()
        acc.backward(losses[i] + 0 * losses[0].detach() + (losses[0] if i else 0), retain_graph=True)
        acc.clip_grad_norm_(parts[i].parameters(), 1e9)
        optimizer.step()


def cleared_in_place(acc: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for i, optimizer in enumerate(optimizers):
        optimizer.zero_grad(set_to_none=False)
        acc.backward(losses[i] + (losses[0] if i else 0), retain_graph=True)
        acc.clip_grad_norm_(parts[i].parameters(), 1e9)
        optimizer.step()


def clipped_in_every_micro_step(
    acc: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int
) -> None:
    acc.backward(torch.stack(losses).sum() / 2)
    acc.clip_grad_norm_([p for part in parts for p in part.parameters()], 1e9)
    if number % 2:
        for optimizer in optimizers:
            optimizer.step()
        acc.norms = [norm(part) for part in parts]
        for optimizer in optimizers:
            optimizer.zero_grad()


def norms(kind: str, step: Step, burst: tuple[int, int] | None = None, lr: float = 0.0) -> tuple[list[Any], Any]:
    """Of three linear classifiers' gradients after each step; `burst`: the iteration and the part that overflows."""
    acc = accelerator("ours" if kind == "ours" else "theirs", "no" if kind == "float32" else "fp16")
    torch.manual_seed(0)
    modules = [nn.Linear(64, 10) for _ in range(3)]
    prepared = acc.prepare(*modules, *(torch.optim.SGD(m.parameters(), lr) for m in modules))
    parts, optimizers = list(prepared[:3]), list(prepared[3:])
    found = []
    for number in range(4):
        acc.norms = None
        step(acc, parts, optimizers, losses_of(parts, number, burst), number)
        found.append(acc.norms or [norm(m) for m in modules])
    return found, acc


def test_accelerates_own_is_wrong_with_two_optimizers() -> None:
    true, _ = norms("float32", one_backward)
    theirs, _ = norms("theirs", clipped)
    assert theirs[0][0] == pytest.approx(true[0][0], rel=2e-3)
    assert theirs[0][1] == pytest.approx(true[0][1] / 65536, rel=2e-2)  # divided twice
    theirs, _ = norms("theirs", one_backward, (1, 0))
    assert theirs[1][1] == pytest.approx(2 * true[1][1], rel=2e-3)


STEPS = [one_backward, clipped, clipped_one_by_one, through_the_other, cleared_in_place]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("burst", [None, (0, 0), (1, 0), (1, 2)], ids=str)
def test_ours_are_right(step: Step, burst: tuple[int, int] | None) -> None:
    true, _ = norms("float32", step)
    ours, acc = norms("ours", step, burst)
    shares = step in (through_the_other, cleared_in_place)
    for number in range(4):
        for i in range(3):
            is_bad = burst is not None and number == burst[0] and (i == burst[1] or (shares and burst[1] == 0))
            # what the other losses leave in the first part is cleared before it is used
            if not is_bad and not (shares and i == 0):
                assert ours[number][i] == pytest.approx(true[number][i], rel=2e-3), (number, i)
    assert acc.scaler.get_scale() == (65536.0 if burst is None else 32768.0)


def test_clipping_in_every_micro_step() -> None:
    with pytest.raises(RuntimeError, match="already been called"):
        norms("theirs", clipped_in_every_micro_step)
    true, _ = norms("float32", clipped_in_every_micro_step)
    ours, _ = norms("ours", clipped_in_every_micro_step)
    for number in (1, 3):
        assert ours[number] == pytest.approx(true[number], rel=2e-3)


def test_a_scale_that_falls_while_gradients_are_divided() -> None:
    """The second optimizer overflows, and a checkpoint ends its iteration inside the first one's window."""
    acc = accelerator("ours")
    torch.manual_seed(0)
    modules = [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    *parts, first, second = acc.prepare(*modules, *(torch.optim.SGD(m.parameters(), 0.1) for m in modules))
    x = torch.full((2, 4), 0.25)
    acc.backward(parts[0](x).float().mean() + 1e36 * parts[1](x).float().mean())
    acc.clip_grad_norm_(parts[0].parameters(), 1e9)
    second.step()
    assert acc.scaler.state_dict()["scale"] == 32768.0
    acc.backward(parts[0](x).float().mean())
    first.step()
    assert modules[0].weight.grad.tolist() == [[0.5] * 4]


@pytest.mark.parametrize("is_cleared", [False, True])
def test_an_infinity_that_clamping_hides_between_micro_steps(is_cleared: bool) -> None:
    acc = accelerator("ours")
    model = nn.Linear(4, 1)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for number in range(2):
        acc.backward(model(torch.ones(1, 4)).float().sum() / 4)
        if number == 0:
            model.weight.grad[0, 0] = float("inf")
        acc.clip_grad_value_(model.parameters(), 1.0)
        if is_cleared and number == 0:
            optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert optimizer.step_was_skipped is not is_cleared


def test_weights_with_clipping_and_learning() -> None:
    """What the norms say, the weights say too."""

    def weights(kind: str) -> list[Tensor]:
        _, acc = norms(kind, clipped, lr=0.1)
        return [p.detach() for model in acc._models for p in model.parameters()]

    true, theirs, ours = weights("float32"), weights("theirs"), weights("ours")
    distance = [max(float((a - b).abs().max()) for a, b in zip(true, w, strict=True)) for w in (theirs, ours)]
    assert distance[0] > 1e-3
    assert distance[1] < 1e-4


# --- state, setup, mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["theirs to ours", "ours to theirs", "ours to ours"])
def test_checkpoints_are_exchanged(direction: str, tmp_path: Path) -> None:
    first, second = direction.split(" to ")
    trained(first, bad=(3,)).accelerator.save_state(str(tmp_path))
    acc = accelerator(second)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    acc.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    acc.load_state(str(tmp_path))
    assert acc.scaler.get_scale() == 32768.0
    assert acc.scaler.state_dict()["_growth_tracker"] == 4


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_checkpoints_without_a_scale_stay_without(precision: str, tmp_path: Path) -> None:
    trained("ours", precision).accelerator.save_state(str(tmp_path))
    assert not (tmp_path / "scaler.pt").exists()


def test_the_scalers_arguments_are_kept() -> None:
    acc = accelerator(
        "ours", kwargs_handlers=[GradScalerKwargs(init_scale=128.0, growth_interval=7, growth_factor=3.0)]
    )
    state = acc.scaler.state_dict()
    assert (state["scale"], state["growth_interval"], state["growth_factor"]) == (128.0, 7, 3.0)


def test_a_scaler_that_is_switched_off_stays_off() -> None:
    acc = accelerator("ours", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    model = network()
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loss = nn.functional.cross_entropy(model(IMAGES[:8]), LABELS[:8])
    acc.backward(loss)
    weights = list(model.parameters())
    true = torch.stack([p.grad.norm() for p in weights if p.grad is not None]).norm()
    assert not acc.scaler.is_enabled()
    assert acc.scaler.get_scale() == 1.0
    assert acc.clip_grad_norm_(weights, 0.1) == pytest.approx(true.item())
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_after_accelerates_own_prepare() -> None:
    acc = accelerator("theirs")
    model = nn.Linear(4, 4)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    scaler = prepare(acc)
    assert optimizer.scaler is acc.scaler is scaler is prepare(acc)
    acc.backward(model(torch.full((1, 4), 1e30)).sum())
    optimizer.step()
    assert optimizer.step_was_skipped


def test_too_late_for_float16_on_the_cpu() -> None:
    AcceleratorState._reset_state(True)
    acc = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    acc.prepare(nn.Linear(4, 4))
    with pytest.raises(SetupError, match=r"before accelerator\.prepare"):
        prepare(acc)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_bad_step_changes_nothing_in_any_precision(precision: str) -> None:
    def poisoned(kind: str) -> bool:
        acc = accelerator(kind, precision)
        model = nn.Linear(4, 1)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        acc.backward(model(torch.full((1, 4), float("nan"))).sum())
        optimizer.step()
        assert optimizer.step_was_skipped is (kind == "ours")
        return any(bool(p.isnan().any()) for p in model.parameters())

    assert poisoned("theirs")
    assert not poisoned("ours")


def test_closures_and_steps_without_gradients_are_as_before_without_a_scale() -> None:
    acc = accelerator("ours", "no")
    model = nn.Linear(4, 1)
    model, optimizer = acc.prepare(model, torch.optim.LBFGS(model.parameters(), 0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        acc.backward(loss)
        return loss

    before = closure().item()
    optimizer.step(closure)
    assert closure().item() < before
    _, idle = acc.prepare(nn.Linear(4, 1), torch.optim.SGD(nn.Linear(4, 1).parameters(), 0.1))
    idle.step()
    assert not idle.step_was_skipped


def test_a_skipped_step_names_the_parameters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ampguard"):
        trained("ours", bad=(3,))
    (told,) = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert "AdamW" in told
    acc = accelerator("ours", "bf16")
    model = network()
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    acc.backward(nn.functional.cross_entropy(model(IMAGES[:8]), LABELS[:8]))
    model[7].bias.grad[0] = float("nan")
    optimizer.step()
    assert optimizer.scaler.result.nonfinite == ("7.bias",)


def test_backward_in_place_of_accelerators() -> None:
    def raw(acc: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
        losses[0].backward()
        optimizers[0].step()

    with pytest.raises(ProtocolError, match=r"call accelerator\.backward\(loss\) instead of loss\.backward") as told:
        norms("ours", raw)
    assert f"test_hf_accelerate.py:{line_of(raw, '.backward()')}:" in str(told.value)
    assert f"test_hf_accelerate.py:{line_of(raw, '.step()')}" in str(told.value)


def test_a_step_past_the_wrapper_is_refused() -> None:
    """The loop goes on with the optimizer that it gave to `prepare`, in place of the one that came back."""
    acc, model = accelerator("ours"), network()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, optimizer = acc.prepare(model, inner)
    (x, y), *_ = batches(1)
    acc.backward(nn.functional.cross_entropy(wrapped(x), y))
    before = model[7].weight.detach().clone()
    with pytest.raises(
        ProtocolError, match=r"65536 times too large(?s:.*)that accelerator\.prepare\(\) has returned"
    ) as told:
        inner.step()
    assert told.value.cause == "bypassed-scaler"
    assert torch.equal(model[7].weight, before)
    optimizer.step()
    assert not torch.equal(model[7].weight, before)


@pytest.mark.parametrize("how", ["clipped", "cleared", "cleared in place", "stepped"])
def test_a_step_past_the_wrapper_on_true_gradients_is_let_be(how: str) -> None:
    acc, model = accelerator("ours"), network()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, optimizer = acc.prepare(model, inner)
    (x, y), *_ = batches(1)
    acc.backward(nn.functional.cross_entropy(wrapped(x), y))
    if how == "clipped":
        acc.clip_grad_norm_(wrapped.parameters(), 1.0)
    elif how == "stepped":
        optimizer.step()
    else:
        optimizer.zero_grad(set_to_none=how == "cleared")
    inner.step()


def test_a_run_in_which_no_step_succeeds_ends() -> None:
    acc = accelerator("theirs")
    prepare(acc, patience=3)
    model = network()
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def train() -> None:
        for x, y in batches(4, bad=tuple(range(4))):
            acc.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(NonfiniteError, match="3 steps in a row"):
        train()


# --- under the guard --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16", "no"])
@pytest.mark.parametrize("words", [{}, {"clip": 0.5}, {"clip": 0.5, "window": 3}], ids=str)
def test_healthy_trainings_are_silent_and_unchanged(precision: str, words: dict[str, Any], tmp_path: Path) -> None:
    alone = trained("ours", precision, **words)
    with ampguard.watch(out=tmp_path / "run") as session:
        watched = trained("ours", precision, **words)
    assert session.report.incidents == ()
    assert session.report.steps == 8
    assert furthest(alone, watched) == 0.0


@pytest.mark.parametrize("step", [*STEPS, clipped_in_every_micro_step], ids=lambda step: step.__name__)
def test_several_optimizers_are_silent_too(step: Step, tmp_path: Path) -> None:
    alone, _ = norms("ours", step, lr=0.01)
    with ampguard.watch(out=tmp_path / "run") as session:
        watched, _ = norms("ours", step, lr=0.01)
    assert [(i.cause, i.explanation) for i in session.report.incidents] == []
    assert watched == alone


def test_a_bad_batch_is_explained(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        trained("ours", bad=(5,), clip=1.0)
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step, incident.module) == ("fp16-overflow", 5, "0")
