"""Operators of the script's own (`torch.library.custom_op`), in which PyTorch's composite ones are not taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Guard = Callable[..., Any]


@pytest.fixture
def legal_log_softmax() -> Callable[[Tensor, Tensor], Tensor]:
    def legal(logits: Tensor, mask: Tensor) -> Tensor:
        return logits.masked_fill(~mask, float("-inf")).log_softmax(dim=-1)

    legal.__annotations__ = {"logits": Tensor, "mask": Tensor, "return": Tensor}
    made = torch.library.custom_op("ampguard_tests::legal_log_softmax", legal, mutates_args=())
    made.register_fake(lambda logits, mask: torch.empty_like(logits))

    def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])

    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        out, mask = ctx.saved_tensors
        slope = torch.where(mask, slope, 0.0)
        return slope - out.exp() * slope.sum(-1, keepdim=True), None

    made.register_autograd(backward, setup_context=keep)
    return made


@pytest.mark.parametrize("has_empty_row", [False, True])
def test_least_log_probability_of_an_evaluation(
    has_empty_row: bool, legal_log_softmax: Callable[[Tensor, Tensor], Tensor], guard: Guard
) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for it in range(6):
            mask = torch.rand(16, 8) > 0.3
            mask[:, 0] = True
            optimizer.zero_grad()
            (-legal_log_softmax(model(torch.randn(16, 8)), mask)[:, 0].mean()).backward()
            optimizer.step()
            if it % 2:
                mask[3] = not (has_empty_row and it == 5)
                with torch.no_grad():
                    found = legal_log_softmax(model(torch.randn(16, 8)), mask)
                found.amin().item()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.causes == (["masked-softmax"] if has_empty_row else []), run.stderr
