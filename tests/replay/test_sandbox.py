"""What a replay could disturb is put back: the script's own objects hold what they held."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched, bits, seed_everything

Guard = Callable[..., Watched]
NAN = float("nan")
CALLS_BY_GLOBAL: list[int] = []


class Counts(nn.Module):
    """Keeps every sort of state that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls = 0
        self.shapes: list[Any] = []
        self.by_name: dict[str, list[int]] = {"in": [], "out": []}
        self.names: set[int] = set()
        self.recent: deque[int] = deque(maxlen=3)
        self.memory = torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.by_name["in"].append(self.calls)
        self.names.add(self.calls)
        self.recent.append(self.calls)
        CALLS_BY_GLOBAL.append(self.calls)
        h = self.layer(x)
        with torch.no_grad():
            self.memory += h.detach().sum(0)  # in place
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0)  # rebound
            self.count += 1
        if self.calls == 3:
            self.made_late = h.detach()
        return h * self.mean.sum()

    def state(self) -> Any:
        late = getattr(self, "made_late", None)
        counted = (self.calls, list(self.shapes), {k: list(v) for k, v in self.by_name.items()}, set(self.names))
        tensors = bits([self.memory, self.mean, self.count, late])
        return counted, list(self.recent), list(CALLS_BY_GLOBAL), tensors


def test_state_that_a_forward_pass_keeps(guard: Guard) -> None:
    def body() -> Any:
        seed_everything()
        CALLS_BY_GLOBAL.clear()
        model = Counts()
        containers = (model.shapes, model.by_name, model.by_name["in"], model.names, model.recent, model.memory)
        states = []
        for step in range(4):
            loss = model(torch.randn(3, 4)).pow(2).mean() / (0.0 if step >= 2 else 1.0)
            before = model.state()
            mean, count = model.mean, model.count
            loss.backward()
            assert model.state() == before
            assert model.mean is mean
            assert model.count is count
            states.append(before)
        now = (model.shapes, model.by_name, model.by_name["in"], model.names, model.recent, model.memory)
        assert all(a is b for a, b in zip(containers, now, strict=True)), "the containers themselves stay"
        return states

    plain = body()
    run = guard(body)
    assert run.faults == 0
    assert run.result == plain
    assert run.causes == ["division-by-zero"]


