"""MAE's, Swin's, SimMIM's, VMamba's and timm's one-call scaler, against PyTorch's own calls and a float64 truth."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from digits_loops import TorchScaler, accuracy, batches, furthest, loss_of, network, train, weights
from torch import Tensor, nn

import ampguard
from ampguard.errors import NonfiniteError, ProtocolError, SetupError
from ampguard.integrations.scaler import EngineScaler
from ampguard.integrations.timm import NativeScaler, NativeScalerWithGradNormCount

SGD = torch.optim.SGD


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_as_pytorchs_own_calls(window: int, limit: float | None) -> None:
    ours, torchs = network(), network()
    kind, other = NativeScalerWithGradNormCount(), TorchScaler()
    norms = train(kind, ours, SGD(ours.parameters(), 0.05, momentum=0.9), window=window, bad=(9,), clip_grad=limit)
    truth = train(other, torchs, SGD(torchs.parameters(), 0.05, momentum=0.9), window=window, bad=(9,), clip_grad=limit)
    assert [n is None for n in norms] == [n is None for n in truth]
    assert [math.isfinite(n) for n in norms if n is not None].count(False) == 1
    finite = [(a, b) for a, b in zip(norms, truth, strict=True) if b is not None and math.isfinite(b)]
    assert all(a == pytest.approx(b, rel=1e-2) for a, b in finite)
    assert kind.get_scale() == other.scaler.get_scale() == 2.0**15
    assert furthest(ours, torchs) < 2e-3


def test_the_norm_is_that_of_the_true_gradients() -> None:
    model, data = network(), list(batches(3))
    exact = copy.deepcopy(model).double()
    for x, y in data:
        (nn.functional.cross_entropy(exact(x.double()), y) / 3).backward()
    truth = float(torch.nn.utils.get_total_norm([p.grad for p in exact.parameters()]))
    scaler, optimizer = NativeScalerWithGradNormCount(), SGD(model.parameters(), 0.0)
    returned = [
        scaler(loss_of(model, batch) / 3, optimizer, clip_grad=1e-3, parameters=model.parameters(), update_grad=last)
        for batch, last in zip(data, (False, False, True), strict=True)
    ]
    assert returned[:2] == [None, None]
    assert isinstance(returned[2], Tensor)
    assert float(returned[2]) == pytest.approx(truth, rel=5e-3)
    left = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(left) == pytest.approx(1e-3, rel=1e-3)  # what a loop reads afterwards is unscaled and clipped


def by_value(parameters: list[Tensor], limit: float) -> None:
    torch.nn.utils.clip_grad_value_(parameters, limit)


@pytest.mark.parametrize("window", [1, 2])
def test_clipping_by_value_skips_what_a_clamp_would_hide(window: int) -> None:
    """A scale that is too high makes gradients Inf, and a clamp makes them look like any other."""
    ours, torchs = network(), network()
    scaler, other = NativeScaler(init_scale=2.0**24), TorchScaler(by_value)
    other.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    words: dict[str, Any] = {"window": window, "clip_grad": 0.01}
    train(scaler, ours, SGD(ours.parameters(), 0.1), clip_mode="value", word="need_update", **words)
    train(other, torchs, SGD(torchs.parameters(), 0.1), **words)
    assert scaler.get_scale() == other.scaler.get_scale() < 2.0**22
    assert furthest(ours, torchs) < 1e-6


def test_only_the_given_parameters_are_clipped() -> None:
    model, other = network(), network()
    head = list(model[-1].parameters())
    norm = NativeScaler()(loss_of(model, next(batches(1))), SGD(model.parameters(), 0.0), 1e-3, parameters=head)
    loss_of(other, next(batches(1))).backward()
    truth = torch.nn.utils.get_total_norm([p.grad for p in other[-1].parameters()])
    assert float(norm) == pytest.approx(float(truth), rel=1e-2)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in head])) == pytest.approx(1e-3, rel=1e-3)
    assert torch.allclose(model[0].weight.grad, other[0].weight.grad, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_what_is_left_out_is_not_clipped(level: str, mode: str) -> None:
    """timm leaves the head out; in O2 the optimizer holds master weights, not the parameters that it is given here."""
    model, other, data = network(), network(), next(batches(1))
    optimizer = SGD(model.parameters(), 0.0)
    amp = ampguard.precision(level)
    amp.prepare(model, optimizer)
    head = list(model[-1].parameters())
    held = [p for p in optimizer.param_groups[0]["params"] if any(amp.weight_of(p) is weight for weight in head)]
    with amp.autocast():
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
    norm = NativeScaler(precision=amp, init_scale=128.0)(loss, optimizer, 1e-4, mode, list(model[:-1].parameters()))
    loss_of(other, data, torch.float32).backward()
    truth = torch.nn.utils.get_total_norm([p.grad for p in other[:-1].parameters()])
    assert float(norm) == pytest.approx(float(truth), rel=2e-2)
    for p, exact in zip(held, other[-1].parameters(), strict=True):
        assert torch.allclose(p.grad.float(), exact.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_given_parameters_that_this_loss_does_not_reach(mode: str) -> None:
    """As with PyTorch's clipping: their norm is 0, and nothing is clipped."""
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    loss = model[0](torch.ones(2, 4)).mean()
    norm = NativeScaler()(loss, SGD(model.parameters(), 0.0), 1e-3, mode, model[1].parameters())
    assert float(norm) == 0.0
    assert torch.equal(model[0].weight.grad, torch.ones(1, 4))


