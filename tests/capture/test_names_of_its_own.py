"""Networks whose classes use PyTorch's names for something of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampguard
from ampguard.compat import members


class Learner(nn.Module):
    """MAML's (dragen1860/MAML-Pytorch): its weights are a list, which `parameters()` gives as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3))])

    def parameters(self) -> nn.ParameterList:  # type: ignore[override]
        return self.vars

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *self.vars)


class Groups(nn.Module):
    """With an argument more, and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def parameters(self, part: str) -> Iterator[nn.Parameter]:  # type: ignore[override]
        yield from getattr(self, part)._parameters.values()

    def named_parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return [*self.parameters("body"), *self.parameters("head")]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Kept(nn.Module):
    """A tree's children, an agent's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.modules = ["inner"]  # type: ignore[assignment]
        self.children = None  # type: ignore[assignment]
        self.buffers = {}  # type: ignore[assignment]
        self.named_modules = self.named_buffers = 3  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("kind", ["Learner", "Groups", "Kept", "Circle"])
def test_watched_all_the_same(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    with ampguard.watch(out=tmp_path / "run") as session:
        model: nn.Module = globals()[kind]()
        optimizer = torch.optim.SGD(members.all_parameters(model), lr=0.01)
        for step in range(8):
            x = torch.rand(8, 4)
            logits = model(x)
            loss = logits.logsumexp(1).mean() + (x.sum() - (1000 if step == 5 else 0)).sqrt()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model(x)
    assert session.report is not None
    assert "fault of its own" not in capsys.readouterr().err
    assert [(i.cause, i.step) for i in session.report.incidents] == [("domain-error", 5)]
    place = session.report.incidents[0].location
    assert place is not None
    assert (place.code or "").startswith("loss = logits")
    assert session.report.steps == 8


class Child(nn.Module):
    """A node of a tree that knows where it hangs: `parameters()` of such a circle works, and so does training it."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.inner, self.parent = nn.Linear(4, 3), parent

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Circle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.child = Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.body(x).tanh())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.nothing = nn.Linear(3, 3), nn.BatchNorm1d(3), None
        self.again = nn.Sequential(self.first, nn.Linear(3, 3))
        self.again[1].weight = self.first.weight
        self.register_parameter("absent", None)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


@pytest.mark.parametrize(
    "module",
    [Tied(), Circle(), torch.jit.script(Tied()), nn.DataParallel(Tied()), nn.LSTM(2, 3, num_layers=2), nn.Sequential()],
    ids=["tied", "circle", "scripted", "wrapped", "recurrent", "empty"],
)
def test_members_are_what_pytorchs_methods_yield(module: nn.Module) -> None:
    def ids(found: object) -> list[int]:
        return [id(each) for each in found]  # type: ignore[attr-defined]

    def named(found: object) -> list[tuple[str, int]]:
        return [(name, id(each)) for name, each in found]  # type: ignore[attr-defined]

    assert ids(members.all_parameters(module)) == ids(module.parameters())
    assert ids(members.own_parameters(module)) == ids(module.parameters(recurse=False))
    assert ids(members.all_buffers(module)) == ids(module.buffers())
    assert ids(members.all_modules(module)) == ids(module.modules())
    assert members.has_parameters(module) is any(True for _ in module.parameters())
    assert named(members.named_buffers(module).items()) == named(module.named_buffers())
    if isinstance(module, Circle):  # PyTorch's method never ends with duplicates
        assert [name for name, _ in members.named_modules(module, False)] == ["", "body", "child", "child.inner"]
    for once in (True, False)[: 1 if isinstance(module, Circle) else 2]:
        assert named(members.named_modules(module, once)) == named(module.named_modules(remove_duplicate=once))
        found = members.named_parameters(module, once).items()
        assert named(found) == named(module.named_parameters(remove_duplicate=once))
