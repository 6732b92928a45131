"""A batch that is brought to a device: what reads it there is told, not the copy."""

from __future__ import annotations

import pytest
import torch

from ampguard.diagnose.locate.chain import Chain, Given, Link
from ampguard.diagnose.locate.slicing import _of_the_step
from ampguard.numerics import NAN
from ampguard.replay.trace import TracedOp, TracedTensor

Kind = tuple[torch.dtype, str]
Copy = tuple[list[Kind], Kind]


def link(op: str, inputs: list[Kind], output: Kind) -> Link:
    traced = TracedOp(0, 0, None, op, None, None, None)
    traced.inputs = [TracedTensor((3,), dtype, 0, device=device) for dtype, device in inputs]
    traced.outputs = [TracedTensor((3,), output[0], 0, device=output[1])]
    return Link(traced, 0, 0, NAN)


HERE, THERE, HALF = (torch.float32, "cpu"), (torch.float32, "cuda"), (torch.float16, "cuda")


@pytest.mark.parametrize(
    ("copies", "is_given", "left"),
    [
        ([([HERE], THERE)], True, ["mse_loss"]),
        ([([THERE], HERE), ([HERE], THERE)], True, ["mse_loss"]),
        ([([HERE], HALF)], True, ["mse_loss", "_to_copy"]),  # which rounds
        ([([THERE], HALF)], True, ["mse_loss", "_to_copy"]),
        ([([HERE], THERE)], False, ["mse_loss", "_to_copy"]),  # where the chain begins
    ],
)
def test_the_chain_ends_at_what_reads_it(copies: list[Copy], is_given: bool, left: list[str]) -> None:
    links = [link("mse_loss", [THERE, THERE], THERE), *(link("_to_copy", *copy) for copy in copies)]
    given = Given(links[-1].op.inputs[0], 0, NAN, links[-1].op, 0) if is_given else None
    chain = _of_the_step(Chain(links, given))
    assert [one.op.short_name for one in chain.links] == left
    assert chain.given is given


def test_a_copy_that_is_all_there_is_stays() -> None:
    copy = link("_to_copy", [HERE], THERE)
    chain = _of_the_step(Chain([copy], Given(copy.op.inputs[0], 0, NAN, copy.op, 0)))
    assert chain.links == [copy]
