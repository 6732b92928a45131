"""Scripts without AMP whose modules mix what autocast makes with float32: what does not bear it stays in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from override_loops import Asserting, batches, weights
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import ampguard


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 16)
        share, chosen = self.gate(x).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(-1)
            out.index_add_(0, mine, expert(x[mine]) * share[mine, None])
        return out


class Masked(nn.Module):
    """Its own `forward` writes what autocast made into a float32 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 4)
        hidden, is_positive = self.body(x), x[:, 0] > 0
        out[is_positive] = self.head(hidden[is_positive])
        return out


def mixture() -> nn.Module:
    before = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
    return nn.Sequential(before, Experts(), nn.Linear(16, 4))


def train(make: Callable[[], nn.Module], region: Callable[[], Any] = contextlib.nullcontext) -> list[Tensor]:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for x, y in batches(5):
        optimizer.zero_grad()
        with region():
            out = net(x)
        nn.functional.cross_entropy(out.float(), y).backward()
        optimizer.step()
    return weights(net) + [b.clone() for b in net.buffers()]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_module_that_does_not_bear_autocast_is_the_only_one_in_float32(
    overridden: Callable[..., Any], precision: str
) -> None:
    with overridden(precision) as session:
        train(mixture)
    run = session.report.run
    assert run["in_float32"] == ["1"]
    assert len(run["could_not"]) == 1
    assert run["could_not"][0].startswith("1 stays in float32: its own code does not go with")
    assert "gained autocast around calls of the script's models" in run["did"]
    assert session.report.incidents == ()


def test_random_numbers_and_statistics_are_those_of_one_call(overridden: Callable[..., Any]) -> None:
    def by_hand() -> nn.Module:
        net = mixture()
        ampguard.force_fp32(net, "1")
        return net

    expected = train(by_hand, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    with overridden("bf16"):
        found = train(mixture)
    assert all(map(torch.equal, found, expected))


def test_a_root_that_does_not_bear_it_itself_gains_none(overridden: Callable[..., Any]) -> None:
    expected = train(Masked)
    with overridden("bf16") as session:
        found = train(Masked)
    assert all(map(torch.equal, found, expected))
    assert session.report.run["could_not"][0].startswith(
        "Masked stays in float32: its own code does not go with bfloat16"
    )
    assert session.report.run["did"] == []


def test_a_failure_that_float32_has_as_well_is_raised(overridden: Callable[..., Any]) -> None:
    net = nn.Linear(8, 4)
    with overridden("bf16"), pytest.raises(RuntimeError, match="dtype"):
        net(torch.randn(2, 8).to(torch.complex64))


class SparseProduct(nn.Module):
    """Its derivative does not exist where autocast has cast the dense operand."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.lin(x))
        return product


def test_a_backward_pass_that_does_not_bear_it_says_what_to_do(overridden: Callable[..., Any]) -> None:
    with overridden("bf16") as session, pytest.raises(RuntimeError, match="expected scalar type"):
        train(SparseProduct)
    assert "a backward pass does not go with gained autocast" in session.report.run["could_not"][0]
    assert "--force-fp32" in session.report.run["could_not"][0]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_nor_does_one_of_torch_func(overridden: Callable[..., Any], precision: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    weights_of_net = {name: p.detach() for name, p in net.named_parameters()}

    def loss_of(held: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(net, held, (x[None],)), y[None])

    of_each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    (x, y), *_ = batches(1)
    with overridden(precision) as session, pytest.raises(RuntimeError, match="expected scalar type"):
        of_each(weights_of_net, x, y)
    assert "a backward pass does not go with gained autocast" in session.report.run["could_not"][0]


def test_healthy_gradients_of_torch_func_are_not_spoken_of(overridden: Callable[..., Any]) -> None:
    """In bfloat16 there is no loss scale that they could go without."""
    net = nn.Linear(8, 4)
    (x, y), *_ = batches(1)
    with overridden("bf16") as session:
        torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    assert session.report.run["could_not"] == []


def test_what_makes_a_weight_is_no_model(overridden: Callable[..., Any]) -> None:
    """Registered, it is called by PyTorch itself, before the script opens a region."""

    def body() -> None:
        net = spectral_norm(nn.Linear(8, 4))
        with torch.autocast("cpu", dtype=torch.float16):
            net(torch.randn(2, 8))

    with overridden("bf16") as session:
        body()
    assert session.report.run["could_not"] == []


def test_nor_inside_a_step_of_lightnings(overridden: Callable[..., Any]) -> None:
    plugins = pytest.importorskip("lightning.fabric.plugins.precision.precision")
    experts, masked = Experts(), Masked()

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.experts, self.masked = nn.Linear(8, 16), experts, masked

        def training_step(me, x: Tensor) -> Tensor:  # noqa: N805
            return me.masked(x) + me.experts(me.wide(x))[:, :4]

    with overridden("bf16") as session, plugins.Precision().forward_context():
        holder = Holder()
        holder.training_step(torch.randn(6, 8)).sum().backward()
    assert sorted(session.report.run["in_float32"]) == ["experts", "masked"]
    assert session.report.run["did"] == ["autocast around Lightning's steps"]


class Encoder(nn.Module):
    """PyTorch's own, whose evaluation takes another way than its training: one that autocast of a CPU does not know."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        return self.head(self.body(x, src_key_padding_mask=is_padding).mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "O2", "bf16-true"])
def test_what_pytorch_asserts_about_types_ends_no_script(overridden: Callable[..., Any], precision: str) -> None:
    net = Encoder().eval()
    x, is_padding = torch.randn(4, 6, 16), torch.arange(6).expand(4, 6) > 3
    with torch.no_grad():
        expected = net(x, is_padding)
        with overridden(precision) as session:
            found = net(x, is_padding)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert session.report.incidents == ()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "O2"])
def test_what_a_script_asserts_of_types_ends_it_no_more(overridden: Callable[..., Any], precision: str) -> None:
    expected = train(Asserting)
    with overridden(precision) as session:
        found = train(Asserting)
    assert all(map(torch.equal, found, expected))
    (said,) = session.report.run["could_not"]
    assert said.startswith("Asserting stays in float32")
    assert "assert hidden.dtype == torch.float32" in said


class Checking(Masked):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        assert hidden.dtype == torch.float32, f"torch.float32 is wanted, and it is {hidden.dtype}"
        return self.head(hidden)


def test_nor_what_it_asserts_in_words(overridden: Callable[..., Any]) -> None:
    expected = train(Checking)
    with overridden("bf16") as session:
        found = train(Checking)
    assert all(map(torch.equal, found, expected))
    assert "torch.float32 is wanted, and it is torch.bfloat16" in session.report.run["could_not"][0]


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) > 1000
        return self.only(x)


def test_other_assertions_are_the_scripts(overridden: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError), overridden("bf16") as session:
        train(Short)
    assert session.report.run["could_not"] == []
