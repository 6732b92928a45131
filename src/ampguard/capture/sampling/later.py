"""Numbers that a device computes and that are read later, so that nobody waits for it.

On the CPU they are there at once. On another device they are gathered into one tensor, copied to pinned memory behind
the work that is queued already, and read when the copy has been made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MAX_WAITING = 64
"""Copies under way at most; beyond it the oldest is given up rather than waited for."""

Receiver = Callable[[list[float | None]], None]


class _Copy:
    """Some numbers on their way from one device."""

    def __init__(self, positions: list[int], numbers: list[Tensor]) -> None:
        self.positions = positions
        with torch.no_grad():
            gathered = torch.stack([number.detach().reshape(()).to(torch.float32) for number in numbers])
        self.host = torch.empty(len(numbers), dtype=torch.float32, device="cpu", pin_memory=gathered.is_cuda)
        self.host.copy_(gathered, non_blocking=True)
        self.event: torch.cuda.Event | None = None
        if gathered.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    @property
    def has_come(self) -> bool:
        return self.event is None or self.event.query()


class NumbersLater:
    """Hands numbers on in the order in which they were asked for."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[list[float | None], list[_Copy], Receiver]] = deque()

    def ask(self, numbers: Sequence[Tensor | float | None], receiver: Receiver) -> None:
        """Call `receiver` with these numbers as soon as they can be had without waiting: now, on the CPU."""
        values: list[float | None] = []
        elsewhere: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
        for position, number in enumerate(numbers):
            if not isinstance(number, Tensor):
                values.append(number)
            elif number.device.type == "cpu":
                values.append(float(number.item()))
            else:
                values.append(None)
                positions, tensors = elsewhere.setdefault(number.device, ([], []))
                positions.append(position)
                tensors.append(number)
        if not elsewhere and not self.waiting:
            receiver(values)
            return
        self.waiting.append((values, [_Copy(*group) for group in elsewhere.values()], receiver))
        self.poll()

    def poll(self, wait: bool = False) -> None:
        """Hand on what has come; with `wait`, everything (the run ends)."""
        while self.waiting:
            values, copies, receiver = self.waiting[0]
            if wait:
                for copy in copies:
                    if copy.event is not None:
                        copy.event.synchronize()
            has_come = all(copy.has_come for copy in copies)
            if not has_come and len(self.waiting) <= MAX_WAITING:
                return
            self.waiting.popleft()
            for copy in copies if has_come else ():
                for position, value in zip(copy.positions, copy.host.tolist(), strict=True):
                    values[position] = value
            receiver(values)
