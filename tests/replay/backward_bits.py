"""The gradients of a step as the optimizer would have used them, beside those of its replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from watching import bits

import ampguard
from ampguard.capture.record import BadResult
from ampguard.capture.recorder import FlightRecorder
from ampguard.replay.outcome import Outcome
from ampguard.replay.rebuild import Replayer
from ampguard.replay.sandbox import neutral_thread

STEPS = 3
LAST = STEPS - 1


def spoil(x: Tensor, step: int) -> Tensor:
    """In the last step: the same values, with a derivative that is NaN in the last column."""
    if step != LAST:
        return x
    last = x[..., -1:]
    return torch.cat([x[..., :-1], last + (last * 0.0).sqrt()], -1)


def overflow(x: Tensor, step: int) -> Tensor:
    """In the last step: about the same values, with a derivative that is infinite in the first column."""
    if step != LAST:
        return x
    first = x[..., :1]
    return torch.cat([first * 1e-3 + (first * 1e25).sin() * 1e19, x[..., 1:]], -1)


@dataclass(frozen=True)
class Compared:
    """One parameter's gradient: as the optimizer would have used it, and as replayed."""

    real: Tensor
    replayed: Tensor

    @property
    def is_same(self) -> bool:
        """Bitwise, any NaN equal to any other."""
        a, b = self.real, self.replayed
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool((a.isnan() == b.isnan()).all()) and bits(a.nan_to_num(0.0)) == bits(b.nan_to_num(0.0))


def dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def unscaled(gradient: Tensor, bad: BadResult) -> Tensor:
    """As the scaler unscales: by the reciprocal of the scale, in float32."""
    return gradient if bad.loss_scale is None else gradient * torch.tensor(bad.loss_scale).double().reciprocal().float()


def at_bad_gradients(
    body: Callable[[], object], out: Path, look: Callable[[FlightRecorder, BadResult], Any]
) -> list[Any]:
    """Run `body` under guard; at each step with bad gradients call `look` in place of the investigation."""
    seen: list[Any] = []
    errors: list[BaseException] = []

    def examine(bad: BadResult) -> None:
        if bad.kind != "gradient":
            return
        try:
            with neutral_thread():
                seen.append(look(session._recorder, bad))
        except BaseException as error:
            errors.append(error)

    with ampguard.watch(out=out) as session:
        session._examiner.examine = examine  # type: ignore[method-assign]
        body()
    if errors:
        raise errors[0]
    assert not session._barrier.tripped
    return seen


def compared(outcome: Outcome, bad: BadResult) -> list[Compared]:
    """Each replayed gradient beside the real one."""
    return [Compared(dense(p.grad), unscaled(g, bad)) for p, g in outcome.gradients if p.grad is not None]


def replays_bitwise(body: Callable[[], object], out: Path, some_finite: bool = True) -> None:
    """The one bad step, replayed traced and untraced, has the gradients of the step itself, which stay as they are."""

    def look(recorder: FlightRecorder, bad: BadResult) -> list[list[Compared]]:
        replayer = Replayer(bad, recorder)
        real = {id(p): dense(p.grad).clone() for p in bad.parameters if p.grad is not None}
        assert real
        runs = []
        for traced in (True, False):
            outcome = replayer.run(traced=traced)
            assert outcome.is_bad
            assert outcome.is_exact
            assert {id(p) for p, _ in outcome.gradients} == set(real)
            runs.append(compared(outcome, bad))
        for p in bad.parameters:
            assert p.grad is None or bits(dense(p.grad)) == bits(real[id(p)])
        return runs

    found = at_bad_gradients(body, out, look)
    assert len(found) == 1, "one bad step"
    for run in found[0]:
        assert not all(c.real.isfinite().all() for c in run)
        if some_finite:
            assert any(c.real.isfinite().any() and c.real.count_nonzero() for c in run)
        assert [c for c in run if not c.is_same] == []


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def training(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor]) -> Callable[[], None]:
    """Plain steps of SGD; the loss of the last one has a bad derivative."""

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            assert loss.isfinite().all()
            loss.backward()
            optimizer.step()

    return body


class Shifted(nn.Module):
    """A network, and a parameter beside it that alone gets bad gradients: those of the network can be compared."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.shift = nn.Parameter(torch.ones(3))

    def spoilt(self, step: int) -> Tensor:
        return spoil(self.shift * 1.0, step).sum()
