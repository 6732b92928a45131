"""Steps that are bad as they were compiled and finite eagerly; the compiled code is that of wrong backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from ampguard import compat
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.compiled import search as compiled_search

Guard = Callable[..., Any]
Backend = Callable[..., Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before_or_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor does a slow machine end a search."""
    monkeypatch.setattr(Budget, "for_step", staticmethod(lambda *_: Budget(math.inf)))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden = self.act(hidden)
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        x = self.drop(self.blocks(x))
        return self.head(x)


def beyond_four(t: torch.Tensor) -> torch.Tensor:
    """What a kernel with too small a table gives."""
    return torch.where(t > 4.0, float("inf"), t)


def wrong_gelu(which: int, calls: list[int] | None = None) -> Backend:
    """A backend whose `which`-th gelu is wrong for results above 4, by itself or in a larger graph."""

    def backend(graph: fx.GraphModule, inputs: Any) -> Backend:
        if calls is not None:
            calls.append(len(list(graph.graph.nodes)))
        gelus = [n for n in graph.graph.nodes if n.op == "call_function" and "gelu" in str(n.target)]
        for node in gelus:
            if f"{which}.act" in str(node.meta.get("nn_module_stack")) or which < 0:
                with graph.graph.inserting_after(node):
                    wrong = graph.graph.call_function(beyond_four, (node,))
                node.replace_all_uses_with(wrong)
                wrong.args = (node,)
        graph.recompile()
        return graph.forward

    return backend


