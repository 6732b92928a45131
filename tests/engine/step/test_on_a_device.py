"""The step on an accelerator: nothing asks for a number.

Shown with PyTorch's fake CUDA tensors, which have none, where PyTorch's kernels know fakes; and for all by the code for
accelerators on CPU tensors, under a mode that refuses to give a number away.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequences import Ours, assert_alike, give, parameters
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampguard.engine.step import LossScale, RoundedUpdate, apply_update, check_for_update, check_gradients, kernels
from ampguard.engine.step import layout as layout_module
from ampguard.engine.step.fused import Way, way_of
from ampguard.engine.step.gradients import _on_device
from ampguard.engine.step.update import _step_on_device

KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {"amsgrad": True}),
    "AdamW, fused": (optim.AdamW, {"fused": True}),
    "Adagrad": (optim.Adagrad, {}),
}


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake tensors on a device for which this build of PyTorch may have no kernels: say that it has."""
    monkeypatch.setattr(kernels, "has_kernel", lambda *_: True)
    monkeypatch.setattr(kernels, "_sound", {})
    plain = layout_module._PLAIN
    mode = FakeTensorMode()
    with mode:
        fake = type(torch.empty(1))
    monkeypatch.setattr(layout_module, "_PLAIN", plain | {fake})
    return mode


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("Adam")])
def test_nothing_is_asked_of_cuda(name: str, max_norm: float | None, write_back: bool, fake_cuda: Any) -> None:
    kind, options = KINDS[name]
    with fake_cuda:
        held = [nn.Parameter(torch.empty(4, 3, device="cuda")), nn.Parameter(torch.empty(5, device="cuda"))]
        optimizer = kind(held, **options)
        loss_scale = LossScale("cuda")
        for _ in range(2):
            for p in held:
                p.grad = torch.empty_like(p)
            check = check_gradients(held, loss_scale.value)
            assert check.norm.device.type == check.found_inf.device.type == "cuda"
            assert way_of(optimizer) is Way.FUSED
            apply_update(optimizer, check, max_norm, write_back=write_back)
            loss_scale.update([check.found_inf])
        for p in held:
            step = optimizer.state[p].get("step")
            assert step is None or step.device == p.device
        with pytest.raises(DataDependentOutputException):
            check.norm.item()  # the fakes do notice it


def test_without_a_kernel_the_verdict_is_read(fake_cuda: Any) -> None:
    with fake_cuda:
        p = nn.Parameter(torch.empty(4, device="cuda"))
        p.grad = torch.empty_like(p)
        with pytest.raises(DataDependentOutputException):
            apply_update(optim.RMSprop([p]), check_gradients([p]))


@pytest.mark.parametrize("kind", [optim.AdamW, optim.RMSprop])
def test_a_check_without_norm_asks_nothing(kind: Any, fake_cuda: Any) -> None:
    with fake_cuda:
        held = [nn.Parameter(torch.empty(4, device="cuda")), nn.Parameter(torch.empty(2, 3, device="cuda"))]
        for p in held:
            p.grad = torch.empty_like(p)
        check = check_for_update([kind(held)], held, torch.empty((), device="cuda"))
        assert check.norm is None
        assert check.found_inf.device.type == check.inverse_scale.device.type == "cuda"


def test_dampening_that_spares_the_first_gradient_is_not_fused(fake_cuda: Any) -> None:
    with fake_cuda:
        p = nn.Parameter(torch.empty(4, device="cuda"))
        p.grad = torch.empty_like(p)
        assert way_of(optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5)) is Way.PLAIN


@pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="PyTorch makes a context for fake tensors too: no second GPU"
)
def test_several_devices(fake_cuda: Any) -> None:
    with fake_cuda:
        held = [nn.Parameter(torch.empty(4, device=d)) for d in ("cpu", "cuda:1", "cuda:0")]
        for p in held:
            p.grad = torch.empty_like(p)
        check = check_gradients(held, torch.empty((), device="cuda:0"))
        assert check.norm.device == torch.device("cuda:1")