def test_both_orders_of_arguments() -> None:
    model = network()
    optimizer, data = SGD(model.parameters(), 0.1), next(batches(1))
    assert (
        NativeScalerWithGradNormCount()(loss_of(model, data), optimizer, 1.0, model.parameters(), False, False) is None
    )
    optimizer.zero_grad()
    assert NativeScaler()(loss_of(model, data), optimizer, 1.0, "agc", model.parameters(), False, False) is None
    optimizer.zero_grad()
    assert NativeScalerWithGradNormCount()(loss_of(model, data), optimizer, clip_mode="agc", need_update=False) is None
    with pytest.raises(SetupError, match="'norm', 'value', 'agc'"):
        NativeScaler()(loss_of(model, data), optimizer, 1.0, "nrm")


@pytest.mark.filterwarnings("error")
def test_a_limit_may_be_a_tensor() -> None:
    model, same = network(), network()
    limits: list[tuple[nn.Module, Any]] = [(model, 0.01), (same, torch.tensor(0.01))]
    for part, limit in limits:
        optimizer = torch.optim.SGD(part.parameters(), 0.1)
        NativeScaler()(loss_of(part, next(batches(1))), optimizer, clip_grad=limit, parameters=part.parameters())
    assert furthest(model, same) < 1e-8


def test_swins_zero_means_no_clipping() -> None:
    model, same = network(), network()
    train(NativeScalerWithGradNormCount(), model, SGD(model.parameters(), 0.1), 4, clip_grad=0.0)
    train(NativeScalerWithGradNormCount(), same, SGD(same.parameters(), 0.1), 4)
    assert furthest(model, same) == 0.0


