"""Kernels of our own for CUDA devices: emulated on the CPU, and where there is a device, themselves.

With TRITON_INTERPRET=1, where Triton is installed, Triton's interpreter runs them on the CPU too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
import weakref
from typing import Any

import emulated_kernels
import pytest
import torch
from sequences import Ours, assert_alike, give, parameters
from torch import Tensor, nn, optim

from ampguard.engine.step import GradientCheck, LossScale, apply_update, check_for_update, one_pass
from ampguard.engine.step.fused import looks_at
from ampguard.engine.step.update import _step_on_device

SHAPES = [(6, 4), (5,), (130,), (64,), (3, 43)]


KINDS = ["emulated", *(["interpreted"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]


@pytest.fixture(params=KINDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    found: Any = emulated_kernels
    if request.param == "interpreted":
        from ampguard.engine.step import triton_kernels as found
    monkeypatch.setattr(one_pass, "_kernels", lambda: found)
    monkeypatch.setattr(one_pass, "_KIND", "cpu")
    monkeypatch.setattr(one_pass, "_given_up", [])
    monkeypatch.setattr(one_pass, "_is_here", lambda looks: not one_pass._given_up)
    return found


class InOnePass(Ours):
    """As on a device; fails where PyTorch's kernels are taken instead."""

    refused = False

    def step(self, gradients: Any, max_norm: float | None, **more: Any) -> None:
        give(self.parameters, gradients)
        check = self.check(max_norm)
        looks = looks_at(self.optimizer)
        taken = one_pass.adam_in_one_pass(self.optimizer, looks, check, max_norm, 1e-6)
        if not taken:  # the first step begins the state, by PyTorch's
            self.refused = True
            _step_on_device(self.optimizer, check, max_norm, write_back=False)
        self.loss_scale.update([check.found_inf])

    def check(self, max_norm: float | None) -> GradientCheck:
        looks = looks_at(self.optimizer)
        check = one_pass.check_in_one_pass(looks, self.loss_scale.value, max_norm is not None)
        assert check is not None, one_pass._given_up
        return check


@pytest.mark.parametrize("max_norm", [None, 1.0, float("inf")])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.AdamW, {"weight_decay": 0.1}),
        (optim.Adam, {"weight_decay": 0.1, "betas": (0.0, 0.99)}),
        (optim.Adam, {"lr": 1}),
    ],
)
def test_computes_what_the_sequence_computes(kernels: Any, kind: Any, options: Any, max_norm: float | None) -> None:
    here, there = Ours(parameters(SHAPES), kind, **options), InOnePass(parameters(SHAPES), kind, **options)
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        gradients: list[Tensor | None] = [torch.randn(shape, generator=generator) * 1024 for shape in SHAPES]
        if number in (0, 2):
            gradients[2][7] = torch.nan if number else torch.inf  # type: ignore[index]
        if number == 3:
            gradients[1] = None
        here.step(gradients, max_norm)
        there.refused = False
        there.step(gradients, max_norm)
        assert there.refused == (number == 0)
    assert all(p.isfinite().all() for p in there.parameters)
    assert here.loss_scale.state_dict() == there.loss_scale.state_dict()
    assert_alike(here, there, 2e-6)


def test_groups_step_with_their_own_options_and_one_norm(kernels: Any) -> None:
    pair = []
    for kind in (Ours, InOnePass):
        held = parameters(SHAPES)
        groups: Any = [{"params": held[:2], "lr": 0.1}, {"params": held[2:], "weight_decay": 0.5}]
        one = kind(held, lambda _, groups=groups: optim.AdamW(groups))  # type: ignore[arg-type]
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            one.step([torch.randn(shape, generator=generator) * 1024 for shape in SHAPES], 0.5)
        pair.append(one)
    assert not isinstance(pair[1], InOnePass) or pair[1].refused
    assert_alike(*pair, 2e-6)


def test_the_norm_of_huge_gradients_does_not_overflow(kernels: Any) -> None:
    p = nn.Parameter(torch.zeros(100))
    p.grad = torch.full((100,), 1e30)
    looks = looks_at(optim.Adam([p]))
    check = one_pass.check_in_one_pass(looks, torch.tensor(1024.0), True)
    assert check is not None
    assert check.norm is not None
    assert check.norm.item() == pytest.approx(1e31 / 1024)
    assert (check.found_inf.item(), check.inverse_scale.item()) == (0.0, 1 / 1024)


