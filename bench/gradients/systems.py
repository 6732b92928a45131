"""Each way to train in mixed precision, behind the same few calls. All in real float16 on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from truth import Judge, flat

import ampguard
from scenarios import BATCHES, MAX_NORM, Scenario, loss_of, optimizer_of, parts_of


class NoSuchLoopError(Exception):
    """The system has no such loop."""


class System:
    """A loop in plain PyTorch. Subclasses replace the calls that they have a word of their own for."""

    name = ""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.parts: list[Any] = list(parts_of(scenario))
        self.optimizers: list[Any] = [optimizer_of(scenario, part) for part in self.parts]
        self.judge = Judge(scenario, list(self.parts))
        self.begin()

    def run(self) -> Judge:
        for number in range(BATCHES):
            self.iteration(number)
        return self.judge

    def iteration(self, number: int) -> None:
        """One micro-batch, in the scenario's order."""
        scenario, everyone = self.scenario, range(self.scenario.count)
        ends = (number + 1) % scenario.window == 0
        with self.micro_batch(ends):
            losses = self.losses(number)
            if scenario.order == "in turn":
                for i in everyone:
                    self.turn([i], losses[i], number, True)
            else:
                stepping = everyone if scenario.order == "together" or number % 2 else range(1)
                self.turn(everyone, torch.stack(losses).sum(), number, ends, stepping)
        if ends:
            self.iteration_ends()

    def turn(self, reached: Any, loss: Tensor, number: int, ends: bool, stepping: Any = None) -> None:
        """A backward pass and the steps after it."""
        for i in reached:
            self.judge.saw_batch(i, number)
        self.backward(loss)
        if self.scenario.clip == "every" or (self.scenario.clip and ends):
            if self.scenario.clip == "joint":
                self.clip_all()
                self.judge.clipped(*reached)
            else:
                for i in reached:
                    self.clip(i)
                    self.judge.clipped(i)
        stepping = list(reached if stepping is None else stepping) if ends else []
        before = [flat(self.judge.parts[i]) for i in stepping]
        self.step_all(stepping)
        for i, weights in zip(stepping, before, strict=True):
            self.judge.stepped(i, weights)
            self.zero_grad(i)

    def losses(self, number: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.float16):
            return [loss_of(self.scenario, i, part, number) for i, part in enumerate(self.parts)]

    def all_parameters(self) -> list[Tensor]:
        return [p for part in self.parts for p in part.parameters()]

    def begin(self) -> None: ...

    def micro_batch(self, ends: bool) -> Any:
        return contextlib.nullcontext()

    def iteration_ends(self) -> None: ...

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def clip(self, i: int) -> None:
        raise NotImplementedError

    def clip_all(self) -> None:
        """By one norm of all optimizers' gradients."""
        raise NoSuchLoopError

    def step(self, i: int) -> None:
        raise NotImplementedError

    def step_all(self, stepping: list[int]) -> None:
        for i in stepping:
            self.step(i)

    def zero_grad(self, i: int) -> None:
        self.optimizers[i].zero_grad()


class ByHand(System):
    """PyTorch's own scaler in the order of its documentation."""

    name = "torch.amp by hand"

    def begin(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss / self.scenario.window).backward()

    def clip(self, i: int) -> None:
        self.scaler.unscale_(self.optimizers[i])
        nn.utils.clip_grad_norm_(self.parts[i].parameters(), MAX_NORM)

    def clip_all(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.all_parameters(), MAX_NORM)

    def step(self, i: int) -> None:
        self.scaler.step(self.optimizers[i])

    def iteration_ends(self) -> None:
        self.scaler.update()


