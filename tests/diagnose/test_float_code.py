"""Float32 outside modules is printed as a statement that can stand as it is: its names are widened."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

Guard = Callable[..., Watched]


class Loss:
    def __init__(self) -> None:
        self.size, self.centre = 4.0, torch.zeros(8)

    def similar(self, z: Tensor) -> Tensor:
        sim = z @ z.t()
        return sim.float().square().mean().sqrt()

    def energy(self, z: Tensor) -> Tensor:
        total = (z * z).sum(1)
        return total.float().mean()

    def scaled(self, z: Tensor) -> Tensor:
        moved = (z - self.centre.to(z.dtype)) * (100.0 * self.size)
        return moved.float().abs().mean()

    def of_both(self, z: Tensor) -> Tensor:
        wide = z.float()
        product = wide @ wide.T
        return product.float().mean()

    def of_a_dict(self, z: Tensor) -> Tensor:
        out = {"mean": z}
        total = (out["mean"] * out["mean"]).sum(1)
        return total.float().mean()

    def of_an_object(self, z: Tensor) -> Tensor:
        out = SimpleNamespace(parts=SimpleNamespace(mean=z))
        total = (out.parts.mean * out.parts.mean).sum(1)
        return total.float().mean()


STATEMENTS = {
    "similar": "sim = z.float() @ z.float().t()",
    "energy": "total = (z.float() * z.float()).sum(1)",
    "scaled": "moved = (z.float() - self.centre.to(z.float().dtype)) * (100.0 * self.size)",
    "of_a_dict": 'total = (out["mean"].float() * out["mean"].float()).sum(1)',
    "of_an_object": "total = (out.parts.mean.float() * out.parts.mean.float()).sum(1)",
    "of_both": "product = wide @ wide.T",
}


@pytest.mark.parametrize("name", list(STATEMENTS))
def test_the_statement_is_printed_and_cures(guard: Guard, name: str) -> None:
    def trained(compute: Callable[[Tensor], Any]) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(4, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        losses = []
        for step in range(3):
            x = torch.randn(6, 4) * (300.0 if step == 2 else 0.1)
            with torch.autocast("cpu", torch.float16):
                loss = compute(net(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    run = guard(lambda: trained(getattr(Loss(), name)))
    assert run.faults == 0, run.stderr
    assert run.causes == ["fp16-overflow"]
    fix = next(fix for fix in run.first.fixes if fix.action == "force-fp32")
    assert fix.verified
    assert fix.how == f'with torch.autocast("cpu", enabled=False): {STATEMENTS[name]}'
    assert run.first.location is not None
    repaired = _with_statement(name, run.first.location.code, fix.how)
    assert all(map(torch.isfinite, map(torch.tensor, trained(repaired))))


def _with_statement(name: str, old: str, new: str) -> Callable[[Tensor], Tensor]:
    """The method of `Loss` with one statement in the place of another."""
    import inspect
    import textwrap

    text = textwrap.dedent(inspect.getsource(getattr(Loss, name)))
    assert text.count(old) == 1
    scope: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "SimpleNamespace": SimpleNamespace}
    exec(text.replace(old, new), scope)
    method: Callable[[Tensor], Tensor] = scope[name].__get__(Loss())
    return method
