"""The precision plugin in Fabric, with Fabric's own as control, under both package names."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_loops import batches, furthest, network
from several_optimizers import Step, losses_of, one_backward
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of many kinds
pytest.importorskip("lightning.fabric")
pytest.importorskip("lightning_fabric")

from lightning_modules import norm  # noqa: E402

import ampguard  # noqa: E402
from ampguard.errors import NonfiniteError, ProtocolError  # noqa: E402
from ampguard.integrations.lightning import GuardedPrecision  # noqa: E402

PACKAGES = ["lightning.fabric", "lightning_fabric"]
guarded = functools.partial(GuardedPrecision, "16-mixed", "cpu")
each_package = pytest.mark.parametrize("package", PACKAGES)


def fabric_with(plugin: Any, package: str = PACKAGES[0]) -> Any:
    return importlib.import_module(package).Fabric(accelerator="cpu", plugins=[plugin] if plugin else [])


def own_plugin(package: str = PACKAGES[0], precision: str = "16-mixed") -> Any:
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    return importlib.import_module(f"{package}.plugins").MixedPrecision(precision, "cpu", scaler)


def trained(plugin: Any, package: str = PACKAGES[0], bad: tuple[int, ...] = (), clip: float | None = None) -> Any:
    fabric = fabric_with(plugin, package)
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
    for x, y in batches(8, bad):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(wrapped(x), y))
        if clip is not None:
            fabric.clip_gradients(wrapped, optimizer, max_norm=clip, error_if_nonfinite=False)
        optimizer.step()
    return model


@each_package
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_one_optimizer_learns_as_with_fabrics_own(package: str, clip: float | None, precision: str) -> None:
    bad = (0, 4) if precision == "16-mixed" else ()
    theirs = trained(own_plugin(package, precision), package, bad, clip)
    assert furthest(theirs, trained(GuardedPrecision(precision, "cpu"), package, bad, clip)) < 1e-6


def clipped(fabric: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    fabric.backward(torch.stack(losses).sum())
    for part, optimizer in zip(parts, optimizers, strict=True):
        fabric.clip_gradients(part, optimizer, max_norm=1e9, error_if_nonfinite=False)
        optimizer.step()


def in_turn(fabric: Any, parts: list[Any], optimizers: list[Any], losses: list[Tensor], number: int) -> None:
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


def norms(plugin: Any, step: Step, burst: tuple[int, int] | None = None, lr: float = 0.0) -> list[list[float]]:
    """Of three linear classifiers' gradients after each step; `burst`: the iteration and the part that overflows."""
    torch.manual_seed(0)
    fabric = fabric_with(plugin)
    modules = [nn.Linear(64, 10) for _ in range(3)]
    pairs = [fabric.setup(m, torch.optim.SGD(m.parameters(), lr)) for m in modules]
    parts, optimizers = [list(items) for items in zip(*pairs, strict=True)]
    found = []
    for number in range(4):
        step(fabric, parts, optimizers, losses_of(parts, number, burst), number)
        found.append([norm(m) for m in modules])
    return found


@pytest.mark.parametrize("step", [one_backward, clipped, in_turn], ids=lambda step: step.__name__)
@pytest.mark.parametrize("burst", [(0, 0), (0, 1), (1, 0), (1, 2)], ids=str)
def test_of_three_optimizers_one_overflows(step: Step, burst: tuple[int, int]) -> None:
    true = norms(None, step)
    plugin = guarded()
    ours = norms(plugin, step, burst)
    for number in range(4):
        for i in range(3):
            if (number, i) != burst:
                assert ours[number][i] == pytest.approx(true[number][i], rel=2e-3), (number, i)
    assert plugin.scaler.get_scale() == 32768.0


def test_fabrics_own_is_wrong_there() -> None:
    true, theirs = norms(None, one_backward), norms(own_plugin(), one_backward, (1, 0))
    assert theirs[1][1:] == pytest.approx([2 * n for n in true[1][1:]], rel=2e-3)


def test_a_step_on_a_loss_that_was_not_scaled() -> None:
    fabric = fabric_with(guarded())
    model = nn.Linear(4, 1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(1, 4)).sum().backward()  # past Fabric's own check, which is in the wrapped module
    with pytest.raises(ProtocolError, match="unscaled-backward"):
        optimizer.step()
    assert wrapped is not model


@each_package
@pytest.mark.parametrize("first", [0, 2])
def test_a_step_of_the_optimizer_itself(package: str, first: int) -> None:
    """Fabric says nothing of an optimizer before it steps by the wrapper."""
    fabric = fabric_with(guarded(), package)
    model = nn.Linear(4, 1)
    own = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, optimizer = fabric.setup(model, own)
    for number in range(first + 1):
        optimizer.zero_grad()
        fabric.backward(wrapped(torch.ones(1, 4)).sum() / 4)
        if number < first:
            optimizer.step()
    before = model.weight.detach().clone()
    with pytest.raises(ProtocolError, match="`SGD` with gradients that are 65536 times too large") as caught:
        own.step()
    assert caught.value.cause == "bypassed-scaler"
    assert torch.equal(model.weight, before)


def test_steps_of_an_optimizer_of_the_loops_own_beside_it() -> None:
    """Its gradients carry no scale, though Fabric has set up the module."""
    fabric = fabric_with(guarded())
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    fabric.setup(model)
    by_fabric = fabric.setup_optimizers(torch.optim.SGD(model[0].parameters(), 0.1))
    own, batch = torch.optim.SGD(model[1].parameters(), 0.1), torch.ones(1, 4)
    for _ in range(3):
        own.zero_grad()
        by_fabric.zero_grad()
        model[1](batch).sum().backward()
        fabric.backward(model[0](batch).sum())
        own.step()
        by_fabric.step()
    fabric.backward(model[1](batch).sum())
    own.zero_grad()  # thrown away
    model[1](batch).sum().backward()
    own.step()


@each_package
def test_checkpoints_are_exchanged(package: str, tmp_path: Path) -> None:
    plugin = guarded(init_scale=512.0)
    trained(plugin, package)
    state = plugin.state_dict()
    theirs = own_plugin(package)
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    assert state["_growth_tracker"] == 8
    again = guarded()
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == state


def test_inputs_and_outputs_are_converted_as_fabrics_own_does() -> None:
    fabric = fabric_with(guarded())
    model = fabric.setup(nn.Linear(4, 1))
    seen: list[torch.dtype] = []
    model.module.register_forward_hook(lambda *hooked: seen.extend([hooked[1][0].dtype, hooked[2].dtype]))
    assert model(torch.ones(1, 4)).dtype == torch.float32
    assert seen == [torch.float16, torch.float16]


def test_a_run_in_which_no_step_succeeds_ends() -> None:
    with pytest.raises(NonfiniteError, match="3 steps in a row"):
        trained(guarded(patience=3), bad=tuple(range(8)))


@pytest.mark.parametrize("step", [one_backward, clipped, in_turn], ids=lambda step: step.__name__)
def test_healthy_trainings_are_silent_and_unchanged_under_the_guard(step: Step, tmp_path: Path) -> None:
    alone = norms(guarded(), step, lr=0.1)
    with ampguard.watch(out=tmp_path / "run") as session:
        watched = norms(guarded(), step, lr=0.1)
    assert session.report.incidents == ()
    assert watched == alone


def test_a_bad_batch_is_explained(tmp_path: Path) -> None:
    with ampguard.watch(out=tmp_path / "run") as session:
        trained(guarded(), bad=(5,), clip=1.0)
    (incident,) = session.report.incidents
    assert (incident.cause, incident.step) == ("fp16-overflow", 5)
