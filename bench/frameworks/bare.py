"""Runs a script without any guard and says what became of its weights.

python -m bench.frameworks.bare RECORD.json SCRIPT [ARGS]

Keeps a copy of what every optimizer was built from, and compares at the end: what is not finite, what never moved.
Each rank of a launch writes a record of its own (`RECORD-<rank>.json`).
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from bench.faults.baselines import host
from torch import Tensor


class Ending(msgspec.Struct, frozen=True):
    """What became of the tensors that the optimizers hold."""

    tensors: int
    nonfinite: int
    unmoved: int
    attempted: int
    made: int
    checksum: int


class Observer:
    """Counts steps and remembers what the optimizers were given."""

    def __init__(self) -> None:
        self.attempted = self.made = 0
        self._held: list[tuple[Tensor, Tensor]] = []
        self._in_scaler = False

    def install(self) -> None:
        """Watch every optimizer and scaler made from now on."""
        observer = self
        made, scaled = torch.optim.Optimizer.__init__, torch.amp.GradScaler.step

        def optimizer_made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            held = [p for group in optimizer.param_groups for p in group["params"]]
            observer._held += [(p, p.detach().clone()) for p in held]
            optimizer.register_step_post_hook(lambda *_: observer._stepped())

        def scaler_step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            observer.attempted += 1
            observer._in_scaler = True
            try:
                return scaled(scaler, optimizer, *args, **kwargs)
            finally:
                observer._in_scaler = False

        torch.optim.Optimizer.__init__ = optimizer_made  # type: ignore[method-assign]
        torch.amp.GradScaler.step = scaler_step  # type: ignore[method-assign]

    def _stepped(self) -> None:
        self.made += 1
        self.attempted += not self._in_scaler

    def ending(self) -> Ending:
        """How the tensors are now. One in two optimizers counts once, as it was given to the first."""
        first: dict[int, tuple[Tensor, Tensor]] = {}
        for now, before in self._held:
            first.setdefault(id(now), (now, before))
        pairs = [(now.detach(), before) for now, before in first.values()]
        same = [now.shape == before.shape and torch.equal(now.float(), before.float()) for now, before in pairs]
        bits = b"".join(now.float().contiguous().numpy().tobytes() for now, _ in pairs)
        return Ending(
            tensors=len(pairs),
            nonfinite=sum(not bool(torch.isfinite(now).all()) for now, _ in pairs),
            unmoved=sum(same),
            attempted=self.attempted,
            made=self.made,
            checksum=zlib.crc32(bits),
        )


def main() -> None:
    record, command = Path(sys.argv[1]), sys.argv[2:]
    observer = Observer()
    observer.install()
    try:
        host.run_script(command)
    finally:
        if "RANK" in os.environ:
            record = record.with_stem(f"{record.stem}-{os.environ['RANK']}")
        record.write_bytes(msgspec.json.encode(observer.ending()))


if __name__ == "__main__":
    main()
