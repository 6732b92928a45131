"""Running a piece of training under guard, and telling two runs apart bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampguard
from ampguard.capture.flags import FiniteFlag
from ampguard.incident import Incident, Report
from ampguard.run.session import Session

FAULT = "a fault of its own"


class LateFlag(FiniteFlag):
    """As on a device: the answer is not there yet when the script goes on, and comes only to who waits for it."""

    @property
    def is_known(self) -> bool:
        return False


@dataclass(frozen=True)
class Watched:
    """What a guarded run gave: the body's own result, the report, the session, and what was printed."""

    result: Any
    report: Report
    session: Session
    stderr: str

    @property
    def faults(self) -> int:
        return self.stderr.count(FAULT)

    @property
    def first(self) -> Incident:
        return self.report.incidents[0]

    @property
    def causes(self) -> list[str]:
        return [incident.cause for incident in self.report.incidents]


def watched(body: Callable[[], object], out: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> Watched:
    """Run `body` under guard. A fault of ampguard's own is left for the test to judge."""
    capsys.readouterr()
    result = None
    with ampguard.watch(out=out, **options) as session:
        result = body()
    assert session.report is not None
    return Watched(result, session.report, session, capsys.readouterr().err)


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def bits(value: Any) -> Any:
    """A value in which every bit counts: NaN equals the same NaN, 0.0 differs from -0.0."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return tuple(value.shape), str(value.dtype), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(inner) for inner in value]
    return value


def fingerprint(*things: Any) -> dict[str, Any]:
    """Parameters and buffers with their version counters, gradients, optimizer and scaler states, random streams."""
    state: dict[str, Any] = {
        "torch": bits(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": bits(list(np.random.get_state())),
    }
    for position, thing in enumerate(things):
        if isinstance(thing, nn.Module):
            for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
                state[f"{position}.{name}"] = (bits(tensor), tensor._version)
                if tensor.grad is not None:  # (PyTorch counts no versions of foreach operators under a dispatch mode)
                    state[f"{position}.{name}.grad"] = bits(tensor.grad)
            state[f"{position}.training"] = [module.training for module in thing.modules()]
        elif hasattr(thing, "state_dict"):
            state[f"{position}.state"] = bits(thing.state_dict())
        else:
            state[f"{position}.value"] = bits(thing)
    return state
