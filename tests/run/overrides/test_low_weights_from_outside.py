"""O2, O3 and bf16-true on scripts that know nothing of them: results, and all that a script may do with its model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.utils.checkpoint
from override_loops import batches, model, train_plain, train_with_amp, weights
from torch import Tensor, nn

import ampguard


def train_o2_by_hand(steps: int) -> list[Tensor]:
    """O2 written out: a float16 model with a norm in float32, masters in the optimizer, a loss scale of 65536."""
    net = model()
    masters = [p.detach().clone().requires_grad_() for p in net.parameters()]
    net[0].half(), net[3].half()
    optimizer = torch.optim.AdamW(masters, 1e-2)
    for x, y in batches(steps):
        hidden = net[1](net[0](x.half()).float()).half()
        loss = nn.functional.cross_entropy(net[3](net[2](hidden)).float(), y)
        (loss * 2.0**16).backward()
        for master, p in zip(masters, net.parameters(), strict=True):
            master.grad, p.grad = p.grad.float() / 2.0**16, None
        nn.utils.clip_grad_norm_(masters, 0.5)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, net.parameters(), strict=True):
                p.copy_(master)
    return [m.detach() for m in masters]


def train_by_engine(precision: str, steps: int) -> list[Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    amp = ampguard.Amp(net, optimizer, precision=precision, max_grad_norm=0.5)
    for x, y in batches(steps):
        with amp.autocast():
            loss = nn.functional.cross_entropy(net(x), y)
        amp.backward(loss)
        amp.step()
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]  # in O2 these are the masters


@pytest.mark.parametrize("written", ["fp16", "bf16", "fp32"])
def test_o2_is_o2_written_by_hand(overridden: Callable[..., Any], written: str) -> None:
    control = train_o2_by_hand(6)
    with overridden("O2") as session:
        net = train_with_amp(written, steps=6)
    for mine, theirs in zip(weights(net), control, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
    assert session.report.run["could_not"] == []


def test_o2_is_the_engines(overridden: Callable[..., Any]) -> None:
    control = train_by_engine("O2", 6)
    with overridden("O2"):
        net = train_with_amp("fp16", steps=6)
    for mine, theirs in zip(weights(net), control, strict=True):
        assert torch.allclose(mine, theirs, atol=2e-3, rtol=2e-3)


def test_o3_is_the_engines(overridden: Callable[..., Any]) -> None:
    control = train_by_engine("O3", 6)
    with overridden("O3") as session:
        net = train_with_amp("fp16", steps=6)
    for mine, theirs in zip(weights(net), control, strict=True):
        assert torch.equal(mine, mine.half().float())
        assert torch.allclose(mine, theirs.float(), atol=4e-3, rtol=4e-3)
    assert not any("eps of AdamW raised" in line for line in session.report.run["did"])


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_script_without_amp(overridden: Callable[..., Any], precision: str, every: int) -> None:
    exact = train_plain(every=every)
    with overridden(precision) as session:
        net = train_plain(every=every)
    for mine, theirs in zip(weights(net), weights(exact), strict=True):
        assert float((mine.float() - theirs).abs().mean()) < 0.02
    assert not torch.equal(net[0].weight.detach().float(), exact[0].weight.detach())
    assert session.report.run["could_not"] == []


class Seen(nn.Module):
    """A linear layer that remembers the types it met."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.met: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.met.append((x.dtype, self.inner.weight.dtype))
        return self.inner(x)


def trained(net: nn.Module, steps: int = 3, **options: Any) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.requires_grad_(), **options), y).backward()
        optimizer.step()
    return net


