"""Frameworks that keep a scaler of their own: the fix is in their words. Stand-ins with their names, installed as they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampguard.incident import Incident

Guard = Callable[..., Any]

DRIVER = '''
import torch

class Driver:
    """Scales, differentiates, calls back, steps and updates, as the framework does in its own file."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def fit(self, batches, after_backward=lambda driver: None, at_the_end=lambda driver: None):
        for x in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.model(x).float().pow(2).mean()
            self.backward(loss)
            after_backward(self)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        at_the_end(self)
'''


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Makes a package of a framework's name, in the user's own folder of packages, and gives its `Driver`."""
    folder = tmp_path / ".local" / "lib" / "python3" / "site-packages"
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))

    def driver(name: str) -> Any:
        for known in [known for known in sys.modules if known.partition(".")[0] == name]:
            del sys.modules[known]
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
        (folder / name / "engine.py").write_text(DRIVER)
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.engine").Driver

    yield driver
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name not in before]:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.modules.update(before)


def first_of(run: Any) -> Incident:
    assert run.faults == 0, run.stderr
    return next(i for i in run.report.incidents if i.severity != "info")  # type: ignore[no-any-return]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), [torch.randn(8, 4) for _ in range(6)]


def clip_norm(driver: Any) -> None:
    torch.nn.utils.clip_grad_norm_(driver.model.parameters(), 0.1)


def clip_value(driver: Any) -> None:
    torch.nn.utils.clip_grad_value_(driver.model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("name", "clip", "words"),
    [
        ("composer", clip_norm, 'GradientClipping(clipping_type="norm", clipping_threshold=...)'),
        ("composer", clip_value, 'GradientClipping(clipping_type="value", clipping_threshold=...)'),
        ("fastai", clip_norm, "Learner(..., cbs=GradientClip(...))"),
        ("mmengine", clip_norm, "clip_grad=dict(max_norm=...)"),
        ("mmengine", clip_value, 'clip_grad=dict(type="value", clip_value=...)'),
        ("speechbrain", clip_norm, "run_opts={'max_grad_norm': ...}"),
        ("monai", clip_norm, "driver.scaler.unscale_(driver.optimizer)"),  # (it clips nowhere itself)
    ],
)
def test_clipping(name: str, clip: Callable[[Any], None], words: str, install: Any, guard: Guard) -> None:
    driver = install(name)

    def body() -> None:
        model, optimizer, batches = parts()
        driver(model, optimizer).fit(batches, after_backward=clip)

    incident = first_of(guard(body))
    assert (incident.cause, incident.step) == ("clip-before-unscale", 0)
    assert incident.location is not None
    assert incident.location.code.startswith("torch.nn.utils.clip_grad")
    assert words in incident.fixes[0].how


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("composer", "Trainer(save_folder=...)"),
        ("ignite", '"scaler": driver.scaler}'),
        ("mmengine", '"optimizer": runner.optim_wrapper.state_dict()'),
        ("monai", "save_dict="),
        ("speechbrain", "Checkpointer(folder)"),
    ],
)
def test_a_checkpoint(name: str, words: str, install: Any, guard: Guard, tmp_path: Path) -> None:
    driver = install(name)

    def save(driver: Any) -> None:
        torch.save({"net": driver.model.state_dict(), "opt": driver.optimizer.state_dict()}, tmp_path / "last.pt")

    def body() -> None:
        model, optimizer, batches = parts()
        driver(model, optimizer).fit(batches, at_the_end=save)

    incident = first_of(guard(body))
    assert incident.cause == "scaler-not-saved"
    assert words in incident.fixes[0].how


def test_what_the_script_calls_its_accelerator(install: Any, guard: Guard) -> None:
    """catalyst's engine is an Accelerator, and scripts write `self.engine.backward(loss)`."""
    driver = install("accelerate")

    def body() -> None:
        model, optimizer, batches = parts()
        engine = driver(model, optimizer)
        for x in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().pow(2).mean()
            engine.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            engine.scaler.step(optimizer)
            engine.scaler.update()
            optimizer.zero_grad()

    how = first_of(guard(body)).fixes[0].how
    assert "if engine.sync_gradients: engine.clip_grad_norm_(parameters, limit)" in how


def test_an_attribute_goes_before_the_item_of_a_container(guard: Guard) -> None:
    """SpeechBrain's Brain holds its optimizer twice."""

    class Brain:
        def __init__(self) -> None:
            self.modules, first, self.batches = parts()
            self.optimizers_dict = {"opt_class": first}
            self.optimizer = first
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def fit(self) -> None:
            for x in self.batches:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = self.modules(x).float().pow(2).mean()
                self.scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(self.modules.parameters(), 0.1)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

    assert "self.scaler.unscale_(self.optimizer)" in first_of(guard(lambda: Brain().fit())).fixes[0].how