def test_features_kept_by_hooks(guard: Guard) -> None:
    """A feature extractor: a closure's dict, and an object's list; the tensors in them are those of the step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    features: dict[str, Tensor] = {}

    class Recorder:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.seen.append(output)

    recorder = Recorder()

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        features["hidden"] = output

    model[1].register_forward_hook(remember)
    model[0].register_forward_hook(recorder.hook)

    def body() -> Any:
        out = model(torch.randn(3, 4))
        hidden, seen = features["hidden"], list(recorder.seen)
        (out.mean() * NAN).backward(retain_graph=True)
        assert features["hidden"] is hidden
        assert len(recorder.seen) == len(seen)
        assert all(a is b for a, b in zip(recorder.seen, seen, strict=True))
        features["hidden"].sum().backward()  # still part of the step's own graph
        return len(recorder.seen)

    run = guard(body)
    assert run.faults == 0
    assert run.result == 1
    assert run.report.status == "incidents"


def test_batch_norm_that_the_failing_step_has_poisoned(guard: Guard) -> None:
    """The statistics are NaN after the failing call, were finite before it, and both stay as they are."""
    seed_everything()
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def body() -> Any:
        model(torch.randn(6, 4)).sum().backward()
        x = torch.randn(6, 4)
        x[0, 0] = NAN
        data = x.clone()
        loss = model(data).pow(2).mean()
        before = bits(list(model.buffers()))
        loss.backward()
        return before == bits(list(model.buffers())), bool(model[1].running_mean.isnan().any())

    run = guard(body)
    assert run.faults == 0
    assert run.result == (True, True)
    assert run.first.cause in ("nonfinite-input", "indeterminate", "domain-error")


@pytest.mark.parametrize("unfrozen", [False, True])
def test_batch_norm_of_a_model_that_was_evaluated_first(unfrozen: bool, guard: Guard) -> None:
    """A sanity check, a count of operations: the first call changes no statistics, those of the training do."""

    def body() -> Any:
        seed_everything()
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model.eval()
        with torch.no_grad():
            model(torch.randn(6, 4))
        model.train()
        if unfrozen:  # the statistics begin to move in the middle of the training
            model[1].eval()
            model(torch.randn(6, 4)).sum().backward()
            model[1].train()
        for _ in range(3):
            loss = (model(torch.randn(6, 4)).mean() * 0).log()
            loss.backward()
        return bits(list(model.buffers()))

    plain = body()
    run = guard(body)
    assert run.faults == 0
    assert run.report.status == "incidents"
    assert run.result == plain


def test_what_the_script_prints_is_printed_once(guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    class Talks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("forward")
            return super().forward(x)

    model = Talks(2, 1)
    printed = []

    def body() -> None:
        model(torch.full((1, 2), NAN)).sum().backward()
        printed.append(capsys.readouterr().out.count("forward"))

    assert guard(body).report.status == "incidents"
    assert printed == [1]


def test_training_flags_are_as_before(guard: Guard) -> None:
    """The call ran in training mode, but the script has switched to evaluation before it calls backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model[2].eval()

    def body() -> Any:
        loss = model(torch.randn(3, 4)).sum() * NAN
        flags = [m.training for m in model.modules()]
        loss.backward()
        assert [m.training for m in model.modules()] == flags
        loss = model(torch.randn(3, 4)).sum() * NAN
        model.eval()
        loss.backward()
        return [m.training for m in model.modules()]

    run = guard(body)
    assert run.faults == 0
    assert run.result == [False] * 4


class PerSample:
    """Gradients of each sample, kept by hooks on the modules and on the parameters themselves, as DP-SGD needs them."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Any] = [m for m in model.modules() if isinstance(m, nn.Linear)][1:]
        for layer in self.layers:
            layer.register_forward_hook(self.keep_input)
            layer.register_full_backward_hook(functools.partial(self.keep_gradient, self))

    def keep_input(self, module: Any, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        if not hasattr(module, "activations"):
            module.activations = []
        module.activations.append(inputs[0].detach())
        module.weight.uses = getattr(module.weight, "uses", 0) + 1

    @staticmethod
    def keep_gradient(owner: PerSample, module: Any, _: Any, outputs: tuple[Tensor, ...]) -> None:
        sample = torch.einsum("no,ni->noi", outputs[0], module.activations.pop())
        module.weight.uses -= 1
        known = getattr(module.weight, "grad_sample", None)
        module.weight.grad_sample = [sample] if known is None else [*known, sample]
        if len(module.weight.grad_sample) > 1:
            raise ValueError("two backward passes and one step")

    def step(self, spoilt: bool) -> None:
        for layer in self.layers:
            assert layer.activations == []
            assert layer.weight.uses == 0
            (sample,) = layer.weight.grad_sample
            layer.weight.grad = sample.clamp(-1, 1).mean(0) + (float("inf") if spoilt else 0.0)

    def clear(self) -> None:
        for layer in self.layers:
            layer.weight.grad_sample = None


def test_state_that_hooks_keep_on_modules_and_on_parameters(guard: Guard) -> None:
    def body() -> Any:
        seed_everything()
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        samples = PerSample(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            samples.step(spoilt=step == 3)
            optimizer.step()
            samples.clear()
        return bits([p.detach() for p in model.parameters()])

    plain = body()
    run = guard(body)
    assert run.faults == 0
    assert run.result == plain
    assert (run.first.step, run.first.op) == (3, "aten.add.Tensor")
    assert run.first.location.code.startswith("layer.weight.grad = sample.clamp(-1, 1)")
