"""The way back from a bad result to the operator where the chain of non-finite values begins."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampguard.diagnose.locate.chain import Chain
from ampguard.diagnose.locate.slicing import chain_from
from ampguard.replay.trace import MAX_ELEMENTS, Trace, bad_elements, traced
from ampguard.replay.tracer import ReplayMode
from ampguard.replay.variants import AS_IT_RAN

INF, NAN = math.inf, math.nan


def chain_behind(compute: Callable[[], Tensor]) -> Chain:
    """Run `compute` under the tracer and slice back from what it returns."""
    trace = Trace()
    with torch.no_grad(), ReplayMode(AS_IT_RAN, trace, {}):
        result = compute()
    bad = bad_elements(result)
    assert bad is not None, "the computation must fail"
    chain = chain_from(trace, traced(result), bad)
    assert chain is not None
    return chain


def accused(chain: Chain) -> str:
    """The operator that a diagnosis would name."""
    converted = chain.conversion() if chain.intended else None
    return (converted or chain.head).op.short_name


def test_causal_mask_is_innocent_of_a_later_log() -> None:
    def compute() -> Tensor:
        scores = torch.randn(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF)
        weights = scores.softmax(-1)
        return torch.log(weights @ torch.zeros(4, 2)).sum()

    chain = chain_behind(compute)
    assert accused(chain) == "log"
    assert not chain.intended


def test_a_late_overflow_of_one_sample_does_not_hide_an_earlier_one_of_another() -> None:
    def compute() -> Tensor:
        early = torch.tensor([[1.0], [1e30]]).expand(2, 64) * 1e30
        both = early + torch.tensor([[100.0], [0.0]]).exp()
        return (both * 2.0).view(2, 4, 4, 4).sum(-1).sum(-1).sum()  # four elements of the first sample meet in each sum

    chain = chain_behind(compute)
    assert accused(chain) == "mul"
    assert chain.head.op.index < next(link.op.index for link in chain.links if link.op.short_name == "add")


def test_layers_that_fail_alike_at_a_node_begin_in_the_first_of_them() -> None:
    nodes = torch.arange(8)  # a ring, of which node 0 is only ever a source
    edges = torch.stack([torch.cat([nodes, (nodes + 1) % 8]), torch.cat([(nodes + 1) % 8, nodes])])
    source, target = edges[:, edges[1] != 0]
    torch.manual_seed(0)
    features, weight = torch.randn(8, 12), torch.randn(12, 12)

    def convolved(x: Tensor) -> Tensor:
        scale = torch.zeros(8).index_add(0, target, torch.ones(len(target))).pow(-0.5)
        messages = (scale[source] * scale[target]).unsqueeze(-1) * (x @ weight).index_select(0, source)
        return (torch.zeros_like(x).index_add(0, target, messages) + 1.0).relu()

    def compute() -> Tensor:
        x = convolved(convolved(features))
        return torch.zeros(1, 12).index_add(0, nodes // 8, nn.functional.layer_norm(x, (12,))).sum()

    chain = chain_behind(compute)
    assert accused(chain) == "pow"
    assert "mm" in {link.op.short_name for link in chain.links}, "that of the second layer"


def test_infinity_made_early_that_turns_nan_late_is_the_culprit() -> None:
    def compute() -> Tensor:
        grown = torch.full((3,), 1e30) * 1e30
        centred = grown - grown.mean()
        return torch.tanh(centred).sum()

    chain = chain_behind(compute)
    assert accused(chain) == "mul"
    assert chain.links[0].op.short_name == "sum"
    kinds = [link.kind for link in chain.links]
    assert (kinds[0], kinds[-1]) == (1, 2)


def test_row_that_is_masked_everywhere_begins_at_the_softmax() -> None:
    def compute() -> Tensor:
        mask = torch.tensor([[True, False, True], [True, True, True]])
        return torch.zeros(2, 3).masked_fill(mask, -INF).softmax(-1).sum()

    chain = chain_behind(compute)
    assert chain.intended
    assert accused(chain) == "_softmax"


def test_sign_of_an_intended_infinity_is_no_conversion() -> None:
    def compute() -> Tensor:
        far = -torch.full((3,), -INF)
        return far - far

    chain = chain_behind(compute)
    assert chain.intended
    assert accused(chain) == "sub"


def test_sentinel_for_a_maximum_is_innocent() -> None:
    def compute() -> Tensor:
        best = torch.full((3,), -INF)
        best = torch.maximum(best, torch.zeros(3))
        return (best / best).sum()

    chain = chain_behind(compute)
    assert accused(chain) == "div"
    assert not chain.intended


def test_values_written_in_place_through_views() -> None:
    def compute() -> Tensor:
        h = torch.ones(4, 3)
        flat = h.view(-1)
        flat[3:6].div_(0.0)
        return h.t()[0].sum()

    assert accused(chain_behind(compute)) == "div"


def test_bad_element_that_is_overwritten_is_innocent() -> None:
    def compute() -> Tensor:
        h = torch.zeros(4)
        h[1] = INF
        h[1] = 2.0
        h[2:].log_()
        return h.sum()

    chain = chain_behind(compute)
    assert accused(chain) == "log"
    assert not chain.intended


@pytest.mark.parametrize(
    "write",
    [
        lambda x, row: x.index_fill(0, row, 0.5),
        lambda x, row: x.index_put((row,), torch.tensor(0.5)),
        lambda x, row: x.index_copy(0, row, torch.ones(1, 1)),
        lambda x, row: x.select_scatter(torch.ones(1), 0, 1),
        lambda x, row: x.scatter(0, row.unsqueeze(1), 0.5),
    ],
    ids=["index_fill", "index_put", "index_copy", "select_scatter", "scatter"],
)
def test_elements_that_are_written_over_are_innocent(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    """`x[rows] = 0` is one operator or the other in different versions of PyTorch."""

    def compute() -> Tensor:
        x = torch.log(torch.tensor([[1.0], [-1.0], [1.0]])) + torch.sqrt(torch.tensor([[1.0], [1.0], [-1.0]]))
        return write(x, torch.tensor([1])).sum()

    assert accused(chain_behind(compute)) == "sqrt"


def test_memory_that_was_freed_and_is_used_again() -> None:
    """The storage's identity comes back; what lay in it belonged to another tensor."""

    def compute() -> Tensor:
        total = torch.zeros(8)
        for _ in range(20):
            mask = torch.full((8,), -INF)
            total = total + mask.exp()
            del mask
        return (total / torch.zeros(8)).sum()

    assert accused(chain_behind(compute)) == "div"


