"""Modules and parameters by the names that the running script has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

from ampguard.replay.names import paths_in_holders
from ampguard.replay.variables import script_names


@dataclass
class Trainer:
    encoder: nn.Module = field(default_factory=lambda: nn.Linear(2, 2))

    def named(self) -> dict[int, str]:
        return script_names([self.encoder])


def test_local_variable() -> None:
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    assert script_names([encoder, decoder]) == {id(encoder): "encoder", id(decoder): "decoder"}


def test_variable_of_a_calling_frame() -> None:
    encoder = nn.Linear(2, 2)

    def called(module: nn.Module) -> dict[int, str]:
        return script_names([module])

    (name,) = called(encoder).values()
    assert name == "module", "the innermost frame comes first"


def test_attribute_of_an_object() -> None:
    trainer = Trainer()
    encoder = id(trainer.encoder)
    assert script_names([trainer.encoder])[encoder] == "trainer.encoder"
    assert trainer.named()[encoder] == "encoder"


def test_items_of_containers() -> None:
    nets = {"G": nn.Linear(2, 2), "D": nn.Linear(2, 2)}
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    names = script_names([nets["D"], stages[1]])
    assert list(names.values()) == ["nets['D']", "stages[1]"]


def test_part_of_another_module() -> None:
    model = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    stem = model["stem"]
    inner = stem[0]  # type: ignore[index]
    assert script_names([stem, inner]) == {id(stem): "stem", id(inner): "stem.0"}


def test_module_that_nothing_names() -> None:
    assert script_names(iter([nn.Linear(2, 2)])) == {}


@pytest.mark.parametrize("is_split", [True, False])
def test_parameters_in_a_report(is_split: bool, guard: Callable[..., Watched]) -> None:
    """Only where the names of parameters are not enough, those of the modules are added."""
    encoder, decoder = nn.Linear(4, 3), nn.Linear(3, 2)
    whole = encoder if is_split else nn.Sequential(encoder, decoder)

    def root_of(values: Tensor) -> Tensor:
        return values + (values * 0.0).pow(2).sum().sqrt()

    def body() -> None:
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        x = torch.ones(2, 4)
        out = decoder(root_of(encoder(x))) if is_split else root_of(whole(x))
        out.mean().backward()
        optimizer.step()

    parameters = guard(body).first.evidence["parameters"]
    names = {*parameters["finite"], *parameters["nonfinite"]}
    outer = {"encoder", "decoder"} if is_split else {"0", "1"}
    assert {name.partition(".")[0] for name in names} <= outer
    assert len(names) == 4


def test_module_in_a_holder() -> None:
    parts = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    for part in parts["stem"]:  # a variable of its own
        assert paths_in_holders([part, parts["head"]]) == {id(part): "stem.0", id(parts["head"]): "head"}


@pytest.mark.parametrize("is_held_first", [True, False])
def test_holder_in_a_holder(is_held_first: bool) -> None:
    """Each of the holders has a variable too, and one hangs in the other."""
    outer = nn.ModuleDict({"inp": nn.Linear(2, 2)}) if is_held_first else None
    blocks = nn.ModuleList([nn.Linear(2, 2)])
    model = nn.ModuleDict({"inp": nn.Linear(2, 2)}) if outer is None else outer
    model["blocks"] = blocks
    assert paths_in_holders([model["inp"], blocks[0]]) == {id(model["inp"]): "inp", id(blocks[0]): "blocks.0"}


class Composed(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.value = nn.Linear(2, 1)


def test_module_that_the_script_holds_itself() -> None:
    policy = nn.Linear(2, 2)
    algorithm = Composed(policy)
    assert paths_in_holders([policy, algorithm.value]) == {id(algorithm.value): "value"}


def test_holder_in_a_wrapper() -> None:
    wrapped = nn.DataParallel(Composed(nn.Linear(2, 2)))
    assert paths_in_holders([wrapped.module.value]) == {id(wrapped.module.value): "value"}


def test_incident_in_a_holder(guard: Callable[..., Watched]) -> None:
    parts = nn.ModuleDict({"stem": nn.Linear(2, 4), "head": nn.Sequential(nn.Linear(4, 1))})
    nn.init.constant_(parts["head"][0].weight, float("nan"))
    incident = guard(lambda: parts["head"](parts["stem"](torch.ones(1, 2))).mean().backward()).first
    assert (incident.module, incident.evidence["name"]) == ("head.0", "head.0.weight")


class Deprecated:
    """As `torch.distributed.reduce_op`: whatever it is asked for warns first."""

    def __getattribute__(self, name: str) -> object:
        raise FutureWarning(name)


def test_a_variable_is_not_asked_for_anything() -> None:
    old, items = Deprecated(), [Deprecated()]
    encoder = nn.Linear(2, 2)
    assert script_names([encoder]) == {id(encoder): "encoder"}
    assert items[0] is not old
