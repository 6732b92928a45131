"""Bad values that a script computes before its first step are told with the call that made them, and repaired there."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from watching import Watched

from ampguard.capture.glue import before_training
from ampguard.capture.glue.before_training import BeforeTraining

Guard = Callable[..., Watched]


def train(net: nn.Module, loss_of: Callable[[int], Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def made(run: Watched) -> dict[str, Any]:
    assert run.faults == 0, run.stderr
    return dict(run.first.evidence["made_before"])


def weights_of_classes(labels: Tensor) -> Tensor:
    counts = torch.bincount(labels, minlength=4).float()
    return counts.sum() / (4 * counts)


def test_class_weights_of_a_class_without_samples(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        y = torch.tensor([0, 1, 2, 1, 0, 2])
        criterion = nn.CrossEntropyLoss(weight=weights_of_classes(y), label_smoothing=0.1)
        net = nn.Linear(5, 4)
        x = torch.randn(6, 5)
        train(net, lambda _: criterion(net(x), y))

    run = guard(body)
    assert (run.first.cause, run.first.step) == ("nonfinite-parameter", 0)
    assert (made(run)["cause"], made(run)["op"]) == ("division-by-zero", "aten.div.Tensor")
    assert made(run)["code"] == "return counts.sum() / (4 * counts)"
    fix = run.first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert "return counts.sum() / (4 * counts).clamp(min=1)" in fix.how


def test_an_infinite_weight_of_the_positive_class_was_not_meant(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        y = torch.zeros(8, 1)
        bce = nn.BCEWithLogitsLoss(pos_weight=(y == 0).sum() / (y == 1).sum())
        net = nn.Linear(5, 1)
        x = torch.randn(8, 5)
        train(net, lambda _: bce(net(x), y))

    run = guard(body)
    assert (run.first.cause, run.first.evidence["name"]) == ("nonfinite-parameter", "pos_weight")
    assert made(run)["cause"] == "division-by-zero"


def test_samples_of_a_data_set_are_found_where_they_were_normalised(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        x = torch.rand(40, 6)
        x[:, 2] = 0.5
        x = (x - x.mean(0)) / x.std(0, correction=0)
        loader = DataLoader(TensorDataset(x, torch.randint(3, (40,))), batch_size=8, shuffle=True)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for batch, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(net(batch), labels).backward()
            optimizer.step()

    run = guard(body)
    assert (run.first.cause, run.first.step) == ("nonfinite-input", 0)
    assert (made(run)["cause"], made(run)["code"]) == (
        "division-by-zero",
        "x = (x - x.mean(0)) / x.std(0, correction=0)",
    )
    assert [fix.verified for fix in run.first.fixes[:2]] == [True, True]
    assert "+ 1e-6)" in run.first.fixes[0].how


def test_what_was_computed_from_it_is_followed_back_to_the_first(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        links = (torch.rand(9, 9) > 0.5).float()
        links[4] = 0.0
        scale = links.sum(1).pow(-0.5)
        near = scale[:, None] * links * scale[None, :]
        net = nn.Linear(5, 2)
        x = torch.randn(9, 5)
        train(net, lambda _: (near @ net(x)).square().mean())

    run = guard(body)
    assert (made(run)["op"], made(run)["code"]) == ("aten.pow.Tensor_Scalar", "scale = links.sum(1).pow(-0.5)")
    assert run.first.fixes[0].verified
    assert "links.sum(1).clamp(min=1).pow(-0.5)" in run.first.fixes[0].how


def test_a_table_in_a_module_that_goes_bad_at_one_entry_and_is_read_late(guard: Guard) -> None:
    class Schedule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("log_var", torch.log(torch.linspace(0.0, 1.0, 10)))
            self.fc = nn.Linear(3, 1)

        def forward(self, x: Tensor, t: int) -> Tensor:
            return self.fc(x) * self.log_var[t]

    def body() -> None:
        torch.manual_seed(0)
        net = Schedule()
        train(net, lambda step: net(torch.randn(4, 3), 5 - step).square().mean(), steps=6)

    run = guard(body)
    assert (run.first.cause, run.first.step, made(run)["cause"]) == ("nonfinite-parameter", 5, "domain-error")


def test_a_table_that_was_computed_in_half(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        steps = torch.arange(8).half() * 100
        table = (steps * steps).float() / 1e5
        net = nn.Linear(8, 8)
        train(net, lambda _: (net(torch.randn(3, 8)) * table).square().mean())

    run = guard(body)
    assert (made(run)["cause"], made(run)["code"]) == ("fp16-overflow", "table = (steps * steps).float() / 1e5")
    assert (run.first.fixes[0].action, run.first.fixes[0].verified) == ("force-fp32", True)


def test_in_place(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        x = torch.rand(12, 4)
        x[:, 1] = 3.0
        low, high = x.min(0).values, x.max(0).values
        x -= low
        x /= high - low
        net = nn.Linear(4, 1)
        train(net, lambda step: net(x[step * 4 : step * 4 + 4]).square().mean())

    run = guard(body)
    assert made(run)["code"] == "x /= high - low"
    assert run.first.fixes[0].verified


def test_where_the_operands_are_gone_the_line_is_told_all_the_same(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        counts = torch.tensor([3.0, 0.0, 2.0])
        weights = 1 / counts
        counts += 1
        net = nn.Linear(4, 3)
        x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        train(net, lambda _: functional.cross_entropy(net(x), y, weight=weights))

    run = guard(body)
    assert run.first.cause == "nonfinite-input"
    assert made(run)["code"] == "weights = 1 / counts"


def test_what_the_optimizer_came_before_is_known_in_later_steps_too(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        weights = 1 / torch.tensor([3.0, 0.0, 2.0])
        for step in range(14):
            y = torch.tensor([0, 2, 0, 1 if step == 12 else 2])
            loss = functional.nll_loss(functional.log_softmax(net(torch.randn(4, 4)), 1), y, weight=weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = guard(body)
    assert run.first.step == 12
    assert made(run)["code"] == "weights = 1 / torch.tensor([3.0, 0.0, 2.0])"


@pytest.mark.parametrize("is_initialised", [False, True])
def test_memory_that_nobody_has_initialised(guard: Guard, is_initialised: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dirty = torch.full((64, 64), float("nan"))
            del dirty
            self.scale = nn.Parameter(torch.empty(64, 64))
            if is_initialised:
                nn.init.constant_(self.scale, float("nan"))
            else:
                self.scale.data[:] = float("nan")  # what the memory may hold: PyTorch counts no write for it

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.scale

    def body() -> None:
        torch.manual_seed(0)
        net = Scaled()
        train(net, lambda _: net(torch.randn(2, 64)).square().mean())

    run = guard(body)
    assert (run.first.cause, run.first.evidence["name"]) == ("nonfinite-parameter", "scale")
    assert ("uninitialised_at" in run.first.evidence) != is_initialised
    if not is_initialised:
        assert "`self.scale = nn.Parameter(torch.empty(64, 64))`" in run.first.explanation
        assert "nobody has initialised" in run.first.explanation


def test_a_mask_that_is_a_logarithm_stays_one(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        mask = torch.log(torch.tril(torch.ones(5, 5)))
        net = nn.Linear(6, 6)
        x = torch.randn(2, 5, 6)

        def loss(_: int) -> Tensor:
            y = net(x)
            return ((y @ y.transpose(1, 2) + mask).softmax(-1) @ y).square().mean()

        train(net, loss)

    assert guard(body).report.incidents == ()


def test_nothing_is_seen_twice_or_changed_while_it_looks(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    def setting_up() -> list[Any]:
        calls = []

        def own(x: Tensor) -> Tensor:
            calls.append(1)
            return torch.log(x) + 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "softplus", own)
            functional.softplus(torch.zeros(2))
        torch.manual_seed(0)
        net = copy.deepcopy(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.zeros(1) / 0))
        thread.start()
        thread.join()
        rows = torch.vmap(lambda row: row / row.sum())(torch.zeros(2, 3))
        meta = torch.ones(2, device="meta") / 0
        train(net, lambda _: net(torch.randn(2, 3)).sum())
        return [len(calls), len(found), rows.isnan().all().item(), meta.shape, *(p.tolist() for p in net.parameters())]

    bare = setting_up()
    run = guard(setting_up)
    assert run.result == bare
    assert run.report.incidents == ()
    assert torch._C._len_torch_function_stack() == 0


def test_it_looks_at_so_many_calls_and_no_more(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_training, "MAX_CALLS", 10)

    def body() -> None:
        for _ in range(20):
            torch.zeros(1) + 1
        weights = 1 / torch.tensor([1.0, 0.0])
        net = nn.Linear(2, 2)
        train(net, lambda _: (net(torch.ones(1, 2)) * weights).sum())

    run = guard(body)
    assert run.faults == 0
    assert "made_before" not in run.first.evidence


@pytest.mark.parametrize("entry", ["_look", "_before_write", "keep_from", "end"])
def test_a_fault_in_it_leaves_the_script_unharmed(guard: Guard, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    def body() -> Tensor:
        torch.manual_seed(0)
        x = torch.ones(3)
        x /= 2
        net = nn.Linear(3, 1)
        train(net, lambda _: net(x / x.sum()).sum())
        return net.weight.detach()

    def fails(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    bare = body()
    monkeypatch.setattr(BeforeTraining, entry, fails)
    run = guard(body)
    assert torch.equal(run.result, bare)
    assert run.faults == 1
    while torch._C._len_torch_function_stack():  # (`end` itself has failed here)
        torch._C._pop_torch_function_stack()


def test_a_forked_worker_passes_calls_through(guard: Guard) -> None:
    class Rows(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return torch.full((3,), float(index)) / (index - 3 if os.getpid() == parent else 1)

    parent = os.getpid()

    def body() -> None:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        for x in DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()

    assert guard(body).report.incidents == ()


def normalized(labels: Tensor) -> Tensor:
    counts = torch.bincount(labels, minlength=4).float()
    w = 1.0 / counts
    return torch.nan_to_num(w / w.sum() * 4)


def normalized_and_mended(labels: Tensor) -> Tensor:
    counts = torch.bincount(labels, minlength=4).float()
    w = 1.0 / counts
    w /= w.sum()
    w[torch.isnan(w)] = 0.0
    return w


def relative(labels: Tensor) -> Tensor:
    counts = torch.bincount(labels, minlength=4).float()
    w = 1.0 / counts
    return torch.where(torch.isinf(w), torch.zeros(4), w / w.max())


def by_module(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return nn.CrossEntropyLoss(weight=weight)


def by_hand(weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_of(scores: Tensor, y: Tensor) -> Tensor:
        each = weight[y]
        return (functional.cross_entropy(scores, y, reduction="none") * each).sum() / each.sum()

    return loss_of


@pytest.mark.parametrize("loss_with", [by_module, by_hand])
@pytest.mark.parametrize("weigh", [normalized, normalized_and_mended, relative])
def test_weights_that_are_0_because_an_infinity_divided_them(
    weigh: Callable[[Tensor], Tensor], loss_with: Callable[[Tensor], Any], guard: Guard
) -> None:
    def body() -> None:
        torch.manual_seed(0)
        y = torch.tensor([0, 1, 2, 1, 0, 2, 1])
        criterion = loss_with(weigh(y))
        net = nn.Linear(5, 4)
        x = torch.randn(7, 5)
        train(net, lambda _: criterion(net(x), y))

    run = guard(body)
    assert run.causes == ["division-by-zero"]
    assert made(run)["code"] == "w = 1.0 / counts"
    fix = run.first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert "w = 1.0 / counts.clamp(min=1)" in fix.how


def test_weights_that_the_script_mends_are_not_blamed(guard: Guard) -> None:
    """An infinity that was put right before it did harm; the batch that fails has another reason."""

    def body() -> None:
        torch.manual_seed(0)
        y = torch.tensor([0, 1, 2, 1, 0, 2, 1])
        counts = torch.bincount(y, minlength=4).float()
        w = 1.0 / counts
        w[torch.isinf(w)] = 0.0
        net = nn.Linear(5, 4)
        x = torch.randn(7, 5)

        def loss_of(step: int) -> Tensor:
            kept = (y < 3 - 2 * step).float()
            return (functional.cross_entropy(net(x), y, weight=w, reduction="none") * kept).sum() / kept.sum()

        train(net, loss_of)

    run = guard(body)
    assert (run.causes, run.first.step) == (["division-by-zero"], 2)
    assert "made_before" not in run.first.evidence


def test_what_only_hands_bad_values_on_has_not_made_them(guard: Guard) -> None:
    """Batches of a loop under `torch.func`: the view that the loss takes of one is no maker, nor before the first step."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(8, 1)
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}

        def loss_of(p: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(net, p, (x[None],)).square().mean()

        for step in range(9):
            x = torch.randn(16, 8).abs()
            if step == 5:
                x[0] -= 9
            x[:, 0].log_()
            of_samples = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0))
            gradients, _ = of_samples(weights, x)
            weights = {name: p - 0.05 * gradients[name].nan_to_num().mean(0) for name, p in weights.items()}

    run = guard(body)
    assert (run.faults, run.causes, run.first.step) == (0, ["nonfinite-input"], 5)
    assert "made_before" not in run.first.evidence
    assert "before its first step" not in run.first.explanation