class Block(nn.Module):
    """Computes with its parameter itself, and with a module."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.inner = model()
        self.how = how

    def _raw(self, x: Tensor) -> Tensor:
        return self.inner(torch.nn.functional.linear(x, self.weight).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self._raw, x)


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_computes_again_as_it_computed(
    overridden: Callable[..., Any], use_reentrant: bool, precision: str
) -> None:
    again = lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=use_reentrant)  # noqa: E731
    with overridden(precision):
        control = trained(Block(lambda f, x: f(x)))
        net = trained(Block(again))
    for mine, theirs in zip(weights(net), weights(control), strict=True):
        tolerance = 0.01 if precision == "bf16-true" else 0.0  # where two trainings round at random
        assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance)


def test_inside_a_call_float16_and_outside_what_the_script_wrote(overridden: Callable[..., Any]) -> None:
    with overridden("O2"):
        net = Seen()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        out = net(torch.randn(4, 8))
        out.sum().backward()
        assert out.dtype == net.inner.weight.dtype == net.inner.weight.grad.dtype == torch.float32
        assert isinstance(net.inner.weight, nn.Parameter)
        assert optimizer.param_groups[0]["params"][0] is net.inner.weight
        with torch.no_grad():
            net.eval()(torch.randn(4, 8))
        with torch.inference_mode():
            net(torch.randn(4, 8))
        average = copy.deepcopy(net)
        average(torch.randn(4, 8))
        state = torch.optim.swa_utils.AveragedModel(net).state_dict()
    half = (torch.float16, torch.float16)
    assert net.met == [half] * 3
    assert average.met == [half] * 4
    assert all(value.dtype in (torch.float32, torch.int64) for value in state.values())


def test_checkpoints_hold_the_masters_and_none_of_us(overridden: Callable[..., Any]) -> None:
    with overridden("O2"):
        net = trained(model())
        written = io.BytesIO()
        torch.save({"model": net.state_dict(), "whole": net}, written)
        assert b"ampguard" not in pickle.dumps(net)
    written.seek(0)
    read = torch.load(written, weights_only=False)
    assert all(value.dtype == torch.float32 for value in read["model"].values())
    assert type(read["whole"][1]) is nn.LayerNorm is type(net[1])
    for a, b in zip(read["whole"].parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x)).mean(1)


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
def test_tied_weights(overridden: Callable[..., Any], precision: str) -> None:
    def train() -> Tied:
        net = Tied()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.arange(6).reshape(2, 3)).square().mean().backward()
            optimizer.step()
        return net

    exact = train()
    with overridden(precision):
        net = train()
    assert net.head.weight is net.embedding.weight
    assert torch.allclose(net.head.weight.detach().float(), exact.head.weight, atol=0.03)


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.lstm = nn.LSTM(8, 6, batch_first=True)
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x[:, None])[0][:, -1])

    return Last()


def with_weight_norm() -> nn.Module:
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    torch.nn.utils.parametrizations.weight_norm(net[0])
    torch.nn.utils.parametrizations.spectral_norm(net[2])
    return net


class Methods(nn.Module):
    """The script calls its methods, and not itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body, self.head = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8) / 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def decode(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.head)


class ThroughMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Methods()

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner.decode(self.inner.encode(x))


