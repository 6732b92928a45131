"""Mixed precision in the old way: a half model, float32 masters in the optimizer, a loss scale of the script's own.

No optimizer is reached by a backward pass; the script copies the gradients. Each clip that comes too early has a healthy twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Guard = Callable[..., Any]
SCALE = 1024.0
LIMIT = 0.05


class OldWay:
    """`order`: of copy, divide and clip, each a letter; `C` clips the half gradients themselves."""

    def __init__(self, order: str, limit: float = LIMIT, flat: bool = False, assigns: bool = True) -> None:
        torch.manual_seed(0)
        self.order, self.limit, self.flat, self.assigns = order, limit, flat, assigns
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).half()
        self.weights = list(self.model.parameters())
        values = [p.detach().float() for p in self.weights]
        self.masters = [nn.Parameter(v) for v in ([torch.cat([v.flatten() for v in values])] if flat else values)]
        self.opt = torch.optim.SGD(self.masters, lr=0.05)

    def copy(self) -> None:
        grads = [p.grad.float() for p in self.weights if p.grad is not None]
        if self.flat:
            grads = [torch.cat([g.flatten() for g in grads])]
        for master, grad in zip(self.masters, grads, strict=True):
            if self.assigns or master.grad is None:
                master.grad = grad
            else:
                master.grad.data.copy_(grad)

    def divide(self) -> None:
        for master in self.masters:
            assert master.grad is not None
            master.grad.data.mul_(1.0 / SCALE)

    def clip_masters(self) -> None:
        nn.utils.clip_grad_norm_(self.masters, self.limit)  # limited

    def clip_model(self) -> None:
        nn.utils.clip_grad_norm_(self.weights, self.limit)  # limited

    def train(self) -> None:
        calls = {"c": self.copy, "d": self.divide, "l": self.clip_masters, "L": self.clip_model}
        for _ in range(4):
            loss = F.cross_entropy(self.model(torch.randn(6, 4).half()).float(), torch.randint(0, 3, (6,)))
            self.model.zero_grad()
            (loss * SCALE).backward()
            for letter in self.order:
                calls[letter]()
            self.opt.step()
            with torch.no_grad():
                parts = self.masters[0].split([p.numel() for p in self.weights]) if self.flat else self.masters
                for p, part in zip(self.weights, parts, strict=True):
                    p.copy_(part.view_as(p))


def old_way(order: str, **options: Any) -> Callable[[], None]:
    return lambda: OldWay(order, **options).train()


@pytest.mark.parametrize(
    "body",
    [
        old_way("cld"),
        old_way("cld", assigns=False),
        old_way("cld", flat=True),
        old_way("Lcd"),
        old_way("Lcd", flat=True),
    ],
    ids=["masters", "copied in place", "a flat buffer", "the half gradients", "the half gradients of a flat buffer"],
)
def test_masters_are_clipped_while_scaled(body: Callable[[], None], guard: Guard) -> None:
    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.evidence["factor"]) == ("clip-before-unscale", 0, SCALE)
    assert incident.location is not None
    assert incident.location.code.endswith("# limited")
    assert incident.evidence["update_too_small_by"] == pytest.approx(SCALE)
    assert "1024 times smaller than the limit asks for" in incident.explanation
    assert "divide the gradients by the loss scale 1024 first" in incident.fixes[0].how


def test_a_limit_that_true_gradients_do_not_reach(guard: Guard) -> None:
    """The clip takes from scaled ones what is above the limit, and nothing would have been taken from true ones."""
    (incident,) = guard(old_way("cld", limit=100.0)).report.incidents
    assert 1.0 < incident.evidence["update_too_small_by"] < SCALE / 10


def test_gradients_that_the_script_has_dropped_are_not_clipped(guard: Guard) -> None:
    """The model's are gone once the masters have theirs, divided."""

    class Drops(OldWay):
        def copy(self) -> None:
            for master, p in zip(self.masters, self.weights, strict=True):
                assert p.grad is not None
                master.grad = p.grad.float().mul_(1.0 / SCALE)
                p.grad = None

    assert not guard(lambda: Drops("cl", limit=100.0).train()).report.incidents


@pytest.mark.parametrize(
    "body",
    [
        old_way("cdl"),
        old_way("cdl", flat=True),
        old_way("cdl", assigns=False),
        old_way("cld", limit=LIMIT * SCALE),
        old_way("Lcd", limit=LIMIT * SCALE),
        old_way("cd"),
        old_way("cl"),  # never divided: nothing says that it is a scale
        old_way("cld", limit=1e9),
    ],
    ids=["divided first", "flat", "in place", "limit", "the model's", "no clip", "no division", "nothing to clip"],
)
def test_masters_that_are_clipped_rightly(body: Callable[[], None], guard: Guard) -> None:
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert not run.report.incidents


class Dynamic:
    """Its own dynamic loss scale: where gradients overflow, the step is skipped and the scale halved."""

    def __init__(self, too_high_at: int) -> None:
        torch.manual_seed(0)
        self.too_high_at = too_high_at
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).half()
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.opt = torch.optim.SGD(self.masters, lr=0.05)
        self.scale, self.skipped = SCALE, 0

    def train(self) -> None:
        for step in range(self.too_high_at + 8):
            if step == self.too_high_at:
                self.scale = 2.0**22
            loss = F.cross_entropy(self.model(torch.randn(6, 4).half()).float(), torch.randint(0, 3, (6,)))
            self.model.zero_grad()
            (loss * self.scale).backward()
            self.update()
        assert self.skipped > 0

    def update(self) -> None:
        grads = [p.grad.float() / self.scale for p in self.model.parameters() if p.grad is not None]
        if not all(bool(torch.isfinite(grad).all()) for grad in grads):
            self.scale /= 2
            self.skipped += 1
            return
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.opt.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters, strict=True):
                p.copy_(master)


@pytest.mark.parametrize("too_high_at", [0, 12])
def test_skipped_steps_of_a_scale_by_hand(too_high_at: int, guard: Guard) -> None:
    """Once it is known how the loop works, as at its beginning."""
    run = guard(lambda: Dynamic(too_high_at).train())
    assert run.report.status == "clean", run.stderr


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("assigns", [False, True])
def test_a_scale_that_nobody_checks_is_told_where_the_half_gradient_overflows(
    flat: bool, assigns: bool, guard: Guard
) -> None:
    """The bad gradient is the half model's; the masters' is a copy of it, and no backward pass gives it again."""
    seen: list[bool] = []

    def body() -> None:
        one, scale = OldWay("", flat=flat, assigns=assigns), 2.0**14
        for _ in range(8):
            logits = one.model(torch.randn(6, 4).half()) * 8.0
            loss = F.cross_entropy(logits.float(), torch.randint(0, 3, (6,)))
            one.model.zero_grad()
            (loss * scale).backward()
            one.copy()
            for master in one.masters:
                assert master.grad is not None
                master.grad.data.mul_(1.0 / scale)
                seen.append(bool(master.grad.isfinite().all()))
            one.opt.step()
            with torch.no_grad():
                parts = one.masters[0].split([p.numel() for p in one.weights]) if flat else one.masters
                for p, part in zip(one.weights, parts, strict=True):
                    p.copy_(part.view_as(p))
            scale *= 4.0

    run = guard(body)
    assert run.faults == 0, run.stderr
    step = seen.index(False) // (1 if flat else 4)
    first = run.first
    assert (first.severity, first.cause, first.step, first.phase) == ("error", "loss-scale-overflow", step, "backward")
    assert first.evidence["rung"] == "replay"
    assert (first.fixes[0].action, first.fixes[0].verified) == ("lower-loss-scale", True)
