"""A name in a line stands for what was assigned to it, where the text leaves no doubt."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

from ampguard.diagnose.code.assigned import assigned_to
from ampguard.diagnose.code.source import Source

Guard = Callable[..., Watched]

SURE = [
    """
    def loss(z):
        p = z.softmax(-1)
        return p.log()  # here
    """,
    """
    for x in data:
        p = x.float().sigmoid()
        if x.any():
            y = p.log()  # here
    """,
    """
    def score(net, x):
        with torch.no_grad():
            p = (x * 2).sigmoid()
        return torch.log(1 - p)  # here
    """,
    """
    class Loss:
        def __call__(self, z, t):
            p = torch.softmax(z / self.size, 1)
            nll = -(t * p.log())  # here
            return nll.mean()
    """,
]
UNSURE = {
    "a call of a model": """
    for x in data:
        p = net(x).sigmoid()
        y = p.log()  # here
    """,
    "a call of a part": """
    def loss(self, x):
        p = self.head(x).sigmoid()
        return p.log()  # here
    """,
    "random numbers": """
    for x in data:
        p = torch.softmax(x + torch.randn(3), -1)
        y = p.log()  # here
    """,
    "bound twice": """
    def loss(z):
        p = z.softmax(-1)
        p = p + 1
        return p.log()  # here
    """,
    "a parameter": """
    def loss(p):
        if p is None:
            p = z.softmax(-1)
        return p.log()  # here
    """,
    "on one way only": """
    def loss(z, soft):
        if soft:
            p = z.softmax(-1)
        return p.log()  # here
    """,
    "what it reads has changed": """
    def loss(z):
        p = z.softmax(-1)
        z = z + 1
        return p.log()  # here
    """,
    "an attribute that it reads has changed": """
    def loss(self, z):
        p = (z * self.size).softmax(-1)
        self.size = 2
        return p.log()  # here
    """,
    "behind it": """
    for z in data:
        q = p.log()  # here
        p = z.softmax(-1)
    """,
    "changed in place": """
    def loss(z):
        p = z.softmax(-1)
        p += 1
        return p.log()  # here
    """,
    "one of several": """
    def loss(z):
        p, q = z.softmax(-1)
        return p.log()  # here
    """,
}


def found(text: str) -> str | None:
    text = textwrap.dedent(text)
    source = Source.of(text)
    assert source is not None
    line = next(i for i, line in enumerate(text.splitlines(), 1) if "# here" in line)
    value = assigned_to(source, "p", line)
    return ast.unparse(value) if value is not None else None


@pytest.mark.parametrize("text", SURE)
def test_sure(text: str) -> None:
    assert found(text) is not None


@pytest.mark.parametrize("case", list(UNSURE))
def test_unsure(case: str) -> None:
    assert found(UNSURE[case]) is None


def entropy(z: Tensor) -> Tensor:
    p = z.softmax(-1)
    each = -(p * p.log()).sum(-1)
    return each.mean()


def hits(z: Tensor) -> Tensor:
    p = torch.sigmoid(z * 40)
    each = -torch.log(p.clamp(min=0.0))
    return each.mean()


def misses(z: Tensor) -> Tensor:
    p = torch.sigmoid(z * 40)
    each = -torch.log(1 - p)
    return each.mean()


FORMS = {
    entropy: "each = -(p * torch.log_softmax(z, -1)).sum(-1)",
    misses: "each = -torch.nn.functional.logsigmoid(-(z * 40))",
    hits: "each = -torch.nn.functional.logsigmoid(z * 40)",
}


@pytest.mark.parametrize("loss_of", list(FORMS))
def test_a_stable_form_is_written_with_it(guard: Guard, loss_of: Callable[[Tensor], Tensor]) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for step in range(4):
            loss: Any = loss_of(net(torch.randn(5, 4)) * (1000.0 if step == 2 else 1.0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes[0] == "domain-error"
    fix = next(fix for fix in run.first.fixes if fix.action == "stable-form")
    assert fix.verified
    assert fix.how == FORMS[loss_of]