@pytest.mark.parametrize("join", [torch.cat, torch.stack], ids=["cat", "stack"])
def test_joined_tensors_are_told_apart(join: Callable[[list[Tensor]], Tensor]) -> None:
    """The element that is summed comes from the logarithm; the -Inf beside it was intended."""

    def compute() -> Tensor:
        parts = join([torch.full((2,), -INF), torch.log(torch.tensor([-1.0, 1.0])), torch.zeros(2)])
        return parts.reshape(-1)[2:3].sum()

    chain = chain_behind(compute)
    assert accused(chain) == "log"


def test_product_of_matrices_follows_row_and_column() -> None:
    """Row 1 is NaN because of its own operand, although the mask's infinity lies in row 0 of the same matrix."""

    def compute() -> Tensor:
        left = torch.stack([torch.full((3,), -INF), torch.sqrt(torch.tensor([-1.0, 1.0, 1.0]))])
        return (left @ torch.ones(3, 2))[1].sum()

    assert accused(chain_behind(compute)) == "sqrt"


def test_earliest_of_two_beginnings_is_kept() -> None:
    def compute() -> Tensor:
        x = torch.zeros(2)
        first, second = torch.sqrt(x - 1), x / x
        return (second + first).sum()

    assert accused(chain_behind(compute)) == "sqrt"


def test_nan_operand_explains_a_nan_better_than_an_infinite_one() -> None:
    """-Inf + NaN would be NaN without the -Inf as well."""

    def compute() -> Tensor:
        x = torch.zeros(2)
        return (torch.log(x) + x / x).sum()

    assert accused(chain_behind(compute)) == "div"


def test_what_where_has_cut_off_is_innocent() -> None:
    def compute() -> Tensor:
        x = torch.tensor([-1.0, 1.0])
        safe = torch.where(x > 0, x.log(), torch.zeros(2))
        return safe.sum() + torch.sqrt(x.min())

    assert accused(chain_behind(compute)) == "sqrt"


def test_chain_ends_at_a_parameter() -> None:
    weight = nn.Parameter(torch.tensor([1.0, NAN]))

    def compute() -> Tensor:
        return (torch.ones(2) * weight).sum()

    chain = chain_behind(compute)
    assert chain.given is not None
    assert chain.given.flat == 1
    assert chain.head.op.short_name == "mul"
    assert not chain.intended


