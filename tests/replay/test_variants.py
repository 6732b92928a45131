"""A step run again in another way: in another precision, with an operator or a tensor changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import seed_everything

from ampguard.capture.record import BadResult
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.variants import Variant, converted, promoted, widened

AtFailure = Callable[..., list[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h @ h.transpose(-2, -1) @ x.to(h.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.layer_norm(x + block(x), (8,))
        return self.head(x)


def overflowing(at: int) -> tuple[Net, Callable[[], None]]:
    """A network whose block number `at` leaves float16, and the step that shows it."""
    seed_everything()
    model = Net()
    with torch.no_grad():
        model.blocks[at].layer.weight.mul_(300.0)  # type: ignore[operator, union-attr]

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(torch.randn(2, 4, 8)).mean(1), torch.tensor([0, 1]))
        loss.backward()

    return model, body


def outcomes(
    at_failure: AtFailure, body: Callable[[], None], *variants: Callable[[Replayer], Variant]
) -> list[Outcome]:
    def look(replayer: Replayer, bad: BadResult) -> list[Outcome]:
        return [replayer.run(variant(replayer)) for variant in variants]

    (found,) = at_failure(body, look)
    return found  # type: ignore[no-any-return]


def as_it_ran(replayer: Replayer) -> Variant:
    return Variant()


def test_float32_and_bfloat16_cure_an_overflow(at_failure: AtFailure) -> None:
    _, body = overflowing(1)
    found = outcomes(
        at_failure,
        body,
        as_it_ran,
        lambda r: Variant(convert=torch.float32),
        lambda r: Variant(convert=torch.bfloat16),
    )
    assert [outcome.is_bad for outcome in found] == [True, False, False]
    _, in_float32, in_bfloat16 = found
    assert not any(o.dtype == torch.float16 for op in in_float32.trace.ops for o in op.outputs)
    assert not any(o.dtype == torch.float16 for op in in_bfloat16.trace.ops for o in op.outputs)
    assert any(o.dtype == torch.bfloat16 for op in in_bfloat16.trace.ops for o in op.outputs)


def test_float32_step_is_the_step_in_float32(at_failure: AtFailure) -> None:
    """Against plain PyTorch with autocast off."""
    model, body = overflowing(1)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    (found,) = outcomes(at_failure, body, lambda r: Variant(convert=torch.float32))
    torch.set_rng_state(state)
    expected = F.cross_entropy(model(torch.randn(2, 4, 8)).mean(1), torch.tensor([0, 1]))
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("forced", "is_bad"), [(0, True), (1, False), (2, True)])
def test_one_module_in_float32(forced: int, is_bad: bool, at_failure: AtFailure) -> None:
    model, body = overflowing(1)
    (found,) = outcomes(at_failure, body, lambda r: Variant(force_fp32=frozenset({id(model.blocks[forced])})))
    assert found.is_bad == is_bad
    types = {out.dtype for op in found.trace.ops if op.module == f"blocks.{forced}" for out in op.outputs if out.shape}
    assert types == {torch.float32}


def test_line_outside_modules_in_float32(at_failure: AtFailure) -> None:
    seed_everything()
    model = nn.Linear(4, 1)
    lines: list[int] = []

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.ones(3, 4))
            out = (out * 0 + 300.0) * 300.0
        (out / out).mean().backward()

    import inspect

    source, start = inspect.getsourcelines(body)
    lines.append(start + next(i for i, line in enumerate(source) if "* 300.0" in line and "out * 0" in line))
    (found, other) = outcomes(
        at_failure,
        body,
        lambda r: Variant(fp32_lines=frozenset({(__file__, lines[0])})),
        lambda r: Variant(fp32_lines=frozenset({(__file__, lines[0] - 1)})),
    )
    assert not found.is_bad
    assert other.is_bad


def test_intervention_at_a_place_reaches_every_run_of_the_line(at_failure: AtFailure) -> None:
    seed_everything()
    model = nn.Linear(4, 3)

    def body() -> None:
        p = model(torch.randn(2, 4)) * 0.0
        total = p.sum() * 0.0
        for row in p:
            total = total + torch.log(row).sum()
        total.backward()

    def look(replayer: Replayer, bad: BadResult) -> Any:
        trace = replayer.run().trace
        logs = [op for op in trace.ops if op.short_name == "log"]
        clamp = {logs[0].place: lambda f, a, k: f(a[0].clamp(min=1e-3), **k)}
        one = {trace.run_key(logs[0].index): lambda f, a, k: f(a[0].clamp(min=1e-3), **k)}
        everywhere, once = replayer.run(Variant(at_places=clamp)), replayer.run(Variant(interventions=one))
        return len(logs), logs[0].place == logs[1].place, everywhere.is_bad, once.is_bad, everywhere.loss

    ((count, same_place, everywhere, once, loss),) = at_failure(body, look)
    assert (count, same_place, everywhere, once) == (2, True, False, True)
    assert loss == pytest.approx(6 * torch.log(torch.tensor(1e-3)).item(), rel=1e-5)


def test_tensors_replaced(at_failure: AtFailure) -> None:
    """A batch, and a parameter; the script's own stay as they are."""
    seed_everything()
    model = nn.Linear(4, 1, bias=False)
    x = torch.randn(3, 4)
    x[1] = float("nan")
    kept = x.clone()
    weight = model.weight.detach().clone()

    def body() -> None:
        model(x).mean().backward()

    def look(replayer: Replayer, bad: BadResult) -> Any:
        clean = replayer.run(Variant(tensors={id(x): torch.ones(3, 4)}))
        zero = replayer.run(Variant(tensors={id(x): torch.ones(3, 4), id(model.weight): torch.zeros(1, 4)}))
        return clean.loss, zero.loss

    ((clean, zero),) = at_failure(body, look)
    assert clean == pytest.approx(weight.sum().item(), rel=1e-5)
    assert zero == 0.0
    assert torch.equal(model.weight.detach(), weight)
    assert torch.equal(x.isnan(), kept.isnan())
    assert x._version == 1


