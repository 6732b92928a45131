"""A warning names the same line with the guard as without it."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ampguard
from ampguard import compat
from ampguard.capture.seen_through import seen_through

HIGHEST = 12
Place = tuple[str, int, str]


def warn_at_each_level() -> None:
    """As a function deep inside something warns: of the lines that have called it, one after the other."""
    for level in range(1, HIGHEST):
        warnings.warn(f"level {level}", stacklevel=level)


class Warns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        warn_at_each_level()
        return x


class WarningSteps(torch.optim.SGD):
    """With a `step` and a `zero_grad` of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        warn_at_each_level()
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        warn_at_each_level()


class WarningRates(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        if self.last_epoch:
            warn_at_each_level()
        return [0.1 for _ in self.optimizer.param_groups]


class WarningData(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        warn_at_each_level()
        return torch.zeros(2)


class WarnsWhenSaved:
    def __reduce__(self) -> tuple[Any, ...]:
        warn_at_each_level()
        return (WarnsWhenSaved, ())


def warns(gradient: Tensor) -> Tensor:
    warn_at_each_level()
    return gradient


def training() -> tuple[nn.Linear, WarningSteps, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = WarningSteps(model.parameters(), lr=0.1)
    return model, optimizer, model(torch.ones(3, 2)).sum()


def scheduler_before_optimizer() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()
    optimizer.step()


def own_scheduler() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    scheduler = WarningRates(optimizer)
    optimizer.step()
    scheduler.step()


def clipping_nothing() -> None:
    nn.utils.clip_grad_norm_((p for p in list[Tensor]()), 1.0)


def new_scaler() -> None:
    """On a machine without a GPU it says that it is of no use; here on any."""
    with mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=True):
        torch.amp.GradScaler("cuda")


def old_scaler() -> None:
    torch.cuda.amp.GradScaler()


def scaler_step() -> None:
    _, optimizer, loss = training()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def update_without_step() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True))
    scaler.update(torch.full((), 4.0))
    warnings.warn(f"the scale is {scaler.get_scale():g}", stacklevel=1)


def plain_step() -> None:
    _, optimizer, loss = training()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def backward() -> None:
    model, _, loss = training()
    model.weight.register_hook(warns)
    loss.backward()


def functional_backward() -> None:
    model, _, loss = training()
    model.weight.register_hook(warns)
    torch.autograd.backward([loss], retain_graph=True)
    torch.autograd.grad(loss, model.weight)


def saving() -> None:
    torch.save({"x": WarnsWhenSaved()}, io.BytesIO())


def loading_batches() -> None:
    for _ in DataLoader(WarningData(), batch_size=2):
        pass


def autocast() -> None:
    with torch.autocast("cuda", dtype=torch.float16), torch.autocast("cpu", dtype=torch.float32):
        torch.zeros(2).sum()


def old_autocast() -> None:
    with torch.cuda.amp.autocast(), torch.cpu.amp.autocast():
        torch.zeros(2).sum()


def module_call() -> None:
    Warns()(torch.zeros(2))
    with torch.no_grad():
        Warns().eval()(torch.zeros(2))


LOOPS: list[Callable[[], None]] = [
    *(scheduler_before_optimizer, own_scheduler, clipping_nothing, new_scaler, old_scaler, scaler_step),
    *(update_without_step, plain_step, backward, functional_backward, saving, loading_batches, autocast),
    *(old_autocast, module_call),
]


def places_of_warnings(loop: Callable[[], None]) -> list[Place]:
    """Each warning's file, line and text; of those with levels only the ones up to our own call of the loop."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop()  # here
    caller = places_of_warnings.__code__
    here = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    found: list[Place] = []
    is_beyond = False
    for w in seen:
        text = str(w.message)
        is_beyond = text.startswith("level") and text != "level 1" and (is_beyond or w.lineno == here)
        if not is_beyond or (w.filename, w.lineno) == (caller.co_filename, here):
            found.append((w.filename, w.lineno, text))
    return found


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_warning_names_the_line_that_it_names_without_the_guard(loop: Callable[[], None], tmp_path: Path) -> None:
    bare = places_of_warnings(loop)
    with ampguard.watch(out=tmp_path / "run") as session:
        guarded = places_of_warnings(loop)
    assert not session._barrier.tripped
    assert guarded == bare
    assert any(file == __file__ for file, _, _ in bare)


def test_a_warning_is_shown_once_a_line(tmp_path: Path) -> None:
    """Python remembers where it has shown what, by the module of the line that it names."""

    def twice() -> None:
        scheduler_before_optimizer()
        scheduler_before_optimizer()

    counts = []
    for _ in range(2):
        sys.modules[__name__].__dict__.pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            if not counts:
                twice()
            else:
                with ampguard.watch(out=tmp_path / "run"):
                    twice()
        counts.append(len(seen))
    assert counts == [1, 1]


def test_a_file_name_still_leads_to_the_file() -> None:
    code = seen_through(places_of_warnings.__code__.replace())
    assert Path(code.co_filename).parent.parent.parent.resolve() == Path(__file__).parent.resolve()
    assert Path(code.co_filename).name == Path(__file__).name
    assert seen_through(code) is code


def makes_another() -> Callable[[], str]:
    return lambda: __name__


@pytest.mark.parametrize("in_place", [True, False])
def test_code_is_renamed_with_all_that_it_defines(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_place:  # a Python that has no such function
        monkeypatch.setattr("ampguard.compat.code._rename", None)
    code = makes_another.__code__.replace()
    inner = next(const for const in code.co_consts if isinstance(const, CodeType))
    code = code.replace(co_consts=tuple(c.replace() if c is inner else c for c in code.co_consts))
    renamed = compat.renamed(code, "/elsewhere/code.py")
    assert (renamed is code) is in_place
    inside = next(const for const in renamed.co_consts if isinstance(const, CodeType))
    assert renamed.co_filename == inside.co_filename == "/elsewhere/code.py"
    assert eval(renamed)() == __name__
    assert inner.co_filename == makes_another.__code__.co_filename == __file__