def test_a_state_of_pytorchs_scaler_is_loaded_and_the_other_way_round() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    theirs.scale(torch.ones(()))
    scaler = NativeScalerWithGradNormCount()
    checkpoint = {scaler.state_dict_key: theirs.state_dict()}
    scaler.load_state_dict(checkpoint["amp_scaler"])
    assert scaler.get_scale() == 512.0
    model = network()
    train(scaler, model, SGD(model.parameters(), 0.01), 3)
    assert scaler.get_scale() == 1024.0
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 1024.0


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, NativeScalerWithGradNormCount]:
        model = network()
        return model, torch.optim.AdamW(model.parameters(), 1e-3), NativeScalerWithGradNormCount(growth_interval=6)

    whole, optimizer, scaler = made()
    train(scaler, whole, optimizer, 8)
    train(scaler, whole, optimizer, 8)
    at_its_end = scaler.get_scale()
    half, optimizer, scaler = made()
    train(scaler, half, optimizer, 8)
    states = copy.deepcopy((half.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    rest, optimizer, scaler = made()
    for part, state in zip((rest, optimizer, scaler), states, strict=True):
        part.load_state_dict(state)
    train(scaler, rest, optimizer, 8)
    assert furthest(whole, rest) == 0.0
    assert scaler.get_scale() == at_its_end != 2.0**16


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_resumed_run_of_low_precision_weights(level: str) -> None:
    """As these projects load a checkpoint: the model, the optimizer, then the scaler."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, NativeScaler, Any]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)
        amp = ampguard.precision(level)
        amp.prepare(model, optimizer)
        return model, optimizer, NativeScaler(precision=amp, init_scale=128.0), amp

    def run(stop: int) -> list[Tensor]:
        model, optimizer, scaler, amp = made()
        for number, batch in enumerate(batches(6)):
            if number == stop:
                states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
                model, optimizer, scaler, amp = made()
                for part, state in zip((model, optimizer, scaler), states, strict=True):
                    part.load_state_dict(state)
            with amp.autocast():
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            scaler(loss, optimizer)
            optimizer.zero_grad()
        return [p.detach() for group in optimizer.param_groups for p in group["params"]]

    assert all(map(torch.equal, run(-1), run(3)))


def test_a_scaler_that_was_off_leaves_the_scale() -> None:
    scaler = NativeScaler()
    scaler.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    scaler.load_state_dict(NativeScaler(precision="bf16").state_dict())
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_without_a_loss_scale_bad_steps_are_left_out_too(precision: str, dtype: torch.dtype) -> None:
    model = network()
    scaler = NativeScalerWithGradNormCount(precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(scaler, model, optimizer, 60, dtype=dtype, clip_grad=5.0)
    assert scaler.state_dict()["scale"] == 1.0  # Swin logs it
    before = weights(model)
    x, y = next(batches(1))
    x[0, 0, 0, 0] = torch.nan
    norm = scaler(loss_of(model, (x, y), dtype), optimizer, parameters=model.parameters())
    assert math.isnan(float(norm))
    assert scaler.result.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert accuracy(model) > 0.8


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_low_precision_weights(level: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)
    amp = ampguard.precision(level)
    amp.prepare(model, optimizer)
    scaler = NativeScalerWithGradNormCount(precision=amp, init_scale=128.0)
    first = next(batches(1))
    for batch in batches(40):
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        norm = scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
    assert model[0].weight.dtype == torch.float16
    assert 0.1 < float(norm) < 20.0
    with torch.no_grad(), amp.autocast():
        assert float(nn.functional.cross_entropy(model(first[0]), first[1])) < 1.6  # from 2.3
    with pytest.raises(ampguard.EngineError, match="prepare"):
        NativeScaler(precision=level)


@pytest.mark.parametrize("is_made_first", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_float16_weights_are_updated_in_float32(is_made_first: bool, window: int) -> None:
    """In float16 the squares of these gradients are 0, and so is AdamW's eps: its updates were many times too large."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    amp = ampguard.precision("O3")
    scaler = NativeScaler(precision=amp) if is_made_first else None
    amp.prepare(model, optimizer)
    scaler = scaler or NativeScaler(precision=amp)
    assert optimizer.param_groups[0]["eps"] == 1e-8
    exact = network().double()
    start = [p.detach().clone() for p in exact.parameters()]
    its_optimizer = torch.optim.AdamW(exact.parameters(), 1e-3)
    for number, (x, y) in enumerate(batches(12)):
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(x), y) / window
        ends = (number + 1) % window == 0
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=ends)
        (nn.functional.cross_entropy(exact(x.double()), y) / window).backward()
        if ends:
            optimizer.zero_grad()
            torch.nn.utils.clip_grad_norm_(exact.parameters(), 1.0)
            its_optimizer.step()
            its_optimizer.zero_grad()
    moved = torch.cat([(p.detach() - s).flatten() for p, s in zip(exact.parameters(), start, strict=True)])
    apart = torch.cat(
        [(p.detach() - q.detach()).flatten() for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
    )
    assert float(apart.norm() / moved.norm()) < 0.1
    assert {t.dtype for t in optimizer.state[model[0].weight].values()} == {torch.float32}


def test_gradients_that_wait_for_their_step_follow_the_scale() -> None:
    """A generator accumulates while the discriminator's overflow halves the scale they share."""
    model, critic = network(), network()
    optimizer, other = SGD(model.parameters(), 0.1), SGD(critic.parameters(), 0.1)
    scaler = NativeScalerWithGradNormCount()
    first, second = batches(2)
    scaler(loss_of(model, first) / 2, optimizer, update_grad=False)
    scaler(loss_of(critic, next(batches(1, bad=(0,)))), other)
    assert scaler.get_scale() == 2.0**15
    norm = scaler(loss_of(model, second) / 2, optimizer)
    exact = network()
    (loss_of(exact, first) / 2 + loss_of(exact, second) / 2).backward()
    truth = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters()])
    assert float(norm) == pytest.approx(float(truth), rel=1e-2)