class OnDevice(Ours):
    """Ours by the code for accelerators, on the CPU, where its results can be seen."""

    def step(self, gradients: Any, max_norm: float | None, **more: Any) -> None:
        give(self.parameters, gradients)
        found = [p.grad for p in self.parameters if p.grad is not None]
        check = _on_device(found, self.loss_scale.value)
        _step_on_device(self.optimizer, check, max_norm, more.get("write_back", False))
        self.loss_scale.update([check.found_inf])


class Silent(TorchDispatchMode):
    """Gives no number away: neither `.item()` nor a branch on a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a number was asked for")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_asked(name: str, max_norm: float | None) -> None:
    kind, options = KINDS[name]
    device = OnDevice(parameters([(6, 4), (5,)]), kind, **options)
    for kernel_dtype in (torch.float32, torch.bfloat16):
        kernels.is_sound(kernels.family(kind), "cpu", kernel_dtype)  # type: ignore[arg-type]
    with Silent():
        for _ in range(3):
            device.step([torch.randn(6, 4), torch.randn(5)], max_norm)
    with pytest.raises(AssertionError, match="asked for"), Silent():
        device.loss_scale.state_dict()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rounding_asks_nothing(rounding: Any) -> None:
    p = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    update = RoundedUpdate(optim.AdamW([p]), rounding)
    kernels.is_sound(optim.AdamW, "cpu", torch.float32)
    with Silent():
        for _ in range(2):
            p.grad = torch.ones_like(p)
            check = _on_device([p.grad], None)
            with update.in_float32():
                _step_on_device(update.optimizer, check, 1.0, write_back=False)
    assert p.float().mean() < 1.0


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", [*KINDS, "RMSprop"])
def test_computes_the_same_as_on_the_cpu(name: str, max_norm: float | None) -> None:
    kind, options = KINDS.get(name, (optim.RMSprop, {}))
    shapes = [(6, 4), (5,)]
    here, there = Ours(parameters(shapes), kind, **options), OnDevice(parameters(shapes), kind, **options)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        gradients: list[Tensor] = [torch.randn(shape, generator=generator) * 1024 for shape in shapes]
        if number in (0, 2):
            gradients[1][0] = torch.nan  # also in the first step, when there is no state yet
        here.step(gradients, max_norm)
        there.step(gradients, max_norm)
        for a, b in zip(here.parameters, there.parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert all(p.isfinite().all() for p in there.parameters)
    assert here.loss_scale.state_dict() == there.loss_scale.state_dict()
    assert_alike(here, there)


def test_shards_add_up() -> None:
    """DTensor's norm is over all shards; with one process there is one."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without distributed")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        p = nn.Parameter(distributed.distribute_tensor(torch.zeros(8, 2), mesh, [distributed.Shard(0)]))
        q = nn.Parameter(torch.zeros(3))
        p.grad = distributed.distribute_tensor(torch.full((8, 2), 8.0), mesh, [distributed.Shard(0)])
        q.grad = torch.full((3,), 8.0)
        check = check_gradients([p, q], torch.tensor(8.0))
        assert type(check.norm) is Tensor
        torch.testing.assert_close(check.norm, torch.tensor(19.0).sqrt())
        apply_update(optim.SGD([p], lr=1.0), check)
        assert torch.equal(p.full_tensor(), -torch.ones(8, 2))  # type: ignore[operator]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_a_look_without_norm_is_the_kernels(dtype: torch.dtype, bad: float | None) -> None:
    gradients = [torch.randn(6, 4).to(dtype), torch.randn(5).to(dtype)]
    if bad is not None:
        gradients[1][3] = bad
    before = [g.clone() for g in gradients]
    with Silent():
        check = _on_device(gradients, torch.tensor(3.0), wants_norm=False, is_plain=True)
    whole = _on_device(gradients, torch.tensor(3.0))
    assert check.norm is None
    assert torch.equal(check.found_inf, whole.found_inf)
    assert torch.equal(check.inverse_scale, whole.inverse_scale)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(gradients, before, strict=True))
    assert float(check.found_inf) == (bad is not None)
