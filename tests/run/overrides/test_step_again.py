"""A step that failed is made again with its fix: nothing is skipped, and the script sees no bad number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from override_loops import weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampguard.incident import Fix
from ampguard.run.overrides.healing import in_order


@contextlib.contextmanager
def no_fix() -> Iterator[None]:
    yield


def in_float32(is_fixed: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False) if is_fixed else no_fix()


def distances(output: Tensor, is_fixed: bool) -> Tensor:
    """Squared distances as |a|^2 + |b|^2 - 2ab, of vectors whose squares do not fit float16 in some steps."""
    with in_float32(is_fixed):
        output = output.float() if is_fixed else output
        squares = output.pow(2).sum(1, keepdim=True)
        dist = squares + squares.t() - 2 * output @ output.t()
    return dist.clamp(min=1e-4).sqrt()


class Seen:
    """What the loop printed, and what it trained."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-3, momentum=0.9)
        self.numbers: list[float] = []


def batches(bright: set[int], steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = [torch.randn(12, 8, generator=generator) for _ in range(steps)]
    return [x * 1e4 if i in bright else x for i, x in enumerate(found)]


def engine_style(bright: set[int], is_fixed: bool = False, scaler: Any = None, steps: int = 8) -> Seen:
    """MAE's engine: the loss by hand, `sys.exit` over a bad one before backward."""
    seen = Seen()
    head = nn.Linear(8, 4)
    seen.optimizer.add_param_group({"params": head.parameters()})
    for x in batches(bright, steps):
        with torch.autocast("cpu", dtype=torch.float16):
            near = distances(head(x), is_fixed).mean()
            loss = near + seen.net(x / x.abs().max()).square().mean()
        if not math.isfinite(loss.item()):
            raise SystemExit(f"Loss is {loss.item()}, stopping training")
        seen.numbers += [loss.item(), near.item()]
        seen.optimizer.zero_grad()
        loss = loss / 2
        if scaler is None:
            loss.backward()
            seen.optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(seen.optimizer)
            scaler.update()
    seen.net.add_module("head", head)
    return seen


@pytest.mark.parametrize("with_scaler", [False, True])
def test_the_script_sees_the_healed_loss_and_takes_its_step(overridden: Callable[..., Any], with_scaler: bool) -> None:
    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=1.0) if with_scaler else None

    by_hand = engine_style({3}, is_fixed=True, scaler=scaler())
    with pytest.raises(SystemExit, match="Loss is"):
        engine_style({3})
    used = scaler()
    with overridden(on_nonfinite="heal") as session:
        healed = engine_style({3}, scaler=used)
    assert session.report.run["steps_held_off"] == 0
    assert session.report.run["could_not"] == []
    assert [i.cause for i in session.report.incidents] == ["fp16-overflow"]
    assert all(map(math.isfinite, healed.numbers))
    assert healed.numbers == pytest.approx(by_hand.numbers, rel=5e-3)
    assert len(healed.numbers) == len(by_hand.numbers)
    for a, b in zip(weights(healed.net), weights(by_hand.net), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=5e-3)
    torch.testing.assert_close(healed.net[1].running_mean, by_hand.net[1].running_mean)
    assert int(healed.net[1].num_batches_tracked) == 8
    assert used is None or used.get_scale() == 1.0


def after_backward(is_fixed: bool = False, window: int = 1) -> Seen:
    """FastReID's loop: it reads the terms of the loss once backward has run. With `window`, gradients add up."""
    seen = Seen()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for i, x in enumerate(batches({3}, 8)):
        with torch.autocast("cpu", dtype=torch.float16):
            output = seen.net[4](x.new_ones(12, 16) * x.mean(1, keepdim=True))
            terms = {"near": distances(output, is_fixed).mean(), "small": output.float().abs().mean()}
            total = sum(terms.values()) / window
        scaler.scale(total).backward()
        seen.numbers += [term.item() for term in terms.values()]
        if i % window == window - 1:
            scaler.step(seen.optimizer)
            scaler.update()
            seen.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("window", [1, 2])
def test_terms_that_are_read_after_backward(overridden: Callable[..., Any], window: int) -> None:
    by_hand = after_backward(is_fixed=True, window=window)
    with overridden(on_nonfinite="heal") as session:
        healed = after_backward(window=window)
    assert session.report.run["steps_held_off"] == 0
    assert all(map(math.isfinite, healed.numbers))
    assert healed.numbers == pytest.approx(by_hand.numbers, rel=1e-2)
    for a, b in zip(weights(healed.net), weights(by_hand.net), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=5e-3)