class Amp(System):
    """The engine's own object."""

    name = "ampguard.Amp"

    def begin(self) -> None:
        scenario = self.scenario
        if scenario.clip == "every":
            raise NoSuchLoopError
        max_norm = MAX_NORM if scenario.clip else None
        self.amp = ampguard.Amp(self.parts, self.optimizers, "fp16", max_grad_norm=max_norm, accumulate=scenario.window)

    def backward(self, loss: Tensor) -> None:
        self.amp.backward(loss)

    def clip(self, i: int) -> None: ...

    def clip_all(self) -> None: ...

    @contextlib.contextmanager
    def micro_batch(self, ends: bool) -> Iterator[None]:
        yield
        if not ends:
            self.amp.step()

    def step(self, i: int) -> None:
        self.amp.step(self.optimizers[i])

    def step_all(self, stepping: list[int]) -> None:
        if self.scenario.clip == "joint":
            self.amp.step()
        else:
            super().step_all(stepping)

    def zero_grad(self, i: int) -> None: ...


class Accelerate(System):
    """Accelerate's own scaler, switched on as on a GPU: on the CPU it leaves fp16 off."""

    name = "Accelerate"

    def begin(self) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        scenario = self.scenario
        self.acc = Accelerator(mixed_precision="fp16", cpu=True, gradient_accumulation_steps=scenario.window)
        self.switch_on()
        prepared = self.acc.prepare(*self.parts, *self.optimizers)
        self.parts, self.optimizers = list(prepared[: scenario.count]), list(prepared[scenario.count :])

    def switch_on(self) -> None:
        self.acc.native_amp, self.acc.scaler = True, torch.amp.GradScaler("cpu")

    def micro_batch(self, ends: bool) -> Any:
        return self.acc.accumulate(*self.parts)

    def backward(self, loss: Tensor) -> None:
        self.acc.backward(loss)

    def clip(self, i: int) -> None:
        self.acc.clip_grad_norm_(self.parts[i].parameters(), MAX_NORM)

    def clip_all(self) -> None:
        self.acc.clip_grad_norm_(self.all_parameters(), MAX_NORM)

    def step(self, i: int) -> None:
        self.optimizers[i].step()


class GuardedAccelerate(Accelerate):
    """The drop-in."""

    name = "ampguard in Accelerate"

    def switch_on(self) -> None:
        from ampguard.integrations.hf import prepare

        prepare(self.acc)


class Timm(System):
    """One call for each micro-batch; takes one loss and one optimizer."""

    name = "timm NativeScaler"

    def begin(self) -> None:
        if self.scenario.clip == "every" or (self.scenario.count > 1 and self.scenario.order != "in turn"):
            raise NoSuchLoopError
        self.scaler = self.made()

    def made(self) -> Any:
        return _timms_own()(device="cpu")

    @contextlib.contextmanager
    def micro_batch(self, ends: bool) -> Iterator[None]:
        yield
        if not ends:
            self.call(0, False)

    def backward(self, loss: Tensor) -> None:
        self.loss = loss / self.scenario.window

    def clip(self, i: int) -> None: ...

    def step(self, i: int) -> None:
        self.call(i, True)

    def call(self, i: int, need_update: bool) -> None:
        words = {"clip_grad": MAX_NORM if self.scenario.clip else None, "parameters": self.parts[i].parameters()}
        self.scaler(self.loss, self.optimizers[i], need_update=need_update, **words)


class GuardedTimm(Timm):
    """The drop-in."""

    name = "ampguard NativeScaler"

    def made(self) -> Any:
        from ampguard.integrations.timm import NativeScaler

        return NativeScaler()


def _timms_own() -> Any:
    """Its scaler, file by file: `import timm` needs torchvision, this does not."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None
    assert spec.origin is not None
    before = set(sys.modules)
    for package in ("timm", "timm.utils"):
        stub = types.ModuleType(package)
        stub.__path__ = [str(Path(spec.origin).parents[1].joinpath(*package.split(".")))]
        sys.modules[package] = stub
    scaler = importlib.import_module("timm.utils.cuda").NativeScaler
    for name in set(sys.modules) - before:  # others ask whether timm is installed, and a stub confuses them
        if name.partition(".")[0] == "timm":
            del sys.modules[name]
    return scaler
