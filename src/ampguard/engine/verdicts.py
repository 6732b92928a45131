"""Whether steps were made or skipped: read where it waits for nothing, and passed on in the order of the steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.engine.policies import BadStep
from ampguard.engine.result import StepResult


class Verdict:
    """A step whose outcome may still be on its way from the device.

    It is sent at once, and an event says when it has arrived: reading it at the next step waits for this step only,
    not for the work that has been queued since.
    """

    def __init__(
        self,
        result: StepResult,
        optimizers: tuple[str, ...],
        losses: Sequence[Tensor],
        flag: Tensor,
        keys: tuple[Hashable, ...] | None = None,
    ) -> None:
        """`keys`: what tells the optimizers apart, where their names do not."""
        self.result = result
        self.keys = keys if keys is not None else optimizers
        self.optimizers = optimizers
        self.losses = losses
        self.is_known = flag.is_cpu
        self._host = flag if flag.is_cpu else flag.detach().to("cpu", non_blocking=flag.is_cuda)
        self._sent: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(flag.device))

    def wait(self) -> bool:
        """Whether the step was skipped."""
        if self._sent is not None:
            self._sent.synchronize()
        self.result.arrived(self._host)
        return bool(self._host)


class Verdicts:
    """Steps that nobody has judged yet, and how many in a row were skipped."""

    def __init__(
        self,
        patience: int,
        on_good: Callable[[Verdict], Any],
        on_bad: Callable[[BadStep], Any],
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`all_agree`: whether a loss that is finite here is so on all ranks."""
        self._all_agree = all_agree
        self.patience = patience
        self.steps = 0
        """Steps that were made."""
        self.attempts = 0
        self._in_a_row: dict[Hashable, int] = {}
        self._in_a_row_before = 0
        """Of an optimizer that nothing is known of since the state was loaded."""
        self._on_good = on_good
        self._on_bad = on_bad
        self._open: list[Verdict] = []

    @property
    def in_a_row(self) -> int:
        """The longest row of skipped steps that an optimizer is in: the good steps of another do not end it."""
        return max(self._in_a_row.values(), default=self._in_a_row_before)

    @in_a_row.setter
    def in_a_row(self, count: int) -> None:
        self._in_a_row, self._in_a_row_before = {}, count

    def add(self, verdict: Verdict, wait: bool) -> None:
        """Judge it now if that waits for nothing, or at the next call."""
        self._open.append(verdict)
        if verdict.is_known or wait:
            self.settle()

    def settle(self) -> None:
        """Judge all steps there are."""
        while self._open:
            verdict = self._open.pop(0)
            if verdict.wait():
                for key in verdict.keys:
                    self._in_a_row[key] = self._in_a_row.get(key, self._in_a_row_before) + 1
                bad = self._bad_step(verdict)
                self.attempts += 1
                self._on_bad(bad)
            else:
                self._in_a_row.update(dict.fromkeys(verdict.keys, 0))
                self.attempts += 1
                self.steps += 1
                self._on_good(verdict)

    def _bad_step(self, verdict: Verdict) -> BadStep:
        result = verdict.result
        is_finite = self._all_agree(all(bool(torch.isfinite(loss).all()) for loss in verdict.losses))
        return BadStep(
            self.attempts,
            verdict.optimizers,
            result.nonfinite,
            result.loss_scale,
            is_finite,
            max(self._in_a_row[key] for key in verdict.keys),
            self.patience,
        )


def nonfinite_names(
    parameters: Iterable[Tensor], name_of: Callable[[Tensor], str], flag: Tensor, even_if_slow: bool
) -> Callable[[], tuple[str, ...]] | None:
    """Who will name the parameters with non-finite gradients; None where that would cost a further read.

    On the CPU a gradient is looked at again only if the step is bad.
    """
    if flag.is_cpu and not bool(flag):
        return lambda: ()
    if not flag.is_cpu and not even_if_slow:
        return None
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    here = [compat.local_part(grad) for _, grad in held]  # of shards, those of this rank: nobody else is asked
    values = [compat.stored_values(grad) if grad.layout != torch.strided else grad for grad in here]
    norms = torch.stack([norm.to(flag.device, torch.float64) for norm in compat.norms_of(values)])
    names = tuple(name_of(p) for p, _ in held)
    return lambda: tuple(name for name, bad in zip(names, (~norms.isfinite()).tolist(), strict=True) if bad)
