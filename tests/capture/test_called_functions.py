"""What a guard replaces for a while, nobody may take with them: `torch.mean` is PyTorch's own for who does not call it."""

from __future__ import annotations

import logging
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ampguard.capture.protocol.called_functions import CalledFunctions, CalledMethod, call_sites

Guard = Callable[..., Any]


@pytest.fixture
def replaced() -> Any:
    """A module whose functions tell whether they are the replacement."""
    module = types.ModuleType("functions")
    module.double = lambda x, times=2: times * x  # type: ignore[attr-defined]
    module.inner = types.ModuleType("inner")  # type: ignore[attr-defined]
    module.inner.half = lambda x: x / 2  # type: ignore[attr-defined]
    functions = CalledFunctions()
    functions.replace(module, "double", lambda original, name: lambda *a, **k: (name, original(*a, **k)))
    functions.replace(module.inner, "half", lambda original, name: lambda *a, **k: (name, original(*a, **k)))
    functions.put()
    yield module
    functions.undo()
    assert type(module) is types.ModuleType
    assert type(module.inner) is types.ModuleType


def calls(module: Any) -> list[Any]:
    results = [module.double(3), module.double(x=3, times=3), module.double(*[3])]
    return [*results, module.inner.half(module.double(2)[1]), *(module.double(x) for x in (1, 2))]


def test_who_calls_gets_the_replacement(replaced: Any) -> None:
    doubled = [("double", 6), ("double", 9), ("double", 6), ("half", 2), ("double", 2), ("double", 4)]
    assert calls(replaced) == doubled


def test_who_takes_it_gets_the_original(replaced: Any) -> None:
    own = vars(replaced)["double"]
    taken = replaced.double
    assert taken is own
    assert replaced.double is own
    assert getattr(replaced, "double") is own  # noqa: B009
    assert list(map(replaced.inner.half, [4])) == [2]


def test_who_replaces_it_again_is_left_alone(replaced: Any) -> None:
    replaced.double = abs
    result = replaced.double(-3)
    assert result == 3
    assert vars(replaced)["double"] is abs
    del replaced.double
    assert "double" not in vars(replaced)


def test_methods_of_a_class() -> None:
    class Number(int):
        def double(self) -> int:
            return 2 * self

        def __neg__(self) -> int:
            return int(self) * -1

    own = Number.double
    Number.double = CalledMethod(own, lambda self: ("double", own(self)))  # type: ignore[method-assign, assignment]
    Number.__neg__ = CalledMethod(Number.__neg__, lambda self: "neg")  # type: ignore[method-assign, assignment]
    results = [Number(3).double(), -Number(3), Number.double(Number(4))]
    taken = Number.double
    assert results == [("double", 6), "neg", ("double", 8)]
    assert taken is own
    assert list(map(Number.double, [Number(5)])) == [10]


def test_call_sites_of_an_imported_module() -> None:
    source = (
        "import torch\nf = torch.mean\ng = torch.sum(x)\nh = torch.linalg.norm(torch.abs(x), ord=2)\nf is torch.max\n"
    )
    assert len(call_sites(compile(source, "script.py", "exec"))) == 3


def test_what_a_script_takes_behind_a_backward_pass_is_pytorchs_own(guard: Guard) -> None:
    own = {torch.norm: "norm", torch.mean: "mean", torch.linalg.norm: "linalg", torch.Tensor.norm: "method"}

    def body() -> list[Any]:
        net, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=64.0)
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        seen = []
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(net(torch.ones(2, 4)).float().mean()).backward()
            seen.append([own.get(f) for f in (torch.norm, torch.mean, torch.linalg.norm, torch.Tensor.norm)])
            seen.append([pickle.loads(pickle.dumps(torch.norm)) is vars(torch)["norm"]])
            scaler.step(opt)
            scaler.update()
        return seen

    run = guard(body)
    assert run.faults == 0
    assert run.result == [["norm", "mean", "linalg", "method"], [True]] * 3


@pytest.mark.filterwarnings("ignore")
def test_a_function_that_is_compiled_behind_a_backward_pass(guard: Guard) -> None:
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()

    @torch.compile(backend="eager", fullgraph=True)
    def norm_of(gradients: list[Any]) -> Any:
        return torch.stack([g.norm() for g in gradients]).square().sum().sqrt() + 0 * torch.linalg.norm(gradients[0])

    def body() -> list[float]:
        torch.manual_seed(0)
        net, scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu", init_scale=64.0)
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        norms = []
        for _ in range(6):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(8, 4)).float().pow(2).mean()
            scaler.scale(loss).backward()
            norms.append(float(norm_of([p.grad for p in net.parameters()]) / scaler.get_scale()))
            scaler.step(opt)
            scaler.update()
        return norms

    run = guard(body)
    assert run.faults == 0
    assert not run.report.incidents
    assert counts["unique_graphs"] == 1
    assert run.result == body()


@pytest.mark.filterwarnings("ignore")
def test_numbers_are_logged_behind_a_backward_pass(guard: Guard) -> None:
    """Lightning keeps `torch.mean` of the first call and compares it with that of the second."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.plugins.precision import MixedPrecision

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Manual(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.Linear(4, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def training_step(self, batch: Any, i: int) -> None:
            loss = self.net(batch).float().pow(2).mean()
            self.manual_backward(loss / 2)
            self.log("loss", loss)
            if i % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    def body() -> Any:
        torch.manual_seed(0)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", plugins=plugin, enable_model_summary=False, **quiet
        )
        trainer.fit(Manual(), DataLoader(torch.randn(96, 4), batch_size=8))
        return trainer.callback_metrics["loss"]

    run = guard(body)
    assert run.faults == 0
    assert run.report.steps == 6
    assert not run.report.incidents


def test_what_was_made_once_is_put_again() -> None:
    made: list[Any] = []

    def make(original: Any, name: str) -> Any:
        made.append(original)
        return lambda x: (name, original(x))

    module, functions = types.ModuleType("functions"), CalledFunctions()
    module.double = lambda x: 2 * x  # type: ignore[attr-defined]

    def look(x: int) -> Any:
        functions.replace(module, "double", make)
        functions.put()
        try:
            return module.double(x)  # type: ignore[attr-defined]
        finally:
            functions.undo()

    assert [look(3), look(4)] == [("double", 6), ("double", 8)]
    assert len(made) == 1
    module.double = lambda x: 3 * x  # type: ignore[attr-defined]
    assert look(3) == ("double", 9)  # the script has another by now
    assert len(made) == 2