def settling(scale: float | None, clears: bool = True) -> tuple[nn.Module, float]:
    """A loop whose loss scale is far too high at first. `clears`: gradients become None, and not 0."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for x in batches(set(), 6):
        optimizer.zero_grad(set_to_none=clears)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(x).float(), x[:, :4], reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return net, scaler.get_scale()


@pytest.mark.parametrize("clears", [True, False])
def test_a_scale_that_settles_loses_no_step(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str], clears: bool
) -> None:
    control, _ = settling(None)
    with overridden(on_nonfinite="heal") as session:
        net, scale = settling(2.0**22, clears)
    assert session.report.run["steps_held_off"] == 0
    assert 16.0 < scale < 2.0**22
    for a, b in zip(weights(net), weights(control), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
    assert capsys.readouterr().err.count("gradients overflow at the loss scale 4.1943e+06; made again at") == 1


def test_so_does_a_gained_scale(overridden: Callable[..., Any]) -> None:
    def loop() -> nn.Module:
        torch.manual_seed(4)
        net = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-4)
        for x in batches(set(), 5):
            optimizer.zero_grad()
            (net(x) * 4).square().sum().backward()
            optimizer.step()
        return net

    control = loop()
    with overridden("fp16", on_nonfinite="heal") as session:
        net = loop()
    assert session.report.run["steps_held_off"] == 0
    for a, b in zip(weights(net), weights(control), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_gradients_that_overflow_behind_a_finite_loss(overridden: Callable[..., Any]) -> None:
    """The derivative of log at 1e-7 does not fit float16; the step is made again with the fix."""

    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor, shift: float) -> Tensor:
            return (self.inner(x).square() * 1e-3 + shift).pow(-0.5)

    def loop(dtype: torch.dtype | None) -> nn.Module:
        torch.manual_seed(4)
        net = Score()
        optimizer = torch.optim.SGD(net.parameters(), 1e-6)
        for i, x in enumerate(batches(set(), 6)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = net(x * 1e-2 if i == 3 else x, 1e-6 if i == 3 else 1.0).float().mean()
            loss.backward()
            optimizer.step()
        return net

    control = loop(None)
    with overridden(on_nonfinite="heal") as session:
        net = loop(torch.float16)
    assert session.report.run["steps_held_off"] == 0
    assert [i.severity for i in session.report.incidents] == ["error"]
    assert all(p.isfinite().all() for p in net.parameters())
    for a, b in zip(weights(net), weights(control), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(overridden: Callable[..., Any], reentrant: bool) -> None:
    """Backward runs the model again, and with it its running statistics: as often as the script's own backward does."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(8, 8)
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.start(x), use_reentrant=reentrant)  # type: ignore[no-any-return]

    def loop(is_fixed: bool, scale: float) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(4)
        net = Checkpointed()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for i, x in enumerate(batches(set(), 5)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = distances(net(x) * (1e3 if i == 2 else 1.0), is_fixed).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return net, net.inner[1].running_mean

    net, mean = loop(True, 1.0)
    with overridden(on_nonfinite="heal") as session:
        healed, healed_mean = loop(False, 1.0 if reentrant else 2.0**18)
    assert session.report.run["steps_made_again"] == [2]
    assert session.report.run["steps_held_off"] == 0
    assert session.report.run["could_not"] == []
    assert int(healed.inner[1].num_batches_tracked) == int(net.inner[1].num_batches_tracked)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(healed_mean, mean, rtol=1e-2, atol=1e-3)
    for a, b in zip(weights(healed), weights(net), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=5e-3)


def test_what_cannot_be_made_again_is_held_off(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A gradient penalty: the loss holds a gradient of its own."""
    with overridden(on_nonfinite="heal") as session:
        torch.manual_seed(4)
        net = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for x in batches({2}, 5):
            x.requires_grad_()
            with torch.autocast("cpu", dtype=torch.float16):
                output = net(x)
                (slope,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
                loss = distances(output, False).mean() + slope.square().mean()
            before = weights(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not torch.isfinite(loss):
                assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert session.report.run["steps_held_off"] == 1
    assert "a step could not be made again, and is held off" in capsys.readouterr().err


def test_a_truth_about_the_loss_is_healed(overridden: Callable[..., Any]) -> None:
    """`if torch.isnan(loss)`: what is read is a truth that was computed from the loss."""
    with overridden(on_nonfinite="heal"):
        torch.manual_seed(4)
        net = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        skipped = 0
        for x in batches({2}, 5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = distances(net(x), False).mean()
            if not torch.isfinite(loss):
                skipped += 1
                continue
            loss.backward()
            optimizer.step()
    assert skipped == 0
    assert all(p.isfinite().all() for p in net.parameters())


def test_another_loss_of_the_iteration_is_left_alone(overridden: Callable[..., Any]) -> None:
    """A GAN's: the critic's loss is healed as it is read, the critic steps, and the generator's loss is its own."""

    def loop(is_fixed: bool) -> tuple[nn.Module, nn.Module, list[float]]:
        torch.manual_seed(4)
        critic, maker = nn.Linear(8, 4), nn.Linear(8, 8)
        optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (critic, maker)]
        numbers = []
        for x in batches({2}, 5):
            with torch.autocast("cpu", dtype=torch.float16):
                near = distances(critic(x), is_fixed).mean()
            numbers.append(near.item())
            optimizers[0].zero_grad()
            near.backward()
            optimizers[0].step()
            with torch.autocast("cpu", dtype=torch.float16):
                far = critic(maker(x / x.abs().max())).float().square().mean()
            optimizers[1].zero_grad()
            far.backward()
            optimizers[1].step()
        return critic, maker, numbers

    by_hand = loop(True)
    with overridden(on_nonfinite="heal") as session:
        healed = loop(False)
    assert session.report.run["steps_held_off"] == 0
    assert session.report.run["steps_made_again"] == [2]
    assert session.report.run["could_not"] == []
    assert healed[2] == pytest.approx(by_hand[2], rel=5e-3)
    for one, other in zip(healed[:2], by_hand[:2], strict=True):
        for a, b in zip(weights(one), weights(other), strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(a, b, rtol=3e-2, atol=5e-3)


def test_a_parameter_outside_every_module(overridden: Callable[..., Any]) -> None:
    """CLIP's temperature, say: its gradient is healed with the others."""

    def loop(is_fixed: bool) -> Tensor:
        torch.manual_seed(4)
        net, scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))
        optimizer = torch.optim.SGD([*net.parameters(), scale], 1e-4)
        for x in batches({2}, 5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = distances(net(x) * scale, is_fixed).mean()
            loss.backward()
            optimizer.step()
        return scale.detach()

    by_hand = loop(True)
    with overridden(on_nonfinite="heal") as session:
        healed = loop(False)
    assert session.report.run["steps_made_again"] == [2]
    torch.testing.assert_close(healed, by_hand, rtol=1e-2, atol=1e-3)


def test_a_term_that_is_bad_before_another_model_runs(overridden: Callable[..., Any]) -> None:
    """What the second model is called for is recorded although the line has just been forced."""

    def loop(is_fixed: bool) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(4)
        net, other = nn.Linear(8, 4), nn.Linear(8, 2)
        optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], 1e-3)
        numbers = []
        for x in batches({2}, 6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                near = distances(net(x), is_fixed).mean()
                again = net(x / x.abs().max()).float().square().mean()
                loss = near + again + other(x / x.abs().max()).float().abs().mean()
            loss.backward()
            numbers += [near.item(), loss.item()]
            optimizer.step()
        return [*weights(net), *weights(other)], numbers

    by_hand, printed_by_hand = loop(True)
    with overridden(on_nonfinite="heal") as session:
        healed, printed = loop(False)
    assert session.report.run["steps_made_again"] == [2]
    assert session.report.run["steps_held_off"] == 0
    assert printed == pytest.approx(printed_by_hand, rel=5e-3)
    for a, b in zip(healed, by_hand, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=5e-3)


def test_after_a_healed_evaluation_training_goes_on_as_ever(overridden: Callable[..., Any]) -> None:
    with overridden(on_nonfinite="heal") as session:
        torch.manual_seed(4)
        net = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        printed = []
        for i, x in enumerate(batches({2}, 5)):
            optimizer.zero_grad()
            net((x / x.abs().max()).float()).square().mean().backward()
            optimizer.step()
            if i == 2:
                with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                    printed.append(distances(net(x), False).mean().item())
    assert math.isfinite(printed[0])
    assert session.report.run["steps_made_again"] == []
    assert len(session.report.run["healed"]) == 1


def test_what_no_fix_explains_is_still_told_in_a_healed_step(overridden: Callable[..., Any]) -> None:
    with overridden(on_nonfinite="heal") as session:
        torch.manual_seed(4)
        net = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for i, x in enumerate(batches({2}, 4)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = net(x)
                loss = distances(output, False).mean()
            read = loss.item()
            if i == 2:
                assert math.isfinite(read)
                assert math.isnan((output.float().sum() * 0 / torch.zeros(())).item())
            loss.backward()
            optimizer.step()
    assert {i.cause for i in session.report.incidents} == {"fp16-overflow", "division-by-zero"}


def test_reading_is_put_back(overridden: Callable[..., Any]) -> None:
    before = torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__
    with overridden(on_nonfinite="heal"):
        assert torch.Tensor.item is not before[0]
    assert (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__) == before


def fix(action: str, loss: str) -> Fix:
    return Fix(action, None, "", True, f"the replayed step is finite; the loss is {loss}")


def test_the_smallest_fix_that_gives_float32s_loss() -> None:
    line, bf16, off = fix("force-fp32", "0.297"), fix("use-bf16", "0.2807"), fix("disable-amp", "0.2806")
    assert in_order([off, bf16, line]) == [bf16, off, line]
    assert in_order([off, bf16, fix("force-fp32", "0.2811")])[0].action == "force-fp32"
    without = Fix("force-fp32", None, "", True, "the replayed step is finite")
    assert in_order([off, bf16, without])[0] is without
