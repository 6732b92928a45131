"""Targets that a distribution cannot produce: infeasible-target, and not the domain of the operator that meets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import NegativeBinomial, Poisson
from watching import Watched

Guard = Callable[..., Watched]


def negative_binomial(raw: Tensor, target: Tensor) -> Tensor:
    dist = NegativeBinomial(nn.functional.softplus(raw[:, 0]) + 0.1, logits=raw[:, 1], validate_args=False)
    return -dist.log_prob(target)


def poisson(raw: Tensor, target: Tensor) -> Tensor:
    return -Poisson(raw[:, 0].exp(), validate_args=False).log_prob(target)


def written_out(raw: Tensor, target: Tensor) -> Tensor:
    return raw[:, 0].exp() - target * raw[:, 0] + torch.lgamma(target + 1)


def trained(likelihood: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    def body() -> None:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        targets = torch.poisson(torch.full((6, 12), 3.0))
        targets[3, [2, 7]] = -1.0  # days without a report
        for target in targets:
            observed = (target >= 0).float()
            loss = (likelihood(model(torch.randn(12, 6)), target) * observed).sum() / observed.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return body


@pytest.mark.parametrize("likelihood", [negative_binomial, poisson, written_out])
def test_a_count_below_zero(guard: Guard, likelihood: Callable[[Tensor, Tensor], Tensor]) -> None:
    run = guard(trained(likelihood))
    assert run.faults == 0, run.stderr
    incident = run.report.incidents[0]
    assert (incident.cause, incident.step) == ("infeasible-target", 3)
    assert "was given 0, outside its domain (above 0)" in incident.explanation
    assert (incident.fixes[0].action, incident.fixes[0].verified) == ("filter-sample", True)


def test_the_logarithm_of_what_the_network_gave_is_out_of_its_domain(guard: Guard) -> None:
    def body() -> None:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(6):
            shape = torch.relu(model(torch.randn(12, 6)) - (1e3 if step == 3 else -5.0))
            loss = torch.lgamma(shape).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.report.incidents[0].cause == "domain-error"


def test_a_feature_that_a_layer_is_given_is_no_target(guard: Guard) -> None:
    def body() -> None:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batches = torch.poisson(torch.full((6, 12, 6), 3.0))
        batches[3, 2, 1] = -1.0
        for counts in batches:
            loss = model(torch.lgamma(counts + 1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert "infeasible-target" not in run.causes
    assert run.report.incidents[0].step == 3