def test_infinite_given_that_is_no_parameter_may_be_intended() -> None:
    mask = torch.tensor([[0.0, -INF], [-INF, -INF]])

    def compute() -> Tensor:
        return (torch.zeros(2, 2) + mask).softmax(-1).sum()

    chain = chain_behind(compute)
    assert chain.given is not None
    assert chain.intended
    assert accused(chain) == "_softmax"


def test_long_chain_is_followed_to_its_beginning() -> None:
    def compute() -> Tensor:
        h = torch.rsqrt(torch.zeros(5))
        for _ in range(150):
            h = torch.tanh(h * 0.0) + h
        return h.mean()

    chain = chain_behind(compute)
    assert accused(chain) == "rsqrt"
    assert len(chain.links) > 100


def test_no_chain_where_no_operator_made_the_bad_value() -> None:
    trace = Trace()
    given = torch.tensor([NAN])
    with ReplayMode(AS_IT_RAN, trace, {}):
        torch.ones(1) + 1
    bad = bad_elements(given)
    assert bad is not None
    assert chain_from(trace, traced(given), bad) is None


@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("shape", [(12, 1), (3, 4)])
def test_overflow_among_others_that_came_an_operator_later(place: int, shape: tuple[int, ...]) -> None:
    """Most elements grow beyond float16 only as a dropout scales them; one was infinite before."""

    def compute() -> Tensor:
        rows = torch.full((12, 1), 63000.0)
        rows[place] = 64000.0
        grown = rows.half() @ torch.full((1, 1), 1.025).half()
        return (grown * 1.2).view(shape).sum()

    chain = chain_behind(compute)
    assert accused(chain) == "mm"
    assert chain.head.flat == place


@pytest.mark.parametrize("row", [0, 7, 11])
@pytest.mark.parametrize("dim", [1, (1, 2), -1, 0])
@pytest.mark.parametrize("keepdim", [False, True])
def test_overflow_of_one_element_among_sums_that_overflow(row: int, dim: int | tuple[int, ...], keepdim: bool) -> None:
    """Most sums grow beyond float16; one holds an element that did before."""

    def compute() -> Tensor:
        values = torch.full((12, 4, 3), 180.0)
        values[row, 2, 1] = 300.0
        values = values.transpose(0, 1) if dim == 0 else values
        return (values.half() ** 2).sum(dim, keepdim=keepdim).mean()

    assert accused(chain_behind(compute)) == "pow"


def test_overflow_that_does_not_go_into_the_result_is_not_followed() -> None:
    def compute() -> Tensor:
        rows = torch.full((12, 1), 63000.0)
        rows[5] = 64000.0
        grown = rows.half() @ torch.full((1, 1), 1.025).half()
        return (grown * 1.2)[6:].sum()

    assert accused(chain_behind(compute)) == "mul"


def test_of_all_bad_elements_the_one_that_begins_first_is_followed() -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(4)

    def compute(reduce: Callable[[Tensor], Tensor]) -> Tensor:
        rows = torch.tensor([200.0, 50.0, 3.0, -1.0])[:, None].expand(4, 8)
        early = rows.log()  # NaN in the last row
        later = early + signs * rows.exp()  # infinities of both signs in the first one
        return reduce(later @ torch.ones(8, 8))

    assert accused(chain_behind(lambda: compute(lambda x: x))) == "log"
    assert accused(chain_behind(lambda: compute(lambda x: x.log_softmax(-1).sum()))) == "log"


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_that_are_bad_already_are_not_read_in_training(affine: bool) -> None:
    norm = nn.BatchNorm1d(3, affine=affine)
    nn.init.constant_(norm.running_mean, NAN)
    logits = torch.tensor([[0.0, 1.0, 2.0], [1.0, 2.0, 200.0], [3.0, 3.0, 3.0], [4.0, 1.0, 5.0]])

    chain = chain_behind(lambda: norm(logits.exp()).sum())
    assert accused(chain) == "exp"
    assert chain.given is None
    assert chain_behind(lambda: norm.eval()(logits).sum()).given is not None


def test_a_channel_of_a_batch_norm_is_by_itself() -> None:
    def compute() -> Tensor:
        early = torch.tensor([0.0, -1.0, 1.0]).log() + torch.zeros(4, 3)  # NaN in channel 1
        later = torch.cat([early[:, :2], (early[:, 2:] + 200.0).exp()], dim=1)
        return nn.BatchNorm1d(3)(later)[:, 2].sum()

    assert accused(chain_behind(compute)) == "exp"