def test_a_state_that_was_replaced_is_stepped_where_it_is_now(kernels: Any) -> None:
    """Addresses of the step before would be memory of somebody else."""
    one = InOnePass(parameters(SHAPES), optim.AdamW)
    for _ in range(3):
        one.step([torch.ones(shape) for shape in SHAPES], None)
    state = one.optimizer.state[one.parameters[2]]
    old = state["exp_avg"]
    before = old.clone()
    state["exp_avg"] = torch.zeros_like(old)
    one.parameters[0].data = one.parameters[0].data.clone()
    one.refused = False
    one.step([torch.full(shape, 2048.0) for shape in SHAPES], None)
    assert not one.refused
    assert torch.equal(old, before)
    torch.testing.assert_close(state["exp_avg"], torch.full_like(old, 0.2))


def test_autograd_notices_that_parameters_were_written_to(kernels: Any) -> None:
    one = InOnePass(parameters(SHAPES), optim.AdamW)
    for _ in range(2):
        one.step([torch.ones(shape) for shape in SHAPES], None)
    loss = (one.parameters[0] ** 2).sum()
    one.step([torch.ones(shape) for shape in SHAPES], None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "how",
    ["amsgrad", "maximize", "half", "slice", "profiler", "hook", "shifted", "first step", "max_norm 0", "their scale"],
)
def test_what_does_not_suit_is_left_to_pytorch(kernels: Any, how: str) -> None:
    options = {how: True} if how in ("amsgrad", "maximize") else {}
    held = parameters(SHAPES)
    if how == "half":
        held = [nn.Parameter(p.detach().half()) for p in held]
    if how == "slice":
        held[0] = nn.Parameter(torch.randn(6, 8)[:, ::2])
    if how == "shifted":
        held[0] = nn.Parameter(torch.randn(25)[1:].view(6, 4))
    optimizer = optim.AdamW(held, **options)
    for p in held:
        p.grad = torch.ones_like(p)
    if how != "first step":
        optimizer.step()
    if how == "their scale":
        optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    if how == "hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    looks = looks_at(optimizer)
    check = check_for_update([optimizer], held, torch.tensor(1024.0), 1.0)
    before = [p.detach().clone() for p in held]
    max_norm = 0.0 if how == "max_norm 0" else 1.0
    watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with warnings.catch_warnings(), watched if how == "profiler" else contextlib.nullcontext():
        warnings.simplefilter("ignore")  # PyTorch 2.11's of its own profiler
        assert not one_pass.adam_in_one_pass(optimizer, looks, check, max_norm, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_a_kernel_that_fails_is_tried_once(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, no folder to write to: Triton raises anything."""

    class Broken:
        def __getitem__(self, _: Any) -> Any:
            raise OSError("gcc: not found")

    here, there = Ours(parameters(SHAPES), optim.AdamW), InOnePass(parameters(SHAPES), optim.AdamW)
    gradients: list[Tensor | None] = [torch.randn(shape) * 1024 for shape in SHAPES]
    for one in (here, there):
        one.step(gradients, 1.0)

    class Half:
        look_kernel, conclude_kernel, adam_kernel = kernels.look_kernel, kernels.conclude_kernel, Broken()
        CHUNK, BLOCK, PARTS = kernels.CHUNK, kernels.BLOCK, kernels.PARTS

    monkeypatch.setattr(one_pass, "_kernels", lambda: Half)
    for one in (here, there):
        one.step(gradients, 1.0)
    assert one_pass._given_up == ["OSError: gcc: not found"]
    assert_alike(here, there, 2e-6)
    assert one_pass.check_in_one_pass(looks_at(there.optimizer), None, True) is None


@pytest.mark.parametrize("how", ["short", "half", "with gaps"])
def test_a_state_that_was_replaced_by_another_kind_is_not_written_to(kernels: Any, how: str) -> None:
    one = InOnePass(parameters(SHAPES), optim.AdamW)
    for _ in range(2):
        one.step([torch.ones(shape) for shape in SHAPES], None)
    state = one.optimizer.state[one.parameters[2]]
    other = {"short": torch.zeros(3), "half": torch.zeros(130).half(), "with gaps": torch.zeros(260)[::2]}[how]
    state["exp_avg"] = other
    give(one.parameters, [torch.ones(shape) for shape in SHAPES])
    check = one.check(None)
    assert not one_pass.adam_in_one_pass(one.optimizer, looks_at(one.optimizer), check, None, 1e-6)
    assert not other.any()


def test_a_default_device_of_the_script_is_not_that_of_the_tables(kernels: Any) -> None:
    one = InOnePass(parameters(SHAPES), optim.AdamW)
    gradients = [torch.ones(shape) for shape in SHAPES]
    one.step(gradients, 1.0)
    one.refused = False
    torch.set_default_device("meta")
    try:
        give(one.parameters, gradients)
        check = one.check(1.0)
        assert one_pass.adam_in_one_pass(one.optimizer, looks_at(one.optimizer), check, 1.0, 1e-6)
    finally:
        torch.set_default_device(None)
    assert not one_pass._given_up


def test_tables_that_cannot_be_sent_are_given_up(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: Any) -> Any:
        raise RuntimeError("no memory could be pinned")

    monkeypatch.setattr(one_pass.Tables, "_sent", send)
    here, there = Ours(parameters(SHAPES), optim.AdamW), InOnePass(parameters(SHAPES), optim.AdamW)
    gradients: list[Tensor | None] = [torch.randn(shape) * 1024 for shape in SHAPES]
    for _ in range(2):
        here.step(gradients, 1.0)
        give(there.parameters, gradients)
        assert one_pass.check_in_one_pass(looks_at(there.optimizer), there.loss_scale.value, True) is None
        Ours.step(there, gradients, 1.0)
    assert one_pass._given_up == ["RuntimeError: no memory could be pinned"]
    assert_alike(here, there)


def test_tables_are_forgotten_with_their_optimizer(kernels: Any) -> None:
    one = InOnePass(parameters(SHAPES), optim.AdamW)
    for _ in range(2):
        one.step([torch.ones(shape) for shape in SHAPES], 1.0)
    layout = looks_at(one.optimizer)[0].layout
    table = weakref.ref(layout.kept["tables"])
    del one, layout
    gc.collect()
    assert table() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam])
def test_on_a_device(kind: Any, max_norm: float | None) -> None:
    """With the bytes that PyTorch's own optimizer is given, for sizes about those of a chunk; and without waiting."""
    shapes = [(3,), (1024,), (1025,), (8191,), (8192,), (8193,), (300, 257), ()]
    held = {name: [nn.Parameter(p.detach().cuda()) for p in parameters(shapes)] for name in ("ours", "theirs")}
    optimizers = {name: kind(ps, weight_decay=0.1, fused=name == "theirs") for name, ps in held.items()}
    optimizers["ours"] = kind(held["ours"], weight_decay=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))
    scale = LossScale("cuda", init_scale=1024.0)
    for number in range(5):
        torch.manual_seed(number)
        for p, q in zip(held["ours"], held["theirs"], strict=True):
            p.grad = torch.randn_like(p) * 1024
            q.grad = p.grad.clone()
        if number in (0, 3):
            held["ours"][5].grad[7] = held["theirs"][5].grad[7] = torch.inf if number else torch.nan
        if max_norm is not None:
            scaler.unscale_(optimizers["theirs"])
            nn.utils.clip_grad_norm_(held["theirs"], max_norm)
        scaler.step(optimizers["theirs"])
        scaler.update()
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            check = check_for_update([optimizers["ours"]], held["ours"], scale.value, max_norm)
            apply_update(optimizers["ours"], check, max_norm)
            scale.update([check.found_inf])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for p, q in zip(held["ours"], held["theirs"], strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
        assert float(scale.value) == scaler.get_scale()
    assert not one_pass._given_up
    states = [list(optimizers[name].state.values()) for name in ("ours", "theirs")]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)
