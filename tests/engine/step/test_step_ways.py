"""Which way an optimizer's step goes, and that it is right where a fused kernel would not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequences import SCALE, Ours, Theirs, assert_alike, copies, give, parameters
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ampguard
from ampguard.engine.step import apply_update, check_for_update, check_gradients, kernels
from ampguard.engine.step.fused import Way, way_of
from ampguard.engine.step.kernels import is_sound
from ampguard.engine.step.update import _step_on_device
from ampguard.errors import UsageError

SHAPES = [(6, 4), (5,)]


def one_step(p: Tensor, gradient: Tensor, kind: type[optim.Optimizer] = optim.SGD, **options: Any) -> Way:
    p.grad = gradient
    optimizer = kind([p], lr=1.0, **options)  # type: ignore[call-arg]
    way = way_of(optimizer)
    apply_update(optimizer, check_gradients([p], torch.tensor(4.0)))
    return way


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["default", "asked to be fused"])
def test_transposed_gradient(options: dict[str, Any]) -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    assert one_step(p, torch.tensor([[4.0, 8.0], [12.0, 16.0]]).t(), **options) is Way.PLAIN
    assert torch.equal(p, -torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["default", "asked to be fused"])
def test_parameter_that_is_part_of_a_larger_tensor(options: dict[str, Any]) -> None:
    whole = torch.zeros(4, 4)
    assert one_step(nn.Parameter(whole[:, :2]), torch.full((4, 2), 4.0), **options) is Way.PLAIN
    assert torch.equal(whole, torch.tensor([-1.0, -1.0, 0.0, 0.0]).expand(4, 4))


def test_state_of_another_layout() -> None:
    """Loaded from a model in channels last, it stays in channels last beside contiguous parameters."""
    shapes = [(2, 3, 4, 4)]
    theirs, ours = Theirs(parameters(shapes), optim.AdamW), Ours(parameters(shapes), optim.AdamW)
    gradients = [torch.randn(shapes[0]) * SCALE]
    for each in (theirs, ours):
        each.step(gradients, 1.0)
        saved = each.optimizer.state_dict()
        for key in ("exp_avg", "exp_avg_sq"):
            saved["state"][0][key] = saved["state"][0][key].to(memory_format=torch.channels_last)
        each.optimizer.load_state_dict(saved)
    give(ours.parameters, gradients)
    assert way_of(ours.optimizer) is Way.PLAIN
    for each in (theirs, ours):
        each.step([torch.randn(shapes[0], generator=torch.Generator().manual_seed(1)) * SCALE], 1.0)
    assert_alike(theirs, ours)


def test_channels_last_throughout_is_fused() -> None:
    p = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    before, gradient = p.detach().clone(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert one_step(p, gradient.clone(), momentum=0.9) is Way.FUSED
    torch.testing.assert_close(p.detach(), before - gradient / 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["default", "asked to be fused"])
def test_half_precision_sgd_reaches_every_element(dtype: torch.dtype, options: dict[str, Any]) -> None:
    p = nn.Parameter(torch.zeros(1000, dtype=dtype))
    one_step(p, torch.full((1000,), 4.0, dtype=dtype), **options)
    assert torch.equal(p, torch.full((1000,), -1.0, dtype=dtype))


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_kernels_of_float32_pass_their_trial(kind: type[optim.Optimizer]) -> None:
    assert is_sound(kind, "cpu", torch.float32)
    assert not is_sound(kind, "cpu", torch.complex64)
    assert not is_sound(kind, "abacus", torch.float32)


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}])
def test_a_choice_of_the_script_stands(options: dict[str, bool]) -> None:
    p = torch.ones(4)
    assert one_step(p, torch.ones(4), optim.Adam, **options) is Way.PLAIN


def test_subclass_with_an_update_of_its_own() -> None:
    class Halved(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] *= 0.5
            return super().step(closure)

    class Renamed(optim.SGD):
        pass

    p, q = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    assert one_step(p, torch.full((8,), 4.0), Halved) is Way.PLAIN
    assert torch.equal(p, torch.full((8,), -0.5))
    assert one_step(q, torch.full((8,), 4.0), Renamed) is Way.FUSED


def test_a_parameter_whose_first_gradient_comes_late() -> None:
    """PyTorch's fused SGD fails on it; the default one begins its momentum then."""
    for options in ({"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}):
        theirs = Theirs(parameters(SHAPES), optim.SGD, lr=0.1, **options)
        ours = Ours(parameters(SHAPES), optim.SGD, lr=0.1, **options)
        for number in range(4):
            gradients: list[Tensor | None] = [torch.randn(s) * SCALE for s in SHAPES]
            gradients[1] = gradients[1] if number >= 2 else None
            theirs.step(gradients, 1.0)
            ours.step(gradients, 1.0)
            assert_alike(theirs, ours)


def test_what_the_groups_say_is_as_before() -> None:
    ours = Ours(parameters(SHAPES), optim.AdamW)
    before = [dict(group) for group in ours.optimizer.param_groups]
    ours.step([torch.randn(s) for s in SHAPES], 1.0)
    assert ours.optimizer.param_groups == before
    assert not hasattr(ours.optimizer, "grad_scale")
    assert not hasattr(ours.optimizer, "found_inf")


def test_hooks_schedulers_and_a_failing_step() -> None:
    ours = Ours(parameters(SHAPES), optim.AdamW)
    scheduler = optim.lr_scheduler.StepLR(ours.optimizer, 1)
    seen = []
    ours.optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    ours.step([torch.randn(s) for s in SHAPES], 1.0)
    scheduler.step()  # warns, and so fails, if no step was noticed
    assert seen == ["stepped"]

    def fail(*_: object) -> None:
        raise ValueError("no")

    ours.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="no"):
        ours.step([torch.randn(s) for s in SHAPES], 1.0)
    assert ours.optimizer.param_groups[0]["fused"] is None
    assert not hasattr(ours.optimizer, "grad_scale")


class TakesScale(optim.Optimizer):
    """An optimizer of someone else's that divides by itself, by GradScaler's contract."""

    _step_supports_amp_scaling = True

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.found_inf.item():  # type: ignore[attr-defined]
            return
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / self.grad_scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_optimizer_that_takes_its_scale_from_attributes(write_back: bool, scale: float) -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([scale, 0.0, 0.0])
    optimizer = TakesScale([p], lr=1.0)
    assert way_of(optimizer) is Way.OWN
    apply_update(optimizer, check_gradients([p], torch.tensor(scale)), 0.5, write_back=write_back)
    torch.testing.assert_close(p.detach(), torch.tensor([-0.5, 0.0, 0.0]))
    if write_back:
        torch.testing.assert_close(p.grad, torch.tensor([0.5, 0.0, 0.0]))


LISTENED: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {}),
    "fused SGD": (optim.SGD, {"fused": True}),
    "AdamW": (optim.AdamW, {}),
    "fused AdamW": (optim.AdamW, {"fused": True}),
    "Adagrad": (optim.Adagrad, {}),
    "takes its scale": (TakesScale, {}),
}