def train(model: Callable[..., Any], net: Net, steps: int = 5, loud: int = 3, factor: float = 40.0) -> list[Any]:
    """Train; in step `loud` one row of the batch is large. The losses, and what training left behind."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loud_weight = next(p for name, p in net.named_parameters() if name.endswith("1.up.weight"))
    losses = []
    torch.manual_seed(1)
    for step in range(steps):
        x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        with torch.no_grad():
            loud_weight.mul_(factor if step == loud else 1.0)
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == loud:
            break
    return [*losses, *(t.clone() for t in net.state_dict().values()), torch.rand(3)]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(
        torch.equal(torch.as_tensor(a).nan_to_num(7.0), torch.as_tensor(b).nan_to_num(7.0))
        for a, b in zip(left, right, strict=True)
    )


def whole(net: Net, backend: Backend) -> Callable[..., Any]:
    return torch.compile(net, backend=backend)


def in_place(net: Net, backend: Backend) -> Callable[..., Any]:
    net.compile(backend=backend)
    return net


def only_blocks(net: Net, backend: Backend) -> Callable[..., Any]:
    net.blocks = torch.compile(net.blocks, backend=backend)  # type: ignore[assignment]
    return net


@pytest.mark.parametrize("compiled", [whole, in_place, only_blocks])
def test_wrong_operator_is_found_in_its_module(guard: Guard, compiled: Callable[..., Any]) -> None:
    def body() -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net()
        return train(compiled(net, wrong_gelu(1)), net)

    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert same(plain, run.result)
    first = run.first
    assert (first.cause, first.phase, first.step) == ("backend-fault", "forward", 3)
    assert (first.module, first.op) == ("blocks.1.act", "aten.gelu.default")
    assert first.location.code == "hidden = self.act(hidden)"
    facts = first.evidence
    assert (facts["backend"], facts["rung"], facts["fails_as_compiled"]) == ("backend", "replay", True)
    assert facts["region"] == ["aten.gelu.default"]
    assert facts["region_is_smallest"]
    assert facts["nonfinite_compiled"] > 0
    assert facts["nonfinite_eager"] == 0
    assert facts["max_difference"] == 0.0  # where the kernel is right it is right to the bit
    assert 4.0 < facts["max_abs_eager"] < 1e4
    assert {(fix.action, fix.target) for fix in first.fixes} == {("change-backend", "blocks.1.act")}
    assert [fix.verified for fix in first.fixes] == [True, True, True]  # this act, every GELU, nothing compiled
    assert 'get_submodule("blocks.1.act")' in first.fixes[0].how


def test_fix_that_is_told_cures_the_training() -> None:
    torch.manual_seed(0)
    net = Net()
    part = net.get_submodule("blocks.1.act")
    part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign]
    losses = train(torch.compile(net, backend=wrong_gelu(1)), net)[:4]
    assert all(abs(loss) < 1e4 for loss in losses)


def test_what_the_script_compiled_is_still_there_afterwards(guard: Guard) -> None:
    calls: list[int] = []

    def body() -> int:
        torch.manual_seed(0)
        net = Net()
        model = torch.compile(net, backend=wrong_gelu(1, calls))
        train(model, net)
        before = len(calls)
        model(torch.randn(16, 4))
        return len(calls) - before

    run = guard(body)
    assert run.first.cause == "backend-fault"
    assert run.result == 0  # the investigation has added to the cache and taken nothing from it
    assert len(calls) < 20


def test_healthy_steps_add_no_graph_and_no_break(guard: Guard) -> None:
    from torch._dynamo.utils import counters

    def body() -> Any:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        net = Net()
        result = train(torch.compile(net, backend="aot_eager"), net, loud=-1)
        return dict(counters["stats"]), dict(counters["graph_break"]), result

    stats, breaks, result = body()
    run = guard(body)
    assert run.report.incidents == ()
    assert run.result[:2] == (stats, breaks)
    assert stats["unique_graphs"] == 1
    assert same(result, run.result[2])


def test_blocks_that_share_compiled_code_are_told_apart(guard: Guard) -> None:
    def body() -> list[Any]:
        torch.manual_seed(0)
        net = Net(3)
        for block in net.blocks:
            block.compile(backend=wrong_gelu(-1))
        return train(net, net)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.module) == ("backend-fault", "blocks.1.act")


def wrong_derivative(graph: fx.GraphModule, inputs: Any) -> Any:
    from functorch.compile import make_boxed_func

    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.gelu_backward.default:
            with graph.graph.inserting_after(node):
                wrong = graph.graph.call_function(lambda t: torch.where(t.abs() > 0.2, float("nan"), t), (node,))
            node.replace_all_uses_with(wrong)
            wrong.args = (node,)
    graph.recompile()
    return make_boxed_func(graph.forward)


@pytest.mark.parametrize("scale", [None, 64.0])
def test_wrong_derivative_is_found(guard: Guard, scale: float | None) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=wrong_derivative)

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        model = torch.compile(net, backend=backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        for step in range(4):
            loss = functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(0, 3, (16,)))
            loss = loss * (60.0 if step == 2 else 1.0) / (scale or 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                break

    run = guard(body)
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.phase, first.step) == ("backend-fault", "backward", 2)
    assert first.module.endswith(".act")
    assert first.op == "aten.gelu_backward.default"
    gradients = first.evidence["gradients"]
    assert 0 < gradients["nonfinite"] < gradients["of"]
    assert ["every GELU" in fix.how for fix in first.fixes if fix.verified] == [True, False]  # both are wrong


def test_slice_of_a_batch_keeps_its_strides(guard: Guard) -> None:
    """Else what the script compiled for it would not be found again."""

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        compiled = torch.compile(net, backend=wrong_gelu(1))
        train(lambda x: compiled(torch.cat([x, x], dim=1)[:, 2:6]), net)

    first = guard(body).first
    assert (first.cause, first.evidence["rung"]) == ("backend-fault", "replay")
    assert first.evidence["fails_as_compiled"]


def test_without_time_the_whole_graph_is_named(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for gradients: what a backward pass computes is kept nowhere."""
    monkeypatch.setattr(compiled_search, "likeliest_part", lambda search: None)
    monkeypatch.setattr(Budget, "for_step", staticmethod(lambda *_: Budget(-math.inf)))
    monkeypatch.setattr(compiled_search, "MOST_SECONDS", 0.0)

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        train(torch.compile(net, backend=wrong_gelu(1)), net)

    run = guard(body)
    first = run.first
    assert run.faults == 0, run.stderr
    assert first.cause == "backend-fault"
    assert not first.evidence["region_is_smallest"]
    assert "aten.gelu.default" in first.evidence["region"]
    assert "Time was up after 1 compilation in" in first.explanation
    assert [(fix.how, fix.verified) for fix in first.fixes] == [("leave out torch.compile: run it eagerly", True)]


