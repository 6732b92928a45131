"""Where float32 has to reach from the loss back to the first layers, it is the model that leaves autocast, and no container."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from watching import Watched

from ampguard.incident import Fix

Guard = Callable[..., Watched]


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12, 12) / 12**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ijk,bj->bk", x, self.weight, x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"b{i}": Square() for i in range(4)})
        self.fc = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.layers:
            x = self.layers[name](x)
        return self.fc(x.float() / 100)


def train() -> None:
    torch.manual_seed(0)
    net = Tower()
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    for step in range(3):
        x = torch.randn(8, 12) * (1.3 if step == 2 else 0.3)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(net(x), torch.zeros(8, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_model_is_what_leaves_autocast(guard: Guard) -> None:
    run = guard(train)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.step, run.first.module) == ("fp16-overflow", 2, "layers.b2")
    fix = next(fix for fix in run.first.fixes if fix.action == "force-fp32")
    assert fix.verified
    assert fix.target == ""
    assert 'torch.autocast("cpu", enabled=False)(net)(x)' in fix.how


Step = Callable[[nn.Module, Tensor], Tensor]
OFF = 'torch.autocast("cpu", enabled=False)'


def squared(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).pow(2).sum()


def squared_in_two(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    return out.pow(2).sum()


def multiplied(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    return (out @ out.t()).sum()


def called_twice(net: nn.Module, x: Tensor) -> Tensor:
    first = net[0](x * 30)
    second = net[1](first) + 1
    return second.sum()


def fix_of(guard: Guard, step: Step, net: nn.Module, too_large: float = 1e4) -> Fix:
    """Of a training whose fourth batch is too large, with a loss scale."""

    def body() -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(net.parameters(), 1e-4)
        for number in range(5):
            x = torch.randn(2, 4) * (too_large if number == 3 else 1)
            with torch.autocast("cpu", torch.float16):
                loss = step(net, x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    torch.manual_seed(0)
    run = guard(body)
    assert run.faults == 0, run.stderr
    return next(fix for fix in run.first.fixes if fix.action == "force-fp32")


def test_a_statement_is_rewritten_once(guard: Guard) -> None:
    fix = fix_of(guard, squared, nn.Linear(4, 4))
    assert fix.verified
    assert fix.how == f"leave autocast for this one call: return {OFF}(net)(x).pow(2).sum()"


def test_what_the_gradients_need_may_be_enough(guard: Guard) -> None:
    """The square overflows, and so does its derivative where the model's own result is low: in float32 both are cured."""
    fix = fix_of(guard, squared_in_two, nn.Linear(4, 4))
    assert fix.verified
    code, _, place = fix.how.partition("  # ")
    assert code == f"with {OFF}: out = net(x)"
    assert place.startswith("test_region_of_a_chain.py:")
    assert fix.target == ""


def test_a_product_is_low_again_under_autocast(guard: Guard) -> None:
    fix = fix_of(guard, multiplied, nn.Linear(4, 4))
    assert "return (out.float() @ out.float().t()).sum()" in fix.how


def test_each_statement_has_its_own_line_and_place(guard: Guard) -> None:
    net = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    fix = fix_of(guard, called_twice, net)
    assert fix.verified
    head, first, second = fix.how.splitlines()
    assert head == "leave autocast in each of these statements:"
    assert first.startswith(f"first = {OFF}(net[0])(x * 30)  # test_region_of_a_chain.py:")
    assert second.startswith(f"second = {OFF}(net[1])(first.float()) + 1  # test_region_of_a_chain.py:")
    assert fix.target is not None
    assert all(fix.target.split(", "))


def test_a_product_that_has_not_left_autocast_makes_what_it_is_given_low(guard: Guard) -> None:
    """The model overflows already; in float32 alone it would hand on numbers that autocast casts back for the product."""
    fix = fix_of(guard, multiplied, nn.Linear(4, 4), too_large=3e5)
    assert fix.verified
    assert f"with {OFF}: out = net(x)" in fix.how
    assert "return (out.float() @ out.float().t()).sum()" in fix.how


def multiplied_outside(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    with torch.autocast("cpu", enabled=False):
        return (out.float() @ out.float().t()).sum()


def test_a_product_outside_of_autocast_takes_what_it_is_given(guard: Guard) -> None:
    fix = fix_of(guard, multiplied_outside, nn.Linear(4, 4), too_large=3e5)
    assert fix.verified
    assert fix.how.startswith(f"with {OFF}: out = net(x)")
    assert "\n" not in fix.how
