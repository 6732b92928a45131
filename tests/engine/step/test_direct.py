"""PyTorch's fused kernels called without `optimizer.step()`: only where nobody can notice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import parameters
from torch import nn, optim
from torch.profiler import ProfilerActivity

import ampguard
from ampguard.compat import may_bypass_step
from ampguard.engine.step import apply_update, check_for_update, direct

SHAPES = [(6, 4), (5,)]
KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "Adam": (optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW, lr a whole number": (optim.AdamW, {"lr": 1}),
    "SGD": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def give(to: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for p in to:
        p.grad = torch.randn_like(p) * 1024


def step(optimizer: optim.Optimizer, held: list[nn.Parameter], seed: int, max_norm: float | None = 1.0) -> None:
    give(held, seed)
    check = check_for_update([optimizer], held, torch.tensor(1024.0), max_norm)
    apply_update(optimizer, check, max_norm)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each of PyTorch's steps was made by."""
    made: list[str] = []
    plain = direct.step_directly

    def noted(*args: Any) -> bool:
        made.append("kernel" if plain(*args) else "step")
        return made[-1] == "kernel"

    monkeypatch.setattr("ampguard.engine.step.update.step_directly", noted)
    return made


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_is_bitwise_what_the_step_of_the_optimizer_is(name: str, max_norm: float | None, calls: list[str]) -> None:
    kind, options = KINDS[name]
    pair = []
    for by_step in (False, True):
        held = parameters(SHAPES)
        optimizer = kind(held, **options)
        if by_step:
            optimizer.step = optimizer.step  # type: ignore[method-assign]  # the script's own: it may be anything
        for number in range(4):
            step(optimizer, held, number, max_norm)
        pair.append((held, optimizer.state_dict()["state"]))
    first = ["kernel"] if kind is optim.SGD else ["step"]  # which begins Adam's state
    assert calls == [*first, "kernel", "kernel", "kernel", "step", "step", "step", "step"]
    for a, b in zip(pair[0][0], pair[1][0], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(pair[0][1], pair[1][1], rtol=0, atol=0)


def test_a_scheduler_knows_that_the_optimizer_has_stepped(calls: list[str], recwarn: pytest.WarningsRecorder) -> None:
    held = parameters(SHAPES)
    optimizer = optim.SGD(held, lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    step(optimizer, held, 0)
    scheduler.step()
    assert calls == ["kernel"]
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("how", ["hook", "instance", "class", "subclass", "profiler", "lr", "dampening", "their scale"])
def test_whoever_listens_hears_the_step(how: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    held = parameters(SHAPES)
    kind = optim.SGD
    if how == "class":
        plain = optim.SGD.step

        def loud(self: Any, *args: Any, **options: Any) -> Any:
            heard.append("class")
            return plain(self, *args, **options)

        loud.__wrapped__ = plain  # type: ignore[attr-defined]
        monkeypatch.setattr(optim.SGD, "step", loud)
    if how == "subclass":

        class Loud(optim.SGD):
            def step(self, *args: Any, **options: Any) -> Any:
                heard.append("subclass")
                return super().step(*args, **options)

        kind = Loud
    optimizer = kind(
        held, lr=torch.tensor(0.1) if how == "lr" else 0.1, momentum=0.5, dampening=0.5 * (how == "dampening")
    )
    if how == "hook":
        optimizer.register_step_post_hook(lambda *_: heard.append("hook"))
    if how == "instance":
        own = optimizer.step
        optimizer.step = lambda *args: (heard.append("instance"), own(*args))  # type: ignore[method-assign, assignment]
    if how == "their scale":
        optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    if how == "profiler":
        with warnings.catch_warnings(), torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
            warnings.simplefilter("ignore")  # PyTorch 2.11's of its own profiler
            step(optimizer, held, 0)
        heard += [event.name for event in profile.events() if event.name.startswith("Optimizer.step")]
        assert heard == ["Optimizer.step#SGD.step"]
    else:
        step(optimizer, held, 0)
        assert heard == ([how] if how in ("hook", "instance", "class", "subclass") else [])
    assert calls in ([], ["step"])
    assert not any(torch.equal(p, q) for p, q in zip(held, parameters(SHAPES), strict=True))


def test_the_engines_own_hooks_do_not_count(calls: list[str]) -> None:
    other = nn.Linear(2, 2)
    ampguard.Amp(other, optim.SGD(other.parameters(), lr=0.1), precision="O2")  # looks at all optimizers from here on
    model = nn.Linear(4, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    amp = ampguard.Amp(model, optimizer, precision="bf16")

    for _ in range(2):
        with amp.autocast():
            loss = model(torch.randn(3, 4)).square().mean()
        amp.backward(loss)
        amp.step()
    assert calls == ["kernel", "kernel"]


def test_a_wrapper_of_a_package_beside_pytorch_is_not_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchao` begins as `torch` does."""
    held = parameters(SHAPES)
    optimizer = optim.SGD(held, lr=0.1)
    assert may_bypass_step(optimizer)
    plain = optim.SGD.step

    def loud(self: Any, *args: Any, **options: Any) -> Any:
        return plain(self, *args, **options)

    beside = Path(torch.__file__).parent.with_name("torchao") / "optim.py"
    monkeypatch.setattr(loud, "__code__", loud.__code__.replace(co_filename=str(beside)))
    monkeypatch.setattr(optim.SGD, "step", loud)
    assert not may_bypass_step(optimizer)