def test_likeliest_operator_is_tried_first(guard: Guard) -> None:
    """The whole with every result kept, then that operator by itself: no bisection, however long the graph is."""

    def body() -> None:
        torch.manual_seed(0)
        net = Net(6)
        train(torch.compile(net, backend=wrong_gelu(1)), net)

    facts = guard(body).first.evidence
    assert (facts["region"], facts["search"]["compilations"]) == (["aten.gelu.default"], 2)
    assert facts["search"]["refused"] == 0


def test_search_may_take_as_long_as_the_script_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "compilation_seconds", lambda: 8.0)
    assert compiled_search.allowed_seconds(2.5) == 8.0
    assert compiled_search.allowed_seconds(20.0) == 20.0
    monkeypatch.setattr(compat, "compilation_seconds", lambda: 1e4)
    assert compiled_search.allowed_seconds(2.5) == compiled_search.MOST_SECONDS


def test_what_does_not_repeat_itself_is_not_the_backends_fault(guard: Guard) -> None:
    runs = []

    def once(graph: fx.GraphModule, inputs: Any) -> Backend:
        def run(*args: Any) -> Any:
            runs.append(1)
            out = graph.forward(*args)
            return tuple(t * float("nan") for t in out) if len(runs) == 3 else out

        return run

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        train(torch.compile(net, backend=once), net, steps=3, loud=-1)

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert [i.cause for i in run.report.incidents] == ["unexplained"]


def test_bad_eagerly_too_is_explained_eagerly(guard: Guard) -> None:
    class Root(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(super().forward(x))

    def body() -> None:
        torch.manual_seed(0)
        net = Root()
        train(torch.compile(net, backend="aot_eager"), net, steps=1)

    assert guard(body).first.cause == "domain-error"


def test_the_line_of_a_node_is_the_scripts_own() -> None:
    """Neither PyTorch's nor a frame of any file of ours, however the package is laid out."""
    from ampguard.capture.protocol import probes as calls
    from ampguard.compat import modules
    from ampguard.replay.compiled_graphs import place_of_node

    frames = [("/home/me/train.py", 7), (torch.nn.Linear.forward.__code__.co_filename, 130)]
    frames += [(str(file.__file__), 12) for file in (calls, modules)]
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = "".join(f'  File "{file}", line {line}, in forward\n    x\n' for file, line in frames)
    assert place_of_node(node) == ("/home/me/train.py", 7)


class RootMeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def without_epsilon(graph: fx.GraphModule, inputs: Any) -> Backend:
    """A backend that takes the addition of a small number for none."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and len(node.args) == 2 and node.args[1] == 1e-6:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def test_a_wrong_result_that_is_finite_is_said_to_be(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8, bias=False), RootMeanSquare(), nn.Linear(8, 2))
        model, optimizer = torch.compile(net, backend=without_epsilon), torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(4):
            x = torch.randn(6, 4) * (step != 2)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), torch.randint(0, 2, (6,))).backward()
            optimizer.step()

    run = guard(body)
    assert (run.faults, run.causes[0], run.first.step, run.first.module) == (0, "backend-fault", 2, "1")
    assert "its 6 results are finite and not those of the same inputs eagerly" in run.first.explanation
    assert "0 are not finite" not in run.first.explanation
