"""An optimizer over plain tensors that were made anew after it: stale-parameters; and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from watching import Watched

Guard = Callable[..., Watched]


def weights_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [(0.3 * torch.randn(shape)).requires_grad_() for shape in shapes]


def test_some_weights_of_a_dictionary(guard: Guard) -> None:
    def body() -> None:
        weights = dict(zip(("w", "b", "v"), weights_of((6, 8), (8,), (8, 3)), strict=True))
        optimizer = torch.optim.Adam(weights.values(), lr=1e-2)
        weights["v"] = (0.3 * torch.randn(8, 3)).requires_grad_()  # a warm restart of the head
        for _ in range(12):
            x = torch.randn(16, 6)
            loss = (torch.tanh(x @ weights["w"] + weights["b"]) @ weights["v"] - x[:, :3]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("stale-parameters", 0)
    assert "1 of its 3 tensors gets no gradient, while `weights['v']` gets one" in incident.explanation
    assert incident.fixes[0].action == "rebuild-optimizer"


def test_all_weights_of_a_list(guard: Guard) -> None:
    def body() -> None:
        weights = weights_of((6, 8), (8,))
        optimizer = torch.optim.SGD(weights, lr=1e-2)
        weights = [w.detach().double().float().requires_grad_() for w in weights]
        for _ in range(12):
            loss = (torch.randn(16, 6) @ weights[0] + weights[1]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, ["stale-parameters"])


def test_weights_that_are_made_anew_in_the_middle_of_the_run(guard: Guard) -> None:
    """All of them: the optimizer has had gradients before and has none at all any more."""

    def body() -> None:
        weights = dict(zip(("w", "b"), weights_of((6, 8), (8,)), strict=True))
        optimizer = torch.optim.AdamW(weights.values(), lr=1e-2)
        for step in range(40):
            if step == 18:  # the weakest members of a population are replaced
                for name, weight in weights.items():
                    weights[name] = (weight.detach() + 0.1).requires_grad_()
            loss = (torch.randn(16, 6) @ weights["w"] + weights["b"]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("stale-parameters", 18)
    assert "made anew in the middle of the run" in incident.fixes[0].how


def test_two_networks_of_plain_weights_that_are_trained_in_turn(guard: Guard) -> None:
    def body() -> None:
        nets = [weights_of((6, 6)), weights_of((6, 6))]
        optimizers = [torch.optim.Adam(net, lr=1e-2) for net in nets]
        for step in range(160):
            turn = step // 20 % 2
            out = torch.randn(8, 6) @ nets[turn][0]
            optimizers[turn].zero_grad()
            (out @ nets[1 - turn][0].detach()).pow(2).mean().backward()
            optimizers[turn].step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, [])


def test_an_input_that_wants_a_gradient_and_a_weight_that_is_used_late(guard: Guard) -> None:
    def body() -> None:
        first, second, late = weights_of((8, 8), (8, 8), (8, 8))
        optimizer = torch.optim.SGD([first, second, late], lr=1e-2)
        for step in range(24):
            x = torch.randn(8, 8, requires_grad=True)
            out = torch.tanh(x @ first) @ second
            if step > 16:
                out = out + x @ late
            loss = (out - x.detach()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, [])


def test_weights_that_are_updated_by_hand(guard: Guard) -> None:
    """A second part of the model has no optimizer on purpose; a weight of the same shape rests."""

    def body() -> None:
        first, second, resting = weights_of((8, 8), (8, 8), (8, 8))
        optimizer = torch.optim.SGD([first, resting], lr=1e-2)
        for _ in range(24):
            loss = (torch.tanh(torch.randn(8, 8) @ first) @ second).pow(2).mean()
            optimizer.zero_grad()
            second.grad = None
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                second -= 0.01 * second.grad

    run = guard(body)
    assert "stale-parameters" not in run.causes
