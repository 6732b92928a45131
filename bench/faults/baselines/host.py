"""Runs a case's script under another tool, and keeps count of what every such tool leaves to its user: the step.

A person who sees a tool's exception knows in which iteration of the loop it came and whether the model was training;
`Clock` stands for that person.
"""

from __future__ import annotations

import os
import runpy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from bench.faults.scoring import Claim
from torch import nn


class Clock:
    """Counts iterations by their optimizer steps and says whether this is training.

    A step that a GradScaler skips counts too. With several optimizers an iteration ends when the last of them has
    stepped; which those are is learnt from the iteration before (at first: all that exist).
    """

    def __init__(self) -> None:
        self.step = 0
        self.root: nn.Module | None = None
        self.on_step: list[Callable[[], None]] = []
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._expected: set[int] | None = None
        self._stepped: set[int] = set()
        self._in_scaler = False

    @property
    def mode(self) -> Literal["train", "eval"]:
        training = self.root is None or self.root.training
        return "train" if training and torch.is_grad_enabled() else "eval"

    def install(self) -> None:
        """Watch every optimizer and scaler made from now on."""
        clock, made = self, torch.optim.Optimizer.__init__
        scaled = torch.amp.GradScaler.step

        def optimizer_made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            clock._made.add(optimizer)
            optimizer.register_step_post_hook(lambda stepped, *_: clock._attempted(stepped))

        def scaler_step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            clock._in_scaler = True
            try:
                return scaled(scaler, optimizer, *args, **kwargs)
            finally:
                clock._in_scaler = False
                clock._attempted(optimizer)

        torch.optim.Optimizer.__init__ = optimizer_made  # type: ignore[method-assign]
        torch.amp.GradScaler.step = scaler_step  # type: ignore[method-assign]

    def _attempted(self, optimizer: torch.optim.Optimizer) -> None:
        if self._in_scaler:
            return  # the scaler's own call says so, whether it skips or not
        if id(optimizer) in self._stepped:  # the one that was waited for is no longer used
            self._close()
        self._stepped.add(id(optimizer))
        expected = {id(known) for known in self._made} if self._expected is None else self._expected
        if self._stepped >= expected:
            self._close()
        for call in self.on_step:
            call()

    def _close(self) -> None:
        self.step, self._expected, self._stepped = self.step + 1, self._stepped, set()


def watch_roots(enter: Callable[[nn.Module], None], leave: Callable[[nn.Module, Any], None] | None = None) -> None:
    """Call `enter` (and `leave`, with the output) around every module call that no other module's call encloses."""
    call, depth = nn.Module.__call__, 0

    def outermost(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth or torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        depth += 1
        try:
            enter(module)
            output = call(module, *args, **kwargs)
            if leave is not None:
                leave(module, output)
            return output
        finally:
            depth -= 1

    nn.Module.__call__ = outermost  # type: ignore[method-assign]


def run_script(command: list[str]) -> None:
    """Run `SCRIPT [ARGS]` or `-m MODULE [ARGS]` as `__main__`; its exceptions and exits are the caller's."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def code_at(file: str, line: int) -> str:
    """The stripped text of a line of a file, empty where there is none."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    except (OSError, IndexError):
        return ""


def is_pytorch(file: str) -> bool:
    """Whether a file belongs to PyTorch, to Python's own library, or to this benchmark, and so is never "the line"."""
    torch_room, python_room = Path(torch.__file__).parent, Path(runpy.__file__).parent
    path = Path(file)
    inside_python = path.is_relative_to(python_room) and "site-packages" not in path.parts
    return path.is_relative_to(torch_room) or inside_python or "bench/faults/baselines" in path.as_posix()


def write_claim(path: Path, claim: Claim) -> None:
    """Write what this rank claims; each rank of a launch into a file of its own."""
    if "RANK" in os.environ:
        path = path.with_stem(f"{path.stem}-{os.environ['RANK']}")
    path.write_bytes(msgspec.json.encode(claim))