def test_running_statistics_are_not_read_in_the_derivative_of_training() -> None:
    norm = nn.BatchNorm1d(3)
    nn.init.constant_(norm.running_var, NAN)
    trace = Trace()
    with ReplayMode(AS_IT_RAN, trace, {}):
        rows = torch.randn(4, 3).requires_grad_()
        (gradient,) = torch.autograd.grad((norm(rows) - norm(rows)).abs().sqrt().sum(), rows)
    bad = bad_elements(gradient)
    assert bad is not None
    chain = chain_from(trace, traced(gradient), bad)
    assert chain is not None
    assert chain.given is None


def test_a_sample_whose_elements_were_not_kept_is_followed_by_another() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 32, 1), nn.SiLU(), nn.Conv2d(32, 1, 1))
    inf = torch.tensor(1.0) / torch.tensor(0.0)

    def compute() -> Tensor:
        x = inf * (torch.rand(2, 1, 64, 64) + 1.0)
        return net(x - x)  # 32 maps of 4,096 elements fill one sample: of the second none is kept

    chain = chain_behind(compute)
    assert accused(chain) == "sub"
    assert chain.given is not None


def test_an_operator_that_made_it_from_finite_elements_is_the_beginning_among_many_bad_ones() -> None:
    def compute() -> Tensor:
        x = torch.full((2, MAX_ELEMENTS + 10), -INF)
        x[1] = 0.0
        return torch.log(x.exp() - 1.0)[1].sum()

    assert accused(chain_behind(compute)) == "log"


def halves_doubled(early: float, late: float) -> Tensor:
    """`-2 * a * b` in float16, one row after the other; rows of the `late` kind stand first and last."""
    column = torch.tensor([[late], [early], [late]]).half().expand(3, 8)
    products = column * torch.full((3, 8), 250.0).half()
    return (-2 * products).float()


@pytest.mark.parametrize(
    "result_of",
    [
        lambda d: d.sum(),
        lambda d: d.min(1).values.mean(),
        lambda d: (d + torch.ones(3, 1)).view(3, 2, 4).amin((1, 2)).sum(),
        lambda d: d.t().contiguous().relu_().neg_().add_(d.t()).mean(),
    ],
)
def test_elements_that_were_bad_before_the_one_that_is_followed(result_of: Callable[[Tensor], Tensor]) -> None:
    """40,000 is beyond the range once it is doubled, 100,000 is as it is: the product came first."""
    chain = chain_behind(lambda: result_of(halves_doubled(early=400.0, late=160.0)))
    assert [link.op.index for link in chain.links] == sorted((link.op.index for link in chain.links), reverse=True)
    assert chain.head.op.outputs[0].shape == (3, 8)
    assert 250.0 not in chain.head.op.scalars
    assert -2.0 not in chain.head.op.scalars


def test_older_elements_that_a_choice_leaves_out_are_not_to_blame() -> None:
    """The least of them is -Inf, which doubling made; +Inf was there before and is not taken."""

    def compute() -> Tensor:
        products = torch.tensor([160.0, -400.0, 160.0]).half() * torch.full((3,), 250.0).half()
        return (-2 * products).min()

    assert -2.0 in chain_behind(compute).head.op.scalars


def test_a_mask_beside_a_late_overflow_is_not_to_blame() -> None:
    def compute() -> Tensor:
        masked = torch.tensor([160.0, 1.0, 160.0]).half().masked_fill(torch.tensor([False, True, False]), INF)
        return (masked * 500.0).sum()

    chain = chain_behind(compute)
    assert (chain.head.op.short_name, chain.intended) == ("mul", False)


def test_layers_that_overflow_for_samples_of_their_own_begin_in_the_first() -> None:
    """A flow's couplings: the second overflows for many rows, the first for one of those in the middle."""

    def coupled(x: Tensor, scale: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x[:, 1:] * (x[:, :1] * scale).exp()], dim=1)

    def compute() -> Tensor:
        x = torch.ones(40, 2)
        x[20] = 100.0
        first = coupled(x, torch.tensor(1.0))
        return coupled(first, torch.linspace(0.0, 200.0, 40)[:, None])

    for reduced in (Tensor.clone, Tensor.sum):
        chain = chain_behind(lambda reduced=reduced: reduced(compute()))
        assert accused(chain) == "exp"
        assert chain.head.op.index == min(
            op.index for op in [link.op for link in chain.links] if op.short_name == "exp"
        )
        assert chain.head.flat == 20