class Running(nn.Module):
    """Keeps an average of what it sees: written to in place, and bound anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.inner = nn.Linear(8, 4)
        self.register_buffer("in_place", torch.zeros(8))
        self.register_buffer("anew", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.in_place.mul_(0.5).add_(x.mean(0), alpha=0.5)
                self.anew = 0.5 * self.anew + 0.5 * x.mean(0).detach()
        return self.inner(x - self.in_place)


@pytest.mark.parametrize("make", [recurrent, with_weight_norm, ThroughMethods, Running])
def test_what_models_do(overridden: Callable[..., Any], make: Callable[[], nn.Module]) -> None:
    exact = trained(make())
    with overridden("O2") as session:
        net = trained(make())
        copied = copy.deepcopy(net)
        trained(copied)
    for (name, mine), theirs in zip(net.state_dict().items(), exact.state_dict().values(), strict=True):
        assert mine.dtype == torch.float32, name
        assert torch.allclose(mine, theirs, atol=0.01), name
    assert session.report.run["could_not"] == []


def test_a_compiled_model_is_compiled_once(overridden: Callable[..., Any]) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with overridden("O2"):
        control = trained(model())
        net = model()
        trained(torch.compile(net, backend=backend))
    assert len(graphs) == 1
    for mine, theirs in zip(weights(net), weights(control), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3)


def test_gradients_of_gradients(overridden: Callable[..., Any]) -> None:
    """A penalty on the gradient of the output by the input: through the casts, twice."""

    def train() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, _ in batches(3):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            optimizer.zero_grad()
            (slope.norm(dim=1) - 1).square().mean().backward()
            optimizer.step()
        return net

    torch.manual_seed(0)
    exact = train()
    torch.manual_seed(0)
    with overridden("O2"):
        net = train()
    for mine, theirs in zip(weights(net), weights(exact), strict=True):
        assert torch.allclose(mine, theirs, atol=0.01)


def test_a_state_that_the_script_gives_to_the_call(overridden: Callable[..., Any]) -> None:
    with overridden("O2"):
        net = Seen()
        state = {name: (2 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
        torch.func.functional_call(net, state, (torch.randn(4, 8),)).sum().backward()
    assert net.met == [(torch.float16, torch.float16)]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in state.values())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_modules_by_pattern_keep_their_float32_weights(overridden: Callable[..., Any], precision: str) -> None:
    with overridden(precision, force_fp32=("inner",)) as session:
        net = nn.Sequential()
        net.add_module("low", Seen())
        net.add_module("inner", Seen())
        net(torch.randn(4, 8)).sum().backward()
    assert net.low.met == [(torch.float16, torch.float16)]
    assert net.inner.met == [(torch.float32, torch.float32)]
    assert session.report.run["in_float32"] == ["inner"]


def test_weights_that_the_script_halved_itself(overridden: Callable[..., Any]) -> None:
    with overridden("O2"):
        net = Seen().half()
        out = net(torch.randn(4, 8).half())
        assert out.dtype == torch.float16
    assert net.met == [(torch.float16, torch.float16)]


def test_what_cannot_be_done_is_said_and_left_in_float32(overridden: Callable[..., Any]) -> None:
    with overridden("O2") as session:
        net = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4))
        assert net(torch.randn(2, 8)).dtype == torch.float32
    assert any("TorchScript" in line and "autocast" in line for line in session.report.run["could_not"])


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_lazy_weights_are_made_first(overridden: Callable[..., Any], precision: str) -> None:
    with overridden(precision):
        net = nn.Sequential(nn.LazyLinear(8), Seen())
        net(torch.randn(4, 8))
        net(torch.randn(4, 8)).sum().backward()
    assert net[1].met == [(torch.float32, torch.float32), (torch.float16, torch.float16)]


def test_bf16_true_loses_no_small_update(overridden: Callable[..., Any]) -> None:
    """200 updates of 1e-4 of a weight of 1: rounded to nearest, none of them would be left."""
    with overridden("bf16-true"):
        net = nn.Linear(64, 64, bias=False)
        nn.init.ones_(net.weight)
        optimizer = torch.optim.SGD(net.parameters(), 1e-4)
        x = torch.eye(64)
        for _ in range(200):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
    assert torch.equal(net.weight, net.weight.bfloat16().float())
    assert float(net.weight.detach().float().mean()) == pytest.approx(1 - 200e-4, abs=2e-3)


def test_an_optimizer_from_a_checkpoint_goes_on(overridden: Callable[..., Any]) -> None:
    net = model()
    before = torch.optim.AdamW(net.parameters(), 1e-2)
    nn.functional.cross_entropy(net(batches(1)[0][0]), batches(1)[0][1]).backward()
    before.step()
    saved = copy.deepcopy((net.state_dict(), before.state_dict()))
    with overridden("O3"):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for x, y in batches(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    for p, state in optimizer.state.items():
        assert torch.equal(p, p.half().float())
        assert state["exp_avg"].dtype == torch.float32
        assert float(state["step"]) == 3


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_an_overflow_is_explained(overridden: Callable[..., Any], precision: str) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 300.0).square().mean(-1)

    with overridden(precision) as session:
        net = nn.Sequential(nn.Linear(8, 8), Wide())
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for x, _ in batches(3):
            optimizer.zero_grad()
            net(x * 10).mean().backward()
            optimizer.step()
    first = session.report.incidents[0]
    assert (first.cause, first.module) == ("fp16-overflow", "1")
    assert "square" in first.location.code
    assert any(fix.verified for fix in first.fixes)


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_a_model_that_brings_float32_to_its_weights_is_replayed(overridden: Callable[..., Any], precision: str) -> None:
    """Its calls run in a region of autocast, and so do their replays."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(16, 2)

        def forward(self, x: Tensor, seen: int) -> Tensor:
            states = torch.zeros(seen, 8)
            return self.outer(torch.cat([self.inner(x), states.mean(0).expand(len(x), -1)], -1))

    with overridden(precision) as session:
        net = Pooled()
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(3, 8), seen=2 if step < 2 else 0).mean().backward()
            optimizer.step()
    first = session.report.incidents[0]
    assert (first.cause, first.step, first.evidence["rung"]) == ("empty-reduction", 2, "replay")
    assert any(fix.verified for fix in first.fixes)


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_an_overflow_is_healed(overridden: Callable[..., Any], precision: str) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.gain(x) * 300.0).square().mean(-1).sqrt()

    losses = []
    with overridden(precision, on_nonfinite="heal") as session:
        net = nn.Sequential(nn.Linear(8, 8), Wide())
        optimizer = torch.optim.SGD(net.parameters(), 1e-8)
        for x, _ in batches(4):
            optimizer.zero_grad()
            loss = net(x * 10).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert torch.tensor(losses).isfinite().all()
    done = session.report.run["healed"][0]
    assert (done["action"], done["target"]) == ("force-fp32", "1")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_ddp_reduces_the_masters_gradients(
    overridden: Callable[..., Any], alone: None, find_unused_parameters: bool
) -> None:
    with overridden("O2") as session:
        control = trained(model())
        net = model()
        ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=find_unused_parameters)
        reduced = []

        def average(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
            reduced.append(bucket.buffer().dtype)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, average)
        trained(ddp)
    assert set(reduced) == {torch.float32}
    assert session.report.run["could_not"] == []
    for mine, theirs in zip(weights(net), weights(control), strict=True):
        assert torch.equal(mine, theirs)


