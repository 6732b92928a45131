"""`--force-fp32`: the modules that a pattern names compute in float32, whatever wraps the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Products:
    """The type of every matrix product of a linear layer, by the layer's name."""

    def __init__(self, net: nn.Module, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, set[torch.dtype]] = {}
        names = {id(module.weight): n for n, module in net.named_modules() if isinstance(module, nn.Linear)}
        original = nn.functional.linear

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            result = original(x, weight, bias)
            self.seen.setdefault(names[id(weight)], set()).add(result.dtype)
            return result

        patch.setattr(nn.functional, "linear", linear)

    def in_float32(self) -> set[str]:
        return {name for name, dtypes in self.seen.items() if dtypes == {torch.float32}}


@pytest.mark.parametrize(
    ("patterns", "forced"),
    [
        (("blocks.*.attn",), {"blocks.0.attn", "blocks.1.attn"}),
        (("blocks.1",), {"blocks.1.attn", "blocks.1.mlp"}),
        (("blocks",), {"blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"}),
        (("head", "blocks.0.mlp"), {"head", "blocks.0.mlp"}),
    ],
)
@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel])
def test_patterns(
    overridden: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    patterns: tuple[str, ...],
    forced: set[str],
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    net = Net()
    products = Products(net, monkeypatch)
    kinds = [type(module) for module in net.modules()]
    with overridden("bf16", patterns) as session:
        result = wrap(net)(torch.full((2, 4), 1 / 3))
        result.sum().backward()
    assert products.in_float32() == forced
    assert len(products.seen) == 5
    assert session.report.run["could_not"] == []
    assert [type(module) for module in net.modules()] == kinds  # given back


def test_on_a_script_with_its_own_autocast(overridden: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    products = Products(net, monkeypatch)
    with overridden(None, ("blocks.0",)), torch.autocast("cpu", dtype=torch.float16):
        net(torch.ones(1, 4))
    assert products.in_float32() == {"blocks.0.attn", "blocks.0.mlp"}
    assert products.seen["head"] == {torch.float16}


def test_a_copy_runs_its_own_weights(overridden: Callable[..., Any]) -> None:
    """An average of the weights is a deep copy of the model."""
    with overridden("bf16", ("head",)):
        net = Net()
        net(torch.ones(1, 4))
        average = copy.deepcopy(net)
        with torch.no_grad():
            average.head.weight.zero_()
            average.head.bias.fill_(3)
        assert torch.equal(average(torch.ones(1, 4)), torch.full((1, 2), 3.0))


def test_a_pattern_that_names_nothing(overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with overridden(None, ("blocks.*.attention", "head")) as session:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert "'blocks.*.attention' matches no module so far; nearest: blocks.*.attn" in capsys.readouterr().err
    run = session.report.run
    assert run["in_float32"] == ["head"]
    (said,) = run["could_not"]
    assert said.startswith("--force-fp32 'blocks.*.attention' matches no module; nearest: blocks.*.attn")


def test_a_pattern_that_is_like_nothing(overridden: Callable[..., Any]) -> None:
    with overridden("fp16", ("zzz",)) as session:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        net(torch.ones(2, 8))
    assert session.report.run["could_not"] == ["--force-fp32 'zzz' matches no module; the top modules are 0, 1"]


@pytest.mark.parametrize("precision", ["fp16", "O2", "bf16-true"])
def test_an_embedding_in_float32_gives_what_follows_its_type(overridden: Callable[..., Any], precision: str) -> None:
    with overridden(precision, ("0",)) as session:
        net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(torch.arange(10)).square().mean().backward()
        optimizer.step()
    assert session.report.run["in_float32"] == ["0"]
    assert session.report.run["could_not"] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_modules_of_a_model_that_the_script_has_made_low(overridden: Callable[..., Any], dtype: torch.dtype) -> None:
    """A checkpoint in bfloat16, `model.half()`: the region's weights are cast with its inputs."""
    with overridden(None, ("0", "1.weight_is_no_module")) as session:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        before = net[0].weight.clone()
        net(torch.ones(2, 8, dtype=dtype)).float().sum().backward()
        optimizer.step()
    assert session.report.run["in_float32"] == ["0"]
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert not torch.equal(before, net[0].weight)


def part_by_part(model: Net, x: Tensor) -> Tensor:
    """As a training step that is a function does it: what is called are parts of the model."""
    for block in model.blocks:
        x = block(x)
    return model.head(x)


@pytest.mark.parametrize(
    ("patterns", "forced"),
    [
        (("blocks.*.attn",), {"blocks.0.attn", "blocks.1.attn"}),
        (("blocks.1",), {"blocks.1.attn", "blocks.1.mlp"}),
        (("head",), {"head"}),
        (("attn",), {"blocks.0.attn", "blocks.1.attn"}),
    ],
)
def test_parts_that_a_function_calls_have_their_names_in_the_model(
    overridden: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, patterns: tuple[str, ...], forced: set[str]
) -> None:
    """As the cards name them, whose fix is `--force-fp32 blocks.1`."""
    net = Net()
    products = Products(net, monkeypatch)
    with overridden("bf16", patterns) as session:
        part_by_part(net, torch.full((2, 4), 1 / 3)).sum().backward()
    assert products.in_float32() == forced
    assert session.report.run["could_not"] == []


def test_the_nearest_name_of_a_part_that_a_function_calls(overridden: Callable[..., Any]) -> None:
    net = Net()
    with overridden("bf16", ("block.1.attn",)) as session:
        part_by_part(net, torch.ones(2, 4))
    (said,) = session.report.run["could_not"]
    assert "nearest: blocks.*.attn" in said


class Encoder(nn.Module):
    """What calls it calls a method: it has no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).square()


class Bypassing(nn.Module):
    """Uses a part's method, another part's weights, and calls a third."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.tied, self.head = Encoder(), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.linear(self.encoder.encode(x), self.tied.weight))


@pytest.mark.parametrize(
    ("pattern", "said", "forced"),
    [
        ("tied", "`tied` was never called as a module", []),
        ("encoder", "`encoder` (Encoder) has no forward pass", ["encoder.inner"]),
        ("head", None, ["head"]),
    ],
)
def test_modules_that_are_not_called_are_said(
    overridden: Callable[..., Any], pattern: str, said: str | None, forced: list[str]
) -> None:
    with overridden("bf16", (pattern,)) as session:
        Bypassing()(torch.ones(2, 4)).sum().backward()
    run = session.report.run
    assert [said in text for text in run["could_not"]] == ([True] if said else [])
    assert run["in_float32"] == forced


@pytest.mark.parametrize("precision", ["bf16", None])
def test_a_script_in_float32_has_nothing_to_override(overridden: Callable[..., Any], precision: str | None) -> None:
    with overridden(precision, ("head",)) as session:
        Net()(torch.ones(2, 4)).sum().backward()
    said = session.report.run["could_not"]
    assert ["--force-fp32 had nothing to do" in text for text in said] == ([] if precision else [True])
