"""Modules that are given objects of the script's own: a graph, an encoding, instances; their tensors are arguments."""

from __future__ import annotations

import types
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, bits, fingerprint, seed_everything

from ampguard.capture.root_calls.given_objects import GivenObject, with_objects

Guard = Callable[..., Watched]
BAD = 3


class Graph:
    """As graph libraries keep it: attributes lie in a store."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.__dict__["_store"] = {"x": x, "y": y}
        self.__dict__["visits"] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError as missing:
            raise AttributeError(name) from missing

    def __setattr__(self, name: str, value: Any) -> None:
        self._store[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._store[name]


class Net(nn.Module):
    """Puts its own results in the place of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, data: Graph) -> Tensor:
        data.x = F.relu(self.a(data.x))
        data.visits.append(len(data.visits))
        data.share = data.x / data.x.sum(-1, keepdim=True)
        return self.b(data.share)


def batch(step: int, value: float = -2.0) -> Graph:
    x = torch.rand(5, 4)
    if step == BAD:
        x[1] = value
    return Graph(x, torch.randint(0, 2, (5,)))


def prepared(kind: type[nn.Module]) -> nn.Module:
    seed_everything()
    model = kind()
    with torch.no_grad():
        model.a.weight.abs_()
        model.a.bias.zero_()
    return model


def trained(model: nn.Module, value: float, encoder: nn.Module | None = None) -> Any:
    parameters = [*model.parameters(), *(encoder.parameters() if encoder is not None else ())]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    states = []
    for step in range(BAD + 1):
        data = batch(step, value)
        if encoder is not None:
            data.x = encoder(data.x)
        loss = F.cross_entropy(model(data), data.y)
        states.append((bits([loss, data.x, data.share]), list(data.visits), sorted(data._store)))
        optimizer.zero_grad()
        loss.backward()
        states.append(
            (bits([data.x, data.share, *(p.grad for p in parameters)]), list(data.visits), sorted(data._store))
        )
        if step != BAD:
            optimizer.step()
    return states, fingerprint(model, optimizer)


@pytest.mark.parametrize("encoded", [False, True])
def test_forward_that_replaces_what_it_was_given_is_run_again(encoded: bool, guard: Guard) -> None:
    def body() -> Any:
        model = prepared(Net)
        encoder = nn.Identity() if not encoded else nn.Linear(4, 4, bias=False)
        if encoded:
            nn.init.eye_(encoder.weight)
        return trained(model, -2.0, encoder)

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step, incident.evidence["rung"]) == ("division-by-zero", BAD, "replay")
    assert all(fix.verified for fix in incident.fixes)


def test_bad_values_in_an_object_have_its_name_and_a_fix(guard: Guard) -> None:
    def body() -> Any:
        return trained(prepared(Net), float("nan"))

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    incident = run.first
    assert (incident.cause, incident.step) == ("nonfinite-input", BAD)
    assert incident.evidence["name"] == "data['x']"
    assert all("data['x']" in fix.how for fix in incident.fixes)
    assert {fix.action: fix.verified for fix in incident.fixes} == {"fix-data": True, "filter-sample": True}


class Boxes:
    def __init__(self) -> None:
        self.tensor = torch.zeros(2, 4)


class Instances:
    def __init__(self) -> None:
        self.boxes, self.size, self._cache = Boxes(), (4, 4), torch.ones(1)


class Trainer:
    def __init__(self) -> None:
        self.model, self.total = nn.Linear(2, 2), torch.zeros(())


@pytest.mark.parametrize(
    ("thing", "names"),
    [
        (Instances(), ["", ".boxes.tensor"]),
        (UserDict({"pixels": torch.zeros(1)}), [".data['pixels']"]),
        (Trainer(), None),
        (types.SimpleNamespace(width=3, layers="2"), None),
        (types.SimpleNamespace(cache=None), []),
        (type("Cache", (), {})(), []),
        (iter([torch.zeros(1)]), None),
    ],
)
def test_what_counts_as_a_batch(thing: Any, names: list[str] | None) -> None:
    given = with_objects(({"images": [torch.zeros(1)], "with": [thing]},), lambda tensor: tensor)[0]["with"][0]
    if names is None:
        assert given is thing
    else:
        assert isinstance(given, GivenObject)
        assert sorted(name for _, _, name in given.places.found) == names


def test_arguments_without_objects_are_not_copied() -> None:
    arguments = (torch.zeros(1), [torch.zeros(1), {"a": 1, "b": (torch.zeros(1), None)}])
    assert with_objects(arguments, lambda tensor: tensor) is arguments


class Events(NamedTuple):
    """Of a length that is not the number of its fields."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return self.x.shape[0]


def test_a_named_tuple_with_a_length_of_its_own(guard: Guard) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, events: Events) -> Tensor:
            assert len(events) == 8
            return (self.linear(events.x).squeeze(1) / events.y).square().mean()

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(8):
            events = Events(torch.randn(8, 4), torch.arange(8.0) if step == 5 else torch.rand(8) + 0.5)
            loss = net(Events(*(column * 1.0 for column in events)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step) == ("division-by-zero", 5)
    assert run.first.fixes[0].verified
