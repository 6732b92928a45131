"""Fixes that make a step finite and sensible: not a loss of 1e33, not an epsilon where there is nothing to count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

from ampguard.incident import Incident

Guard = Callable[..., Watched]
BAD = 3


def first_of(guard: Guard, loss: Callable[[nn.Module, int], Tensor]) -> Incident:
    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(BAD + 1):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()

    return guard(body).first


def test_degree_of_a_lonely_node(guard: Guard) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2 if step < BAD else 3]])
        degree = torch.zeros(4).index_add_(0, edges[1], torch.ones(4))
        inverse = degree.pow(-0.5)
        return (model(torch.ones(4, 4)) * inverse[:, None]).square().mean()

    first = first_of(guard, loss)
    assert (first.cause, first.step) == ("division-by-zero", BAD)
    assert (first.fixes[0].action, first.fixes[0].verified) == ("guard-empty", True)
    assert first.fixes[0].how == "inverse = degree.clamp(min=1).pow(-0.5)"


def test_soft_maximum_by_hand(guard: Guard) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = torch.ones(5, 4)
        with torch.no_grad():
            q = model(x) + (120 if step == BAD else 0)
            soft = torch.log(torch.exp(q / 0.9).sum(-1)) * 0.9
        return (model(x).sum(-1) - soft).abs().mean()

    first = first_of(guard, loss)
    assert (first.cause, first.op) == ("overflow", "aten.exp.default")
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("stable-form", True)
    assert fix.how == "soft = torch.logsumexp(q / 0.9, -1) * 0.9"


def test_bound_that_leaves_a_sensible_loss(guard: Guard) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return F.poisson_nll_loss(model(torch.ones(5, 4)) + (95 if step == BAD else 0), torch.ones(5, 3))

    clamp = next(fix for fix in first_of(guard, loss).fixes if fix.action == "clamp")
    assert clamp.verified is True
    assert "clamp(max=10)" in clamp.how
    assert float(str(clamp.outcome).rpartition(" ")[2]) < 1e5


def test_statement_over_several_lines(guard: Guard) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(torch.ones(5, 4))
        chosen = (
            out[out > (100 if step == BAD else -100)]
            .float()
            .mean()
        )  # fmt: skip
        return chosen.square()

    first = first_of(guard, loss)
    assert first.cause == "empty-reduction"
    assert "chosen = (out[out > (100 if step == BAD else -100)].float().mean())" in first.fixes[0].how


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        sample = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(sample), mean, log_variance


def test_a_loss_out_of_proportion_is_said_to_be_so_in_a_wider_type_too(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Vae()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(4):
            x = torch.randn(16, 8) * (40 if step == 3 else 1)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out, mean, log_variance = model(x)
                kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
                loss = (out - x).pow(2).sum(1).mean() + kl
            loss.backward()
            optimizer.step()

    fixes = [fix for fix in guard(body).first.fixes if fix.verified]
    assert {"force-fp32", "use-bf16", "disable-amp"} <= {fix.action for fix in fixes}
    assert all(", far from the " in fix.outcome and fix.outcome.endswith(" of the steps before") for fix in fixes)
