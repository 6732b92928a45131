"""A script's precision is overridden: what runs is what the script would be had its author written it so."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import override_loops as loops
import pytest
import torch
import torch.utils.checkpoint
from override_loops import DTYPES, batches, model, train_by_hand, train_plain, train_with_amp, weights
from torch import Tensor, nn


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(weights(one), weights(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("written", ["fp16", "bf16"])
def test_a_script_with_amp(overridden: Callable[..., Any], written: str, wanted: str) -> None:
    control = train_with_amp(wanted)
    with overridden(wanted):
        net = train_with_amp(written)
    assert_equal(net, control)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_computes_again_as_it_computed(overridden: Callable[..., Any], use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=use_reentrant)

    def train(net: nn.Module) -> nn.Module:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, y in batches(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.requires_grad_()), y).backward()
            optimizer.step()
        return net

    with overridden("fp16"):
        control = train(model())
        assert_equal(train(Checkpointed()), control)


def with_decorator(device: str, dtype: torch.dtype) -> Any:
    """An `@autocast` function, entered by hand: the decorator is made before the region is entered."""
    return torch.amp.autocast(device, dtype=dtype)


def with_old_name(device: str, dtype: torch.dtype) -> Any:
    with pytest.warns(FutureWarning):
        return torch.cpu.amp.autocast(dtype=dtype)


@pytest.mark.parametrize("region", [with_decorator, with_old_name])
def test_every_constructor_of_autocast(overridden: Callable[..., Any], region: Callable[..., Any]) -> None:
    control = train_with_amp("bf16")
    with overridden("bf16"):
        net = train_with_amp("fp16", region=region)
    assert_equal(net, control)


def test_a_decorated_forward(overridden: Callable[..., Any]) -> None:
    with overridden("bf16"):
        net = nn.Linear(4, 4)

        @torch.autocast("cpu", dtype=torch.float16)
        def forward(x: torch.Tensor) -> torch.Tensor:
            return net(x)

        assert forward(torch.ones(1, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("spoilt", [None, 2])
def test_fp16_is_gained_bit_for_bit(overridden: Callable[..., Any], every: int, spoilt: int | None) -> None:
    """Scale, unscale, skip on Inf, two optimizers, accumulation, clipping: as PyTorch's own scaler does it."""
    control = train_by_hand(every=every, spoilt=spoilt)
    with overridden("fp16") as session:
        net = train_plain(every=every, spoilt=spoilt)
    assert_equal(net, control)
    told = session.report.run
    assert told["steps_held_off"] == (0 if spoilt is None else 1)
    assert "gained a dynamic loss scale" in told["did"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_a_script_without_amp_sees(overridden: Callable[..., Any], precision: str) -> None:
    """Models compute in low precision; outputs, gradients and their norms are float32 and unscaled."""
    net, (x, y) = model(), batches(1)[0]
    exact = model()
    nn.functional.cross_entropy(exact(x), y).backward()
    seen: list[torch.dtype] = []
    net[3].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x.requires_grad_()
    with overridden(precision):
        torch.optim.SGD(net[:2].parameters(), 0.1)  # the last layer is in no optimizer
        output = net(x)
        loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    assert (seen, output.dtype, loss.dtype) == ([DTYPES[precision]], torch.float32, torch.float32)
    wanted = torch.stack([p.grad.norm() for p in exact.parameters()]).norm()
    torch.testing.assert_close(norm, wanted, rtol=0.02, atol=0)
    for p, q in zip(net.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=5e-3)
    assert x.grad is not None
    assert x.grad.abs().max() < 1


def test_a_float32_island_stays_one(overridden: Callable[..., Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            with torch.autocast("cpu", enabled=False):
                assert self.two(x.float()).dtype == torch.float32
            return x

    with overridden("fp16"):
        Net()(torch.ones(1, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert Net()(torch.ones(1, 4)).dtype == torch.float16


def test_a_switched_off_region_does_not_keep_fp16_out(overridden: Callable[..., Any]) -> None:
    """`autocast(enabled=args.amp)` with the flag off, as Swin has it: the model is called inside it."""
    net = nn.Linear(4, 4)
    seen = []
    net.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with overridden("bf16"), torch.autocast("cpu", enabled=False):
        net(torch.ones(1, 4))
    assert seen == [torch.bfloat16]


def test_evaluation_outside_the_scripts_regions_stays_float32(overridden: Callable[..., Any]) -> None:
    with overridden("fp16"):
        net = train_with_amp("bf16", steps=1)
        with torch.no_grad():
            assert net(torch.ones(1, 8)).dtype == torch.float32
            assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("precision", "is_on"), [("fp16", True), ("bf16", False), ("fp32", False)])
def test_scalers(overridden: Callable[..., Any], precision: str, is_on: bool) -> None:
    with overridden(precision):
        for enabled in (True, False):
            scaler = torch.amp.GradScaler("cpu", enabled=enabled)
            assert scaler.is_enabled() is is_on
            scaler.load_state_dict({})  # of a checkpoint from another precision
            scaler.load_state_dict(scaler.state_dict())
    assert torch.amp.GradScaler("cpu").is_enabled()


def test_a_scaler_that_was_switched_off_still_has_a_state(overridden: Callable[..., Any]) -> None:
    """Swin's loop reads the scale of its scaler for the log, with AMP and without."""
    arguments = {"init_scale": 128.0, "growth_interval": 7}
    plain = torch.amp.GradScaler("cpu", **arguments).state_dict()
    with overridden("fp32"):
        assert torch.amp.GradScaler("cpu", **arguments).state_dict() == plain
        assert torch.amp.GradScaler("cpu", 128.0, 2.0, 0.5, 7).state_dict() == plain
        assert torch.amp.GradScaler("cpu", enabled=False).state_dict() == {}
    torch.amp.GradScaler("cpu").load_state_dict(plain)  # a checkpoint of that run, in one without overrides


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a scaler for CUDA is right")
def test_a_scaler_for_cuda_becomes_one_for_the_cpu(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        assert torch.amp.GradScaler().is_enabled()
    assert any("CUDA" in done for done in session.report.run["did"])


def train_converted(dtype: torch.dtype, in_region: bool, seen: set[torch.dtype]) -> nn.Module:
    """A script that has its weights in a low precision: it casts the inputs itself, or lets its autocast do that."""
    net = model().to(dtype)
    net[0].register_forward_hook(lambda _module, _args, output: seen.add(output.dtype))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype) if in_region else contextlib.nullcontext():
            output = net(x if in_region else x.to(dtype))
        assert output.dtype == dtype  # what comes after was written for it
        nn.functional.cross_entropy(output.float(), y).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("in_region", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["fp32", "fp16", "bf16", "O2", "O3"])
def test_a_model_in_a_low_precision_of_its_own_computes_in_what_is_asked(
    overridden: Callable[..., Any], wanted: str, dtype: torch.dtype, in_region: bool
) -> None:
    """Its weights stay what they are, in type and in how they are rounded."""
    seen: set[torch.dtype] = set()
    control = train_converted(dtype, in_region, set())
    with overridden(wanted) as session:
        net = train_converted(dtype, in_region, seen)
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert seen == {types.get(wanted, dtype)}
    assert {p.dtype for p in net.parameters()} == {dtype}
    if seen == {dtype} and wanted in types:
        assert_equal(net, control)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(weights(net), weights(control), strict=True))
    assert session.report.steps == 4


@pytest.mark.parametrize("precision", ["fp16", "O2", "O3"])
def test_a_scaler_that_is_off_over_float16_weights(overridden: Callable[..., Any], precision: str) -> None:
    """Its author has it off because GradScaler refuses float16 gradients; switched on it divides them all the same."""

    def train() -> nn.Module:
        net = model().half()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for x, y in batches(4):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(net(x.half()).float(), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return net

    control = train()
    with overridden(precision) as session:
        net = train()
    for mine, theirs in zip(weights(net), weights(control), strict=True):
        assert mine.dtype == torch.float16
        assert torch.allclose(mine, theirs, atol=2e-3)
    assert not session.report.incidents


def test_a_loss_inside_a_model_of_low_weights_keeps_its_digits(overridden: Callable[..., Any]) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(x)
            return nn.functional.cross_entropy(logits.float(), y), logits

    x, y = batches(1)[0]
    with overridden("fp32"):
        net = WithLoss().bfloat16()
        loss, logits = net(x.bfloat16(), y)
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    lifted = copy.deepcopy(net).float()
    assert torch.equal(loss, lifted(x.bfloat16().float(), y)[0])


def test_a_model_that_casts_to_its_own_type_is_left_alone(overridden: Callable[..., Any]) -> None:
    """As Fabric's wrapper does in `bf16-true`."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.dropout(x, 0.5).bfloat16())

    x = batches(1)[0][0]
    torch.manual_seed(1)
    net = Casts().bfloat16()
    expected = [net(x) for _ in range(2)]
    torch.manual_seed(1)
    with overridden("fp32") as session:
        net = Casts().bfloat16()
        assert all(map(torch.equal, expected, [net(x) for _ in range(2)]))
    (could_not,) = session.report.run["could_not"]
    assert "computes in the type of its own weights after all" in could_not


def test_what_cannot_be_overridden_is_said(overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with overridden("fp16") as session:
        half = nn.Linear(4, 4).half()
        half(torch.ones(1, 4).half())
        bf16 = nn.Linear(4, 4).bfloat16()
        bf16(torch.ones(1, 4).bfloat16())
        double = nn.Linear(4, 4).double()
        double(torch.ones(1, 4).double())
        net = nn.Linear(4, 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*create_graph")  # PyTorch says it once in a process
            net(torch.ones(1, 4)).sum().backward(create_graph=True)
    could_not = session.report.run["could_not"]
    assert could_not == [
        "the weights of Linear are float16 by the script's own doing: it computes in that type already, and its updates are "
        "rounded as before",
        "the weights of Linear are bfloat16 by the script's own doing: its calls run on float32 casts of them, its updates "
        "are rounded as before",
        "the weights of Linear are float64, which autocast leaves as they are",
        "a backward pass with create_graph=True runs without a loss scale",
    ]
    assert "not overridden: the weights of Linear are bfloat16" in capsys.readouterr().err


def test_a_model_that_is_gone_at_the_end_was_called(overridden: Callable[..., Any]) -> None:
    def main() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x in (1.0, 1e6, 1e6):
            optimizer.zero_grad()
            net(torch.full((1, 4), x)).sum().backward()
            optimizer.step()

    with overridden("fp16", max_incidents=1) as session:
        main()
        gc.collect()
    assert session.report.run["could_not"] == []


def test_lbfgs_trains_and_its_limits_are_said(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        net, (x, y) = model(), batches(1)[0]
        optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        first, last = closure().item(), None
        for _ in range(3):
            last = optimizer.step(closure).item()
    assert last < first
    assert any("LBFGS" in what for what in session.report.run["could_not"])


def test_a_closure_is_held_off_like_any_step(overridden: Callable[..., Any]) -> None:
    with overridden("fp16") as session:
        net, (x, y) = model(), batches(1)[0]
        before = weights(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def closure() -> torch.Tensor:
            loss = nn.functional.cross_entropy(net(x), y) * float("inf")
            loss.backward()
            return loss

        assert torch.isinf(optimizer.step(closure))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert session.report.run["steps_held_off"] == 1


PATCHED = [
    (nn.Module, "__call__"),
    (torch.autograd, "backward"),
    (torch.optim.Optimizer, "__init__"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.optim.SGD, "step"),
    (torch.amp.GradScaler, "__init__"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "step"),
    (torch.amp.GradScaler, "state_dict"),
    (torch.amp.GradScaler, "load_state_dict"),
    (torch.amp.autocast_mode.autocast, "__init__"),
]


def test_everything_is_put_back(overridden: Callable[..., Any]) -> None:
    torch.optim.SGD([torch.ones(1)], 0.1)  # PyTorch wraps a class's step when the first of it is made
    before = [vars(owner)[name] for owner, name in PATCHED]
    with overridden("fp16", on_nonfinite="skip"):
        train_plain(2)
        assert all(vars(owner)[name] is not was for (owner, name), was in zip(PATCHED, before, strict=True))
    assert [vars(owner)[name] for owner, name in PATCHED] == before


def test_losses_in_the_history_are_unscaled(overridden: Callable[..., Any]) -> None:
    from ampguard.report.history import read_history

    with overridden("fp16") as session:
        loops.train_plain()
        folder = session.path
    with read_history(folder) as history:
        rows = list(history.steps())
    assert len(rows) == 6
    assert all(row.loss is not None and 0.5 < row.loss < 3 for row in rows)
    assert {row.scale for row in rows} == {65536.0}


def test_nothing_is_changed_without_a_wish(overridden: Callable[..., Any]) -> None:
    control = train_with_amp("bf16")
    with overridden() as session, contextlib.nullcontext():
        net = train_with_amp("bf16")
    assert_equal(net, control)
    assert not isinstance(session.report.run, dict)


def test_a_fault_of_ours_does_not_end_the_training(
    overridden: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampguard.run.overrides.regions import Regions

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    control = train_plain()
    monkeypatch.setattr(Regions, "for_call", broken)
    with overridden("bf16") as session:
        net = train_plain()
    assert_equal(net, control)
    (said,) = session.report.run["could_not"]
    assert "a fault of ampguard's own (ZeroDivisionError: a bug)" in said


def test_older_optimizers_do_not_decide_about_a_loss(overridden: Callable[..., Any]) -> None:
    unused = torch.optim.SGD(nn.Linear(2, 2).half().parameters(), 0.1)
    with overridden("fp16") as session:
        loops.train_plain()
    assert session.report.run["could_not"] == []
    assert unused.param_groups


@pytest.mark.parametrize(
    ("precision", "with_amp", "did"),
    [
        (
            "fp32",
            True,
            ["switched off the script's GradScaler", "switched off the script's autocast regions in float16"],
        ),
        ("fp32", False, ["found no autocast region and no GradScaler to switch off"]),
        (
            "bf16",
            True,
            [
                "switched off the script's GradScaler",
                "made the script's autocast regions bfloat16 in place of float16",
            ],
        ),
        ("fp16", True, []),
    ],
)
def test_what_was_overridden_is_in_the_report(
    overridden: Callable[..., Any], precision: str, with_amp: bool, did: list[str]
) -> None:
    net, ((x, y),) = model(), batches(1)
    with overridden(precision) as session:
        scaler = torch.amp.GradScaler("cpu") if with_amp else None
        with torch.autocast("cpu", dtype=torch.float16) if with_amp else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(net(x), y)
        (scaler.scale(loss) if scaler is not None else loss).backward()
    assert session.report.run["did"] == did