def test_everything_is_put_back(overridden: Callable[..., Any]) -> None:
    engine = torch.autograd._engine_run_backward
    net = model()
    with overridden("O2"):
        trained(net)
    assert torch.autograd._engine_run_backward is engine
    assert type(net[1]) is nn.LayerNorm
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in net.parameters())
    assert net(torch.randn(2, 8)).dtype == torch.float32


class WithStatistics(nn.Module):
    """Statistics that a layer keeps, and some that a model of its own keeps by the same function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))
        self.register_buffer("exact", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.batch_norm(self.inner(x), self.mean, self.variance, training=self.training)
        return self.head(self.norm(hidden)) * self.exact.sum()


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
def test_running_statistics_are_kept(overridden: Callable[..., Any], precision: str) -> None:
    """Their kernels count no version: what the casts have taken in has to reach the model all the same."""

    def trained() -> WithStatistics:
        torch.manual_seed(1)
        net = WithStatistics()
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        for x, y in batches(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(2 + x), y).backward()
            optimizer.step()
        return net

    control = trained()
    with overridden(precision):
        net = trained()
    for mine, theirs in zip(net.buffers(), control.buffers(), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
    assert not torch.equal(net.norm.running_mean, torch.zeros(16))
    assert torch.equal(net.exact, control.exact)  # nobody has written to it: it keeps what float16 cannot hold


class OwnLoss(nn.Module):
    """Its loss is made in its own forward, in the precision of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - nn.functional.one_hot(y, 4)).square().mean()


