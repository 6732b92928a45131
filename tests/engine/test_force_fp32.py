from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from engine_loops import batch
from torch import Tensor, nn

import ampguard
from ampguard.errors import PatternError, SetupError


class Attention(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v


class Net(nn.Module):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": Attention(), "mlp": nn.Linear(16, 16)}) for _ in range(2)])
        self.head = nn.Linear(16, 1)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.gain
        for block in self.blocks:
            x = x + block["attn"](x)
            x = x + torch.tanh(block["mlp"](x))
        return self.head(x / self.gain)


def inputs() -> Tensor:
    return batch(0)[0].unsqueeze(0)


def outputs(model: nn.Module, dtype: torch.dtype, train: bool) -> Tensor:
    model.train(train)
    with torch.autocast("cpu", dtype=dtype):
        return model(inputs()).detach()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_outputs_agree_where_both_are_finite(dtype: torch.dtype, tolerance: float, train: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    without = outputs(model, dtype, train)
    ampguard.force_fp32(model, "blocks.*.attn")
    forced = outputs(model, dtype, train)
    assert forced.dtype == without.dtype == dtype
    assert not torch.equal(forced, without)
    torch.testing.assert_close(forced, without, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("train", [True, False])
def test_what_overflows_in_float16_is_finite(train: bool) -> None:
    torch.manual_seed(0)
    model = Net(gain=600.0)
    assert not outputs(model, torch.float16, train).isfinite().all()
    with ampguard.force_fp32(model, "blocks.*.attn") as forced:
        assert forced.names == ("blocks.0.attn", "blocks.1.attn")
        repaired = outputs(model, torch.float16, train)
        model.train(train)
        torch.testing.assert_close(repaired.float(), model(inputs()).detach(), atol=5e-2, rtol=5e-2)
    assert type(model.blocks[0]["attn"]) is Attention
    assert not outputs(model, torch.float16, train).isfinite().all()


def test_a_bare_float_is_not_enough() -> None:
    """What the region is for: autocast undoes the cast at the next product."""
    x = torch.full((4, 4), 300.0, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not (x.float() @ x.float()).isfinite().all()
        with ampguard.force_fp32(x) as wide:
            assert (wide @ wide).isfinite().all()


def test_the_context_casts_several_and_leaves_other_values() -> None:
    q, k, n = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16), torch.arange(2)
    with torch.autocast("cpu", dtype=torch.float16):
        with ampguard.force_fp32(q, k, n) as (q32, k32, same):
            assert q32.dtype == k32.dtype == torch.float32
            assert same is n
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_what_was_one_tensor_stays_one() -> None:
    """Attention computes itself in another way where its query is not its key."""

    @ampguard.force_fp32
    def attend(query: Tensor, key: Tensor, *, value: Tensor) -> bool:
        assert query.dtype == torch.float32
        return query is key is value

    x = torch.randn(2, 3).half()
    assert attend(x, x, value=x)
    assert not attend(x, x.clone(), value=x)


def test_as_a_decorator_results_go_back_to_the_type_of_the_inputs() -> None:
    @ampguard.force_fp32
    def product(a: Tensor, *, b: Tensor) -> dict[str, Tensor]:
        """Doc."""
        assert a.dtype == b.dtype == torch.float32
        return {"y": a @ b, "sum": (a @ b).sum()}

    @ampguard.force_fp32(cast_back=False)
    def wide(a: Tensor) -> Tensor:
        return a @ a

    half = torch.ones(2, 2, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert product(half, b=half)["y"].dtype == torch.float16
        assert product(half.float(), b=half.float())["y"].dtype == torch.float32
        assert wide(half).dtype == torch.float32
    assert product.__doc__ == "Doc."


def test_a_module_class_may_be_decorated() -> None:
    @ampguard.force_fp32
    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.cumsum(-1) @ x.T).clamp(max=1.0)

    with torch.autocast("cpu", dtype=torch.float16):
        assert Scan()(torch.full((4, 4), 300.0, dtype=torch.float16)).isfinite().all()


def test_a_copy_runs_its_own_weights_and_pickles() -> None:
    torch.manual_seed(0)
    model = Net()
    ampguard.force_fp32(model, "blocks.*.attn")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(twin.blocks[0]["attn"].qkv.weight)
        attention = twin.blocks[0]["attn"]
        assert isinstance(attention, Attention)
        x = torch.randn(1, 3, 16)
        torch.testing.assert_close(attention(x), Attention.forward(attention, x))
        assert not torch.equal(twin(inputs()), model(inputs()))
        with torch.autocast("cpu", dtype=torch.float16):
            assert attention(x).dtype == torch.float32


def test_gradients_flow_through() -> None:
    torch.manual_seed(0)
    model = Net()
    ampguard.force_fp32(model, "blocks.*.attn")
    with torch.autocast("cpu", dtype=torch.float16):
        model(inputs()).float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("blocks.*.attention", "nearest: `blocks.*.attn`"),
        ("*.atn", "nearest: `blocks.*.attn`"),
        ("transformer.h", "its top modules: `embed`, `blocks`, `head`"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern: str, hint: str) -> None:
    model = Net()
    with pytest.raises(PatternError) as caught:
        ampguard.force_fp32(model, "head", pattern)
    assert repr(pattern) in str(caught.value)
    assert hint in str(caught.value)
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize("mode", ["fp16", "O2", "O3", "bf16-true"])
def test_through_amp_in_every_low_precision(mode: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp = ampguard.Amp(model, optimizer, mode, force_fp32=["blocks.*.attn", "head"], init_scale=64.0)
    assert model.blocks[0]["attn"].qkv.weight.dtype == torch.float32
    seen = []
    model.blocks[0]["attn"].qkv.register_forward_hook(lambda m, a, out: seen.append((a[0].dtype, out.dtype)))
    for train in (True, False):
        model.train(train)
        with amp.autocast():
            out = model(inputs())
    assert seen == [(torch.float32, torch.float32)] * 2
    amp.backward(out.float().square().mean())
    assert amp.step().stepped


def test_amp_refuses_an_unknown_pattern_before_it_changes_anything() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(PatternError):
        ampguard.Amp(model, optimizer, "O2", force_fp32=["head", "nowhere"])
    assert type(model.head) is nn.Linear
    assert model.embed.weight.dtype == torch.float32


def test_it_compiles_away() -> None:
    torch.manual_seed(0)
    model = Net()
    ampguard.force_fp32(model, "blocks.*.attn")
    compiled = torch.compile(model, backend="eager")
    with torch.autocast("cpu", dtype=torch.float16):
        torch.testing.assert_close(compiled(inputs()), model(inputs()), atol=2e-3, rtol=2e-3)


@ampguard.force_fp32
def scaled_product(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T) * 1e-3


class _ByMethod(nn.Module):
    @ampguard.force_fp32
    def scores(self, x: Tensor) -> Tensor:
        return (x @ x.T) * 1e-3

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.scores(x)


@ampguard.force_fp32
class _ByClass(nn.Module):
    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return (x @ x.T) * 1e-3


@pytest.mark.parametrize("made", [lambda: scaled_product, _ByMethod, _ByClass], ids=["function", "method", "class"])
def test_decorators_leave_no_graph_break(made: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
    torch.compiler.reset()
    x = torch.full((4, 8), 300.0, dtype=torch.float16)  # the products do not fit float16
    function = made()
    with torch.autocast("cpu", dtype=torch.float16):
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(x, x)
        wanted = function(x, x)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, torch.full((4, 4), 720.0, dtype=torch.float16))
    torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler asks for it
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_are_low_themselves(dtype: torch.dtype, compiled: bool) -> None:
    """`model.half()` and checkpoints in bfloat16: the region runs on casts of them, and what follows sees its type."""
    torch.manual_seed(0)
    exact = Net()
    model = copy.deepcopy(exact).to(dtype)
    with ampguard.force_fp32(model, "blocks.*.attn"):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        found = run(inputs().to(dtype))
        found.float().mean().backward()
    wanted = exact(inputs())
    wanted.mean().backward()
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
    mine, other = model.blocks[0]["attn"].qkv.weight, exact.blocks[0]["attn"].qkv.weight
    assert mine.dtype == mine.grad.dtype == dtype
    torch.testing.assert_close(mine.grad.float(), other.grad, rtol=0.1, atol=1e-2)


def test_low_weights_without_floating_inputs() -> None:
    """What an embedding returns goes to weights of its own type."""
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    with ampguard.force_fp32(net, "0"):
        assert net(torch.arange(5)).dtype == torch.bfloat16


def test_a_pattern_without_its_model_is_an_error() -> None:
    with pytest.raises(PatternError, match=r"force_fp32\(model, 'head'\)"):
        ampguard.force_fp32("head")


def test_what_runs_after_its_call_is_refused() -> None:
    def powers(x: Tensor) -> Iterator[Tensor]:
        yield x @ x

    async def power(x: Tensor) -> Tensor:
        return x @ x

    for function in (powers, power):
        with pytest.raises(SetupError, match="its lines run when the call has returned already"):
            ampguard.force_fp32(function)


def test_many_decorated_functions_are_compiled_each_for_itself() -> None:
    """A compiler gives up a piece of code that it has compiled too often: they must not share one."""
    torch._dynamo.reset()
    for factor in range(torch._dynamo.config.recompile_limit + 4):

        @ampguard.force_fp32
        def scaled(x: torch.Tensor, factor: int = factor) -> torch.Tensor:
            return (x * x).sum() * factor

        with torch.autocast("cpu", torch.float16):
            assert torch.compile(scaled, fullgraph=True, backend="eager")(torch.ones(3)).item() == 3 * factor


def test_what_two_have_forced_stays_so_until_both_undo_it() -> None:
    model, x = Net(), torch.full((1, 16), 1.001)

    def is_in_float32() -> bool:
        exact = model.head(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.equal(model.head(x).float(), exact)

    first, second = (ampguard.force_fp32(model, "head") for _ in range(2))
    first.undo()
    first.undo()
    assert is_in_float32()
    second.undo()
    assert not is_in_float32()


@pytest.mark.parametrize("pattern", ["again", "ag*", "inner.tied.0"])
def test_a_module_that_is_held_twice_has_two_paths(pattern: str) -> None:
    model = Net()
    model.again = model.head
    model.inner = nn.ModuleDict({"tied": nn.Sequential(model.head), "around": nn.ModuleList([model])})
    assert ampguard.force_fp32(model, pattern).modules == [model.head]
