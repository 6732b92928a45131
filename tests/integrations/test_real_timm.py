"""Against the real timm's scaler, clipping, optimizer and checkpoint saver, where timm is installed.

Its files are loaded one by one: `import timm` needs torchvision, these do not.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digits_loops import furthest, network, train

from ampguard.integrations.timm import NativeScaler

SPEC = importlib.util.find_spec("timm")
pytestmark = pytest.mark.skipif(SPEC is None, reason="timm is not installed")


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports one of timm's modules by its name, without the packages' own `__init__`."""
    before = set(sys.modules)
    assert SPEC is not None
    assert SPEC.origin is not None
    for package in ("timm", "timm.utils", "timm.optim"):
        stub = types.ModuleType(package)
        stub.__path__ = [str(Path(SPEC.origin).parents[1].joinpath(*package.split(".")))]
        monkeypatch.setitem(sys.modules, package, stub)
    yield lambda name: importlib.import_module(f"timm.{name}")
    for name in {name for name in sys.modules if name.startswith("timm.")} - before:
        del sys.modules[name]


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("mode", "limit"), [("norm", 0.5), ("value", 0.01), ("agc", 0.02), ("norm", None)])
def test_the_same_training(timm: Any, mode: str, limit: float | None, window: int) -> None:
    ours, theirs = network(), network()
    scaler, other = NativeScaler("cpu"), timm("utils.cuda").NativeScaler("cpu")
    words: dict[str, Any] = {"window": window, "word": "need_update", "bad": (4,), "clip_grad": limit}
    train(scaler, ours, torch.optim.SGD(ours.parameters(), 0.05), 8, clip_mode=mode, **words)
    returned = train(other, theirs, torch.optim.SGD(theirs.parameters(), 0.05), 8, clip_mode=mode, **words)
    assert set(returned) == {None}
    assert scaler.state_dict() == other.state_dict()
    assert scaler.state_dict_key == other.state_dict_key
    assert furthest(ours, theirs) < 1e-3


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_its_second_order_optimizer(timm: Any) -> None:
    def curved(scaler: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = timm("optim.adahessian").Adahessian(model.parameters(), lr=0.05)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.eye(4)).pow(2).mean()
            scaler(loss, optimizer, create_graph=optimizer.is_second_order)
        for p in model.parameters():
            p.grad = None  # breaks the cycle
        return model

    ours, theirs = curved(NativeScaler()), curved(timm("utils.cuda").NativeScaler("cpu"))
    assert furthest(ours, theirs) < 1e-6


def test_each_loads_the_others_state(timm: Any) -> None:
    scaler, other = NativeScaler(init_scale=256.0), timm("utils.cuda").NativeScaler("cpu")
    model = network()
    train(scaler, model, torch.optim.SGD(model.parameters(), 0.1), 2, word="need_update")
    other.load_state_dict(scaler.state_dict())
    train(other, model, torch.optim.SGD(model.parameters(), 0.1), 2, word="need_update")
    again = NativeScaler()
    again.load_state_dict(other.state_dict())
    assert (again.get_scale(), again.state_dict()["_growth_tracker"]) == (256.0, 4)