@pytest.mark.parametrize("precision", ["fp16", "O2", "O3"])
def test_a_float16_loss_of_a_models_own_loses_no_step(overridden: Callable[..., Any], precision: str) -> None:
    """Times 65536 its gradient is infinite in float16, however the loss is cast afterwards."""
    with overridden(precision) as session:
        net = OwnLoss()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, y in batches(5):
            optimizer.zero_grad()
            net(x, y).backward()
            optimizer.step()
    assert session.report.run["steps_held_off"] == 0
    assert session.report.steps == 5
    assert [i for i in session.report.incidents if i.severity != "info"] == []


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_a_scaler_is_not_called_needless(overridden: Callable[..., Any], precision: str) -> None:
    with overridden(precision) as session:
        train_with_amp("fp16", steps=20)
    assert [i.cause for i in session.report.incidents if i.severity != "info"] == []


@pytest.mark.parametrize("precision", ["O2", "O3", "bf16-true"])
def test_sparse_gradients_stay_sparse(overridden: Callable[..., Any], precision: str) -> None:
    """SparseAdam takes no others, and the derivative of an ordinary cast takes no sparse one."""

    def trained_bag() -> nn.Module:
        torch.manual_seed(1)
        net = nn.Sequential(nn.EmbeddingBag(30, 8, sparse=True), nn.Linear(8, 4))
        optimizers = [torch.optim.SparseAdam(net[0].parameters(), 1e-2), torch.optim.SGD(net[1].parameters(), 0.1)]
        for x, y in batches(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(net((x.abs() * 9).long().clamp(max=29)), y).backward()
            assert net[0].weight.grad.is_sparse
            for optimizer in optimizers:
                optimizer.step()
        return net

    control = trained_bag()
    with overridden(precision) as session:
        net = trained_bag()
    assert session.report.run["steps_held_off"] == 0
    for mine, theirs in zip(weights(net), weights(control), strict=True):
        assert torch.allclose(mine, theirs, atol=0.03)


@pytest.mark.parametrize(("own", "eps"), [(torch.bfloat16, 1e-8), (torch.float16, 1e-4), (torch.float32, 1e-8)])
def test_eps_is_raised_where_the_script_made_its_weights_float16(
    overridden: Callable[..., Any], own: torch.dtype, eps: float
) -> None:
    """These are updated in float16; float32 ones in float32, and what the script has made bfloat16 stays so under O3."""
    net = model().to(own)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with overridden("O3") as session:
        for x, y in batches(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.to(own)).float(), y).backward()
            optimizer.step()
    assert optimizer.param_groups[0]["eps"] == eps
    assert any("eps of AdamW" in line for line in session.report.run["did"]) is (eps == 1e-4)


def test_an_ensemble_that_is_mapped_over_its_weights(overridden: Callable[..., Any]) -> None:
    """`vmap` hands the skeleton tensors that are no parameters, and do not say that they require a gradient."""

    def train() -> tuple[float, torch.dtype]:
        torch.manual_seed(0)
        members = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(3)]
        stacked, buffers = torch.func.stack_module_state(members)
        skeleton, seen = copy.deepcopy(members[0]).to("meta"), []
        skeleton[1].register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
        optimizer = torch.optim.SGD(stacked.values(), 0.05)
        member = lambda weights, buffers, x: torch.func.functional_call(skeleton, (weights, buffers), (x,))  # noqa: E731
        for x, y in batches(5):
            out = torch.func.vmap(member, in_dims=(0, 0, None))(stacked, buffers, x)
            loss = nn.functional.cross_entropy(out.flatten(0, 1), y.repeat(3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item(), seen[-1]

    expected, _ = train()
    with overridden("O2") as session:
        loss, dtype = train()
    assert dtype == torch.float16
    assert loss != expected
    assert loss == pytest.approx(expected, rel=0.02)
    assert "models run on float16 casts of the script's weights" in session.report.run["did"]