def test_gradients_inside_a_window_follow_a_scale_that_is_loaded() -> None:
    model, (first, second) = network(), batches(2)
    optimizer, scaler = SGD(model.parameters(), 0.1), NativeScalerWithGradNormCount()
    scaler(loss_of(model, first) / 2, optimizer, update_grad=False)
    scaler.load_state_dict(NativeScalerWithGradNormCount(init_scale=2.0**8).state_dict())
    norm = scaler(loss_of(model, second) / 2, optimizer)
    exact = network()
    (loss_of(exact, first) / 2 + loss_of(exact, second) / 2).backward()
    truth = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters()])
    assert float(norm) == pytest.approx(float(truth), rel=1e-2)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_order_optimizers_get_a_graph() -> None:
    """AdaHessian differentiates the gradients, as timm and Swin let it with `create_graph`."""
    model = nn.Linear(4, 1)

    class WithCurvature(SGD):
        def step(self, closure: None = None) -> None:
            held = [p for group in self.param_groups for p in group["params"]]
            self.curvature = torch.autograd.grad([p.grad for p in held], held, [torch.ones_like(p) for p in held])

    optimizer = WithCurvature(model.parameters(), 0.1)
    NativeScaler()(model(torch.ones(8, 4)).pow(2).mean(), optimizer, create_graph=True)
    assert all(bool(c.abs().sum() > 0) for c in optimizer.curvature)
    optimizer.zero_grad()


def test_no_gradients_says_why() -> None:
    model = network()
    optimizer = SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(ProtocolError, match=r"none of its 2 parameters has a gradient.*(\n.*)*no-gradients"):
        NativeScaler()(loss_of(model, next(batches(1))), optimizer)


def test_a_run_that_cannot_go_on_ends() -> None:
    model = network()
    optimizer = SGD(model.parameters(), 0.1)
    with pytest.raises(NonfiniteError, match="5 steps in a row"):
        train(NativeScaler(patience=5), model, optimizer, 8, bad=tuple(range(8)), word="need_update")
    optimizer.zero_grad()
    scaler = NativeScaler(patience=None)
    train(scaler, model, optimizer, 40, bad=tuple(range(40)), word="need_update")
    assert scaler.get_scale() == 2.0**-24  # not 0, from which no scale recovers


def test_so_many_in_a_row_are_steps_of_one_optimizer() -> None:
    """Two of a kind: the good steps of one do not end the other's row."""
    scaler = EngineScaler("fp16", patience=4)
    nets = [torch.nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]

    def step() -> None:
        for net, optimizer, factor in zip(nets, optimizers, (float("nan"), 1.0), strict=True):
            optimizer.zero_grad()
            scaler.backward(net(torch.ones(2, 4)).mean() * factor)
            scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step()
    with pytest.raises(NonfiniteError, match="4 steps in a row"):
        step()
