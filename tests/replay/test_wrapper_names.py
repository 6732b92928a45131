"""A wrapper that leaves its child's name out of `state_dict` leaves it out of the modules' names as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampguard import compat
from ampguard.replay.names import module_names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)


class Hiding(nn.Module):
    """Two names for one child, of which a checkpoint has none."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._forward = net
        self._original = net

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._original.state_dict(*args, **kwargs)


class Prefixing(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


def names(root: nn.Module) -> set[str]:
    return set(module_names(root).values())


def test_a_wrapper_that_hides_its_child_has_no_name() -> None:
    assert names(Hiding(Net())) == {"", "encoder", "head"}
    assert names(Hiding(Hiding(Net()))) == {"", "encoder", "head"}
    assert isinstance(compat.unwrapped(Hiding(Net())), Net)


@pytest.mark.parametrize("wrapper", [Prefixing, nn.Sequential])
def test_a_module_whose_checkpoint_names_its_child_is_no_wrapper(wrapper: type[nn.Module]) -> None:
    prefix = "0" if wrapper is nn.Sequential else "net"
    assert names(wrapper(Net())) == {"", prefix, f"{prefix}.encoder", f"{prefix}.head"}


def test_a_module_with_a_tensor_of_its_own_is_no_wrapper() -> None:
    root = Hiding(Net())
    root.temperature = nn.Parameter(torch.ones(()))
    assert "_forward.encoder" in names(root)


class Apex(nn.Module):
    """As the wrappers of Apex and DeepSpeed, and many a script's own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


class OwnDataParallel(nn.DataParallel[nn.Module]):
    """As mmcv's and MONAI's."""


@pytest.mark.parametrize("wrapper", [Apex, OwnDataParallel, nn.DataParallel])
def test_a_child_that_is_all_and_is_called_module_gives_no_prefix(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    assert names(wrapper(Net())) == {"", "encoder", "head"}
    assert names(wrapper(wrapper(Net()))) == {"", "encoder", "head"}


@pytest.mark.parametrize("wrapper", [Apex, OwnDataParallel])
def test_what_is_told_behind_it_has_no_prefix_either(
    wrapper: Callable[[nn.Module], nn.Module], guard: Callable[..., Any], tmp_path: Path
) -> None:
    def body() -> None:
        model = wrapper(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            x = torch.randn(4, 3)
            if step == 1:
                x[0, 0] = torch.nan
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), tmp_path / "last.pt")

    incidents = guard(body).report.incidents
    assert [incident.cause for incident in incidents] == ["nonfinite-input", "nonfinite-parameter"]
    assert not any((incident.module or "").startswith("module") for incident in incidents)
    assert incidents[1].evidence["names"][0].startswith("module.")  # as the file has it


def test_fabrics_wrapper_is_looked_through() -> None:
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(Net())
    assert names(model) == {"", "encoder", "head"}


def test_a_wrapper_whose_forward_is_called_gives_no_prefix(guard: Callable[..., Any]) -> None:
    """`loss = model.forward(x)` goes past what `nn.Module.__call__` does, and to the module within by its own call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Softplus())
            self.head = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(x)).square().square().mean()  # type: ignore[no-any-return]

    def body() -> None:
        torch.manual_seed(0)
        model = nn.DataParallel(Model())
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(4):
            optimizer.zero_grad()
            model.forward(torch.randn(4, 3) * (1e12 if step == 2 else 1.0)).backward()
            optimizer.step()

    incident = guard(body).first
    assert (incident.cause, incident.step, incident.module) == ("overflow", 2, "")