@pytest.mark.parametrize("step", [_step_on_device, None], ids=["on a device", "on the CPU"])
@pytest.mark.parametrize("how", ["hook", "global hook", "wrapper"])
@pytest.mark.parametrize("name", LISTENED)
def test_who_listens_finds_divided_gradients(name: str, how: str, step: Any) -> None:
    """And what is changed then, by clipping, is what the step is made with."""
    kind, options = LISTENED[name]
    p = nn.Parameter(torch.zeros(4))
    optimizer = kind([p], lr=0.5, **options)  # type: ignore[call-arg]
    seen: list[Tensor] = []

    def clip(*_: Any) -> None:
        seen.append(p.grad.clone())  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_([p], 0.25)

    handle = None
    if how == "hook":
        optimizer.register_step_pre_hook(clip)
    elif how == "global hook":
        handle = register_optimizer_step_pre_hook(clip)
    else:
        own = optimizer.step
        optimizer.step = lambda *args: (clip(), own(*args))  # type: ignore[method-assign, assignment]
    p.grad = torch.tensor([64.0, 0.0, 0.0, 0.0])
    check = check_gradients([p], torch.tensor(64.0))
    try:
        if step is None:
            apply_update(optimizer, check)
        else:
            step(optimizer, check, None, False)
    finally:
        if handle is not None:
            handle.remove()
    assert torch.equal(seen[0], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(p.grad, torch.tensor([0.25, 0.0, 0.0, 0.0]))
    if isinstance(optimizer, (optim.SGD, TakesScale)):
        torch.testing.assert_close(p.detach(), torch.tensor([-0.125, 0.0, 0.0, 0.0]))


def test_what_a_hook_puts_in_place_of_the_gradients_is_stepped_on() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.full((2, 2), 4.0)
    optimizer = optim.SGD([p], lr=1.0)

    def replace(*_: Any) -> None:
        p.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()

    optimizer.register_step_pre_hook(replace)
    apply_update(optimizer, check_gradients([p], torch.tensor(4.0)))
    assert torch.equal(p, -torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


def test_a_scale_that_the_script_set_by_itself_counts_too() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.full((3,), 8.0)
    optimizer = optim.SGD([p], lr=1.0, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    apply_update(optimizer, check_gradients([p], torch.tensor(4.0)))
    assert torch.equal(p, torch.full((3,), -1.0))
    assert optimizer.grad_scale == 2.0  # type: ignore[attr-defined]


def test_lbfgs() -> None:
    p = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = optim.LBFGS([p], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    closure()
    with pytest.raises(UsageError, match=r"LBFGS computes the loss several times.*closure"):
        apply_update(optimizer, check_gradients([p]))
    with pytest.raises(UsageError, match="together with a loss scale"):
        apply_update(optimizer, check_gradients([p], torch.tensor(8.0)), closure=closure)
    with pytest.raises(UsageError, match="together with max_norm"):
        apply_update(optimizer, check_gradients([p]), 1.0, closure=closure)
    assert p.tolist() == [3.0, -2.0]
    apply_update(optimizer, check_gradients([p]), closure=closure)
    assert p.abs().max() < 0.1
    p.grad = torch.tensor([torch.nan, 0.0])
    before = p.tolist()
    apply_update(optimizer, check_gradients([p]), closure=closure)
    assert p.tolist() == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients() -> None:
    for kind, options in ((optim.SparseAdam, {}), (optim.SGD, {"momentum": 0.9}), (optim.Adagrad, {})):
        results = []
        for runs_ours in (False, True):
            torch.manual_seed(0)
            table = nn.Embedding(6, 3, sparse=True)
            optimizer = kind(table.parameters(), lr=0.1, **options)  # type: ignore[operator]
            for _ in range(3):
                optimizer.zero_grad()
                (table(torch.tensor([1, 4, 1])).square().sum() * 64.0).backward()
                if runs_ours:
                    apply_update(optimizer, check_gradients(table.parameters(), torch.tensor(64.0)), 0.5)
                else:
                    gradient = table.weight.grad.coalesce()  # type: ignore[union-attr]
                    norm = gradient.values().norm() / 64.0
                    table.weight.grad = gradient * (min(1.0, 0.5 / (norm.item() + 1e-6)) / 64.0)
                    optimizer.step()
            results.append(table.weight.detach().clone())
        torch.testing.assert_close(*results)


def test_hooks_see_the_learning_rate_of_the_script() -> None:
    """Plain SGD takes the factor into its learning rate, but not under anyone's eyes; and puts it back if it fails."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([p], lr=0.5, weight_decay=0.1)
    p.grad = torch.full((3,), 8.0)
    apply_update(optimizer, check_gradients([p], torch.tensor(8.0)))
    assert (p.tolist(), p.grad.tolist()) == ([-0.5] * 3, [8.0] * 3)  # the gradients were not even written
    seen = []
    handle = optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    apply_update(optimizer, check_gradients([p], torch.tensor(8.0)))
    handle.remove()
    assert seen == [0.5]
    optimizer.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        apply_update(optimizer, check_gradients([p], torch.tensor(8.0)))
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("shapes", "options", "expected"),
    [
        ([(16, 16)] * 4, {}, True),
        ([(16, 16)] * 4, {"foreach": False}, False),
        ([(16, 16)] * 4, {"lr": torch.tensor(0.01)}, None),
        ([(16, 16)] * 4, {"differentiable": True}, None),
        ([(16, 16)], {}, None),
        ([(400, 400)] * 2, {}, None),
    ],
    ids=["small", "chosen", "tensor lr", "differentiable", "one", "large"],
)
def test_many_small_tensors_go_together(shapes: list[tuple[int, ...]], options: dict[str, Any], expected: Any) -> None:
    held = [p.detach().clone() for p in parameters(shapes)]
    optimizer = optim.RMSprop(held, **options)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["foreach"]))
    for p in held:
        p.grad = torch.ones_like(p)
    apply_update(optimizer, check_gradients(held))
    assert seen == [expected]
    assert optimizer.param_groups[0]["foreach"] is options.get("foreach")


def test_defaults_of_the_script_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a default device, on which our small tensors would lie, nor a default dtype."""
    monkeypatch.setattr(kernels, "_sound", {})
    held = parameters(SHAPES)
    plain, changed = Ours(copies(held), optim.AdamW), Ours(copies(held), optim.AdamW)
    gradients = [torch.randn(s) * SCALE for s in SHAPES]
    plain.step(gradients, 1.0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            changed.step(gradients, 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert is_sound(optim.AdamW, "cpu", torch.float32)
    assert changed.loss_scale.value.dtype is torch.float32
    for a, b in zip(plain.parameters, changed.parameters, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("several", [False, True])
def test_a_look_taken_for_the_check_is_not_believed_when_gradients_are_others(several: bool) -> None:
    """The step may only use it where nothing has come between: a gradient that lies otherwise would be misread."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}] if several else parameters
    optimizer = optim.SGD(groups, lr=0.5)
    for p in parameters:
        p.grad = torch.randn_like(p)
    check = check_for_update([optimizer], parameters)
    assert len(check.looks) == (2 if several else 1)
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.randn(4, 6).t()
    apply_update(optimizer, check)
    for p, old in zip(parameters, before, strict=True):
        assert torch.allclose(p, old - 0.5 * p.grad)


def test_no_look_is_kept_of_other_parameters_than_the_optimizers() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = optim.SGD(parameters[:1], lr=0.5)
    assert not check_for_update([optimizer], parameters).looks
    assert not check_for_update([optim.RMSprop(parameters)], parameters).looks


def test_what_looks_at_the_steps_of_others_is_no_hook() -> None:
    """O2 looks at every optimizer of the process from its first cast on: plain SGD is stepped as before."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    ampguard.Amp(model, optim.SGD(model.parameters(), lr=0.1), precision="O2")
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.full((3,), 8.0)
    apply_update(optim.SGD([p], lr=0.5), check_gradients([p], torch.tensor(8.0)))
    assert (p.tolist(), p.grad.tolist()) == ([-0.5] * 3, [8.0] * 3)
