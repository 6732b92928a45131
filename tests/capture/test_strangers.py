"""Scripts that do unusual things run under guard as they run without it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from watching import Watched, bits, fingerprint, seed_everything

from ampguard.capture.record import RootCall
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.root_calls.usual import CallContext

Guard = Callable[..., Watched]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_everything()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def same_with_and_without(guard: Guard, body: Callable[[], Any]) -> Watched:
    """The body gives the same, bit for bit, under guard; no fault of ampguard's own."""
    plain = body()
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.result == plain
    return run


# --- modes of the script's own ----------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_around_the_whole_step(guard: Guard) -> None:
    def body() -> Any:
        model, optimizer = model_and_optimizer()
        with Counting() as mode:
            for step in range(4):
                loss = model(torch.randn(3, 4)).pow(2).mean() * (float("nan") if step == 3 else 1.0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return len(mode.seen) > 20, fingerprint(model, optimizer)

    same_with_and_without(guard, body)


def test_dispatch_mode_entered_between_forward_and_loss(guard: Guard) -> None:
    """Ours is under theirs on the stack then, and must stay there until theirs is gone."""

    def body() -> Any:
        model, optimizer = model_and_optimizer()
        seen = []
        for step in range(4):
            output = model(torch.randn(3, 4))
            with Counting() as mode:
                loss = output.pow(2).mean() * (float("inf") if step == 2 else 1.0)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            seen.append(len(mode.seen) > 5)
        return seen, fingerprint(model, optimizer)

    same_with_and_without(guard, body)


@pytest.mark.parametrize("factor", [1.0, float("nan")], ids=["healthy", "failing"])
def test_dispatch_mode_of_the_script_sees_the_script_only(factor: float, guard: Guard) -> None:
    """FlopCounterMode counts what it sees; DebugMode prints it."""

    def body() -> Any:
        model, _ = model_and_optimizer()
        x = torch.randn(3, 4)
        with Counting() as mode:
            (model(x).pow(2).mean() * factor).backward()
        return [name for name in mode.seen if not name.startswith("profiler.")]

    same_with_and_without(guard, body)


def test_script_with_a_dispatch_mode_leaves_pytorch_as_it_was(guard: Guard) -> None:
    """PyTorch remembers whether any mode is active; torch.compile compiles anew in each call where that is wrong."""

    def body() -> None:
        model, _ = model_and_optimizer()
        with Counting():
            for _ in range(2):
                model(torch.randn(3, 4)).pow(2).mean().backward()

    body()
    assert not _python_dispatch._is_in_torch_dispatch_mode
    guard(body)
    assert not _python_dispatch._is_in_torch_dispatch_mode


def test_dispatch_mode_that_is_left_in_another_step(guard: Guard) -> None:
    def body() -> Any:
        model, optimizer = model_and_optimizer()
        mode = Counting()
        for step in range(4):
            output = model(torch.randn(3, 4))
            if step == 1:
                mode.__enter__()
            if step == 2:
                mode.__exit__(None, None, None)
            optimizer.zero_grad()
            output.pow(2).mean().backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    same_with_and_without(guard, body)


def test_function_mode_around_the_step(guard: Guard) -> None:
    def body() -> Any:
        model, optimizer = model_and_optimizer()
        with CountingFunctions() as mode:
            for step in range(3):
                loss = model(torch.randn(3, 4)).pow(2).mean() * (float("nan") if step == 2 else 1.0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return fingerprint(model, optimizer), mode.seen > 0

    run = same_with_and_without(guard, body)
    assert run.report.status == "incidents"


def test_default_device_and_anomaly_mode(guard: Guard) -> None:
    def body() -> Any:
        model, optimizer = model_and_optimizer()
        with torch.device("cpu"), torch.autograd.graph.save_on_cpu():
            for _ in range(3):
                loss = model(torch.randn(3, 4)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return fingerprint(model, optimizer)

    same_with_and_without(guard, body)


# --- scripts that patch what we patch ---------------------------------------------------------------------------------


def test_script_that_replaces_module_call_and_keeps_it(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Module.__call__
    calls: list[str] = []

    def body() -> Any:
        calls.clear()
        below = nn.Module.__call__

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            calls.append(type(self).__name__)
            return below(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__call__", __call__)
        model, optimizer = model_and_optimizer()
        for _ in range(3):
            loss = model(torch.randn(3, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        made = list(calls)
        return made, fingerprint(model, optimizer)

    plain = body()
    monkeypatch.setattr(nn.Module, "__call__", original)
    run = guard(body)
    assert run.faults == 0
    assert run.result == plain
    calls.clear()
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert calls == ["Linear"], "the script's own patch stays where it put it"


def test_script_that_replaces_module_call_and_fails(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)  # so that the original comes back in the end

    def body() -> None:
        below = nn.Module.__call__
        monkeypatch.setattr(nn.Module, "__call__", lambda self, *a, **k: below(self, *a, **k))
        model = nn.Linear(2, 1)
        model(torch.full((1, 2), float("nan"))).sum().backward()

    run = guard(body)
    assert run.faults == 0
    assert run.causes == ["nonfinite-input"]


def test_script_that_replaces_backward(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that calls the original, and one that does not call it at all."""
    original = Tensor.backward

    def body() -> Any:
        monkeypatch.setattr(Tensor, "backward", lambda self, *a, **k: original(self * 2.0, *a, **k))
        model, optimizer = model_and_optimizer()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).pow(2).mean().backward()
            optimizer.step()

        def by_hand(self: Tensor) -> None:
            for p, g in zip(model.parameters(), torch.autograd.grad(self, list(model.parameters())), strict=True):
                p.grad = g

        monkeypatch.setattr(Tensor, "backward", by_hand)
        for _ in range(3):
            model(torch.randn(3, 4)).pow(2).mean().backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    same_with_and_without(guard, body)


# --- functorch, autograd by hand, other threads -----------------------------------------------------------------------


def test_functorch_transforms(guard: Guard) -> None:
    def body() -> Any:
        model, _ = model_and_optimizer()
        x, y = torch.randn(5, 4), torch.randn(5, 2)
        weights = dict(model.named_parameters())

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
        jacobian = torch.func.jacrev(lambda x: model(x))(x)
        hessian = torch.func.hessian(lambda x: model(x).sum())(x[0])
        ensemble = torch.func.vmap(lambda s: model(x * s))(torch.tensor([1.0, float("nan")]))
        return bits(per_sample), bits(jacobian), bits(hessian), bits(ensemble)

    same_with_and_without(guard, body)


def test_gradient_penalty_and_higher_order_gradients(guard: Guard) -> None:
    def body() -> Any:
        model, optimizer = model_and_optimizer()
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            out = model(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.pow(2).mean() + (g.norm(dim=1) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    same_with_and_without(guard, body)


def test_failure_after_a_gradient_penalty_is_still_found(guard: Guard) -> None:
    model, _ = model_and_optimizer()

    def body() -> None:
        x = torch.randn(3, 4, requires_grad=True)
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.pow(2).mean() / (g.detach().norm() * 0.0)
        loss.backward()

    run = guard(body)
    assert run.faults == 0
    assert (run.first.cause, run.first.op) == ("division-by-zero", "aten.div.Tensor")


def test_modules_called_by_other_threads(guard: Guard) -> None:
    """Each thread trains its own network; the failing one is not the first thread to call a module."""

    def train(results: dict[int, Any], number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        model = nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, 4, generator=generator))
            model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            x = torch.randn(3, 4, generator=generator)
            loss = model(x).pow(2).mean() * (float("nan") if (number, step) == (2, 3) else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results[number] = bits([p.detach() for p in model.parameters()])

    def body() -> Any:
        results: dict[int, Any] = {}
        threads = [threading.Thread(target=train, args=(results, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    same_with_and_without(guard, body)


def test_call_during_which_another_thread_begins_to_train(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay swaps clones into the modules that it runs again: they must not be those that another thread is calling."""
    theirs = nn.Linear(4, 1)
    followed: list[int] = []
    recorded: list[Any] = []
    takes_turn = threading.Event()

    def train() -> None:
        model, optimizer = model_and_optimizer()
        model(torch.randn(3, 4)).pow(2).mean().backward()
        optimizer.step()

    def in_another_thread() -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    def before_call(context: CallContext, module: nn.Module, training: bool, frame: Any) -> Any:
        if module is theirs and not takes_turn.is_set():
            takes_turn.set()
            in_another_thread()
        return known(context, module, training, frame)

    def after_backward(recorder: FlightRecorder) -> None:
        followed.append(recorder.turns.thread)
        recorded.extend(e.module for e in recorder.log.record.events if isinstance(e, RootCall))
        ended(recorder)

    def body() -> Any:
        theirs(torch.randn(3, 4)).sum().item()
        assert takes_turn.is_set()
        assert not followed  # the other thread's pass was passed over
        in_another_thread()

    known, ended = CallContext.before_call, FlightRecorder.after_backward
    monkeypatch.setattr(CallContext, "before_call", before_call)
    monkeypatch.setattr(FlightRecorder, "after_backward", after_backward)
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert followed
    assert threading.get_ident() not in followed
    assert theirs not in recorded


def test_backward_pass_during_which_another_thread_begins_one(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches operators in one thread must not be taken off in another."""
    begun: list[FlightRecorder] = []
    threads_followed: list[int] = []

    def step(seed: int) -> list[Any]:
        model, optimizer = model_and_optimizer()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(4):
            loss = model(torch.randn(3, 4, generator=generator)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return bits([p.detach() for p in model.parameters()])

    def before_backward(recorder: FlightRecorder, *args: Any) -> Any:
        call = known(recorder, *args)
        if not begun:
            begun.append(recorder)
            thread = threading.Thread(target=step, args=(1,))
            thread.start()
            thread.join()
            threads_followed.append(recorder.turns.thread)
        return call

    def body() -> Any:
        return step(0)

    bare = body()
    known = FlightRecorder.before_backward
    monkeypatch.setattr(FlightRecorder, "before_backward", before_backward)
    run = guard(body)
    assert run.faults == 0, run.stderr
    assert begun
    assert threads_followed == [threading.get_ident()]
    assert run.result == bare


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_threads_that_train_in_turns(guard: Guard, failing: int) -> None:
    """One of them is followed while all goes well; the one whose loss turns bad is explained when it does so again."""
    in_turn = [threading.Event() for _ in range(3)]

    def train(results: dict[int, Any], number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        model = nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, 4, generator=generator))
            model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            for part in ("forward", "backward", "step"):
                in_turn[number].wait()
                in_turn[number].clear()
                if part == "forward":
                    out = model(torch.randn(3, 4, generator=generator))
                    loss = out.pow(2).mean()
                    if number == failing and step in (6, 7, 8):
                        loss = loss + torch.log(-out.abs().mean())
                elif part == "backward":
                    optimizer.zero_grad()
                    loss.backward()
                elif loss.isfinite():
                    optimizer.step()
                in_turn[(number + 1) % 3].set()
        results[number] = bits([p.detach() for p in model.parameters()])

    def body() -> Any:
        results: dict[int, Any] = {}
        threads = [threading.Thread(target=train, args=(results, n)) for n in range(3)]
        for thread in threads:
            thread.start()
        in_turn[0].set()
        for thread in threads:
            thread.join()
        in_turn[0].clear()
        return results

    run = same_with_and_without(guard, body)
    assert (run.first.cause, run.first.op) == ("domain-error", "aten.log.default")
    assert run.first.location is not None
    assert run.first.location.code == "loss = loss + torch.log(-out.abs().mean())"


def test_forward_of_a_module_in_backward(guard: Guard) -> None:
    """Activation checkpointing calls modules again while autograd's engine runs."""

    def body() -> Any:
        model, optimizer = model_and_optimizer()
        for step in range(4):
            x = torch.randn(3, 4, requires_grad=True) * (float("nan") if step == 3 else 1.0)
            h = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            optimizer.zero_grad()
            h.pow(2).mean().backward()
            optimizer.step()
        return fingerprint(model, optimizer)

    same_with_and_without(guard, body)


# --- unusual modules and tensors ----------------------------------------------------------------------------------------


def test_packed_sequence(guard: Guard) -> None:
    model = nn.GRU(3, 4, batch_first=True)

    def body() -> None:
        x = torch.randn(2, 3, 3)
        x[0, 0, 0] = float("nan")
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        model(packed)[1].mean().backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.report.status == "incidents"


def test_scripted_module(guard: Guard) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()))

    def body() -> None:
        model(torch.full((2, 3), float("nan"))).mean().backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.report.status == "incidents"


def test_tensors_without_values(guard: Guard) -> None:
    """A script that sizes its model on the meta device before it trains."""

    def body() -> None:
        with torch.device("meta"):
            nn.Linear(3, 1)(torch.empty(2, 3)).sum().backward()
        nn.Linear(3, 1)(torch.full((2, 3), float("nan"))).sum().backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.report.status == "incidents"


def test_fake_tensors(guard: Guard) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def body() -> None:
        with FakeTensorMode():
            nn.Linear(3, 1)(torch.empty(2, 3)).sum().backward()
        nn.Linear(3, 1)(torch.full((2, 3), float("nan"))).sum().backward()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert run.report.status == "incidents"


def test_complex_and_double_and_sparse(guard: Guard) -> None:
    def body() -> Any:
        seed_everything()
        net, table = nn.Linear(4, 4).double(), nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD([*net.parameters(), *table.parameters()], lr=0.1)
        for step in range(4):
            spectrum = torch.fft.fft(net(torch.randn(2, 4).double())).abs().mean()
            loss = spectrum / (0.0 if step == 2 else 1.0) + table(torch.tensor([1, 3])).sum()
            optimizer.zero_grad()
            if loss.isfinite():
                loss.backward()
                optimizer.step()
        return bits([*net.parameters(), *table.parameters()])

    run = same_with_and_without(guard, body)
    assert run.causes == ["division-by-zero"]


def test_tracing_exporting_copying_and_pickling(guard: Guard) -> None:
    import copy
    import io
    import pickle

    def body() -> Any:
        seed_everything()
        net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(1, 3)
        before = net(x)
        same = [
            copy.deepcopy(net),
            pickle.loads(pickle.dumps(net)),
            torch.jit.trace(net, x),
            torch.fx.symbolic_trace(net),
        ]
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        with torch.no_grad():
            assert all(torch.equal(other(x), before) for other in same)
        assert torch.autograd.gradcheck(nn.Linear(2, 2).double(), torch.randn(2, 2).double().requires_grad_())
        return bits(before), len(file.getvalue()), bits(torch.autograd.functional.jacobian(net, x))

    same_with_and_without(guard, body)


# --- data ---------------------------------------------------------------------------------------------------------------


class Numbers(Dataset[Tensor]):
    """Calls a module in the worker, and one sample is bad."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 4)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            x = self.net(torch.full((2,), float(index)))
        return x / (0.0 if index == 9 else 1.0) + torch.rand(4) * 0.1


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_are_left_alone(workers: int, guard: Guard) -> None:
    def body() -> Any:
        model, optimizer = model_and_optimizer()
        data = Numbers()
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, generator=generator)
        batches = []
        for x in loader:
            batches.append(bits(x))
            loss = model(x).pow(2).mean()
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return batches, fingerprint(model, optimizer)

    run = same_with_and_without(guard, body)
    assert run.causes == ["nonfinite-input"]


def test_iterating_stops_as_usual(guard: Guard) -> None:
    def body() -> Any:
        loader = DataLoader(torch.arange(5).tolist(), batch_size=2)
        iterator = iter(loader)
        seen = [b.tolist() for b in iterator]
        with pytest.raises(StopIteration):
            next(iterator)
        return seen

    same_with_and_without(guard, body)


# --- exceptions -----------------------------------------------------------------------------------------------------------


def test_exceptions_of_the_script_pass_through_unchanged(guard: Guard) -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("not here")

    def body() -> Any:
        model, optimizer = model_and_optimizer()
        with pytest.raises(KeyError, match="not here"):
            Refuses()(torch.ones(1))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(3, 5))
        loss = model(torch.ones(3, 4)).pow(2).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        optimizer.zero_grad()
        model(torch.randn(3, 4)).pow(2).mean().backward()
        optimizer.step()
        return fingerprint(model, optimizer)

    same_with_and_without(guard, body)


def test_forward_that_catches_an_exception_of_an_inner_module(guard: Guard) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = Inner(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except ValueError:
                return self.other(x)

    model = Tries()

    def body() -> None:
        model(torch.full((1, 4), float("nan"))).sum().backward()

    run = guard(body)
    assert run.faults == 0
    assert (run.first.cause, run.first.module) == ("nonfinite-input", "other")