def test_capture_keeps_operands_and_result(at_failure: AtFailure) -> None:
    seed_everything()
    model = nn.Linear(4, 2)
    x = torch.randn(3, 4)

    def body() -> None:
        (model(x).exp_().sum() * float("nan")).backward()

    def look(replayer: Replayer, bad: BadResult) -> Any:
        trace = replayer.run().trace
        places = {op.short_name: op.index for op in trace.ops}
        captured = replayer.run(Variant(capture=frozenset(places.values()))).captured
        return captured[places["addmm"]], captured[places["exp"]]

    ((addmm, exp),) = at_failure(body, look)
    expected = F.linear(x, model.weight, model.bias)
    assert torch.equal(exp.tensors[0], expected), "an in-place operator's operand as it was before"
    assert torch.equal(exp.result, expected.exp())
    assert len(addmm.tensors) == 3


# --- conversions alone ------------------------------------------------------------------------------------------------


def test_converted_changes_low_precision_only() -> None:
    half, full, whole = torch.ones(2, dtype=torch.half), torch.ones(2), torch.ones(2, dtype=torch.long)
    args, kwargs = converted(torch.ops.aten.add.Tensor, (half, full, [half, whole], torch.float16), {}, torch.float32)
    assert [args[0].dtype, args[1].dtype, args[2][0].dtype, args[2][1].dtype, args[3]] == [
        torch.float32, torch.float32, torch.float32, torch.int64, torch.float32,
    ]  # fmt: skip
    assert kwargs == {}
    wide, _ = converted(torch.ops.aten.exp.default, (full,), {"dtype": torch.bfloat16}, torch.float64)
    assert wide[0].dtype == torch.float64


def test_softmax_of_a_half_to_float_stays_possible() -> None:
    func = torch.ops.aten._softmax.default
    args, _ = converted(func, (torch.ones(2, dtype=torch.half), 0, True), {}, torch.float32)
    assert torch.equal(func(*args), torch.full((2,), 0.5))


def test_promoted_makes_operands_of_a_product_one_type() -> None:
    mixed = (torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16))
    assert {a.dtype for a in promoted(mixed, "mm")} == {torch.float32}
    assert [a.dtype for a in promoted(mixed, "add")] == [torch.float32, torch.bfloat16]


def test_widened() -> None:
    assert widened(torch.ones(1, dtype=torch.half)).dtype == torch.float32
    assert widened(torch.ones(1, dtype=torch.double)).dtype == torch.float64
    assert widened(torch.ones(1, dtype=torch.int)).dtype == torch.int32
