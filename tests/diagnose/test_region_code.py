"""Where a module is to leave autocast: its call as the script writes it, else lines that can be put beside the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampguard.diagnose.budget import Budget
from ampguard.diagnose.fixes import trying
from ampguard.diagnose.fixes.minimal import smallest_float32_region

Guard = Callable[..., Any]


class Front(nn.Module):
    """Squares its input, which goes beyond float16 once."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.mix.weight)

    def forward(self, wave: Tensor, gain: float = 1.0) -> Tensor:
        return torch.log1p((wave * gain).square() @ self.mix.weight)


class Trainer:
    """Holds its modules by itself, and is no module."""

    def __init__(self, *parts: nn.Module, call: Callable[[list[nn.Module], Tensor], Tensor] | None = None) -> None:
        self.front = parts[0]
        self.parts = list(parts)
        self.call = call

    def step(self, wave: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            if self.call is not None:
                return self.call(self.parts, wave).float().mean()
            feats = self.front(wave)
            return feats.float().mean()


def run(trainer: Trainer) -> Callable[[], None]:
    def body() -> None:
        for step in range(2):
            trainer.step(torch.full((2, 4), 300.0 if step else 1.0)).backward()

    return body


def fix_of(guard: Guard, body: Callable[[], None]) -> str:
    first = guard(body).first
    assert first.cause == "fp16-overflow"
    fix = next(fix for fix in first.fixes if fix.action == "force-fp32")
    assert fix.verified is True
    return str(fix.how)


def applied(how: str, **names: object) -> None:
    """Run the lines of a fix, as somebody would who reads it."""
    words, *lines = how.splitlines()
    assert words.endswith("float32, once, after the model is built:")
    exec("\n".join(lines), {"torch": torch, **names})


def test_an_unnamed_module_is_called_as_its_holder_calls_it(guard: Guard) -> None:
    how = fix_of(guard, run(Trainer(Front())))
    expected = r'with torch\.autocast\("cpu", enabled=False\): feats = self\.front\(wave\)  # test_region_code\.py:\d+'
    assert re.fullmatch(expected, how)


def half_then(parts: list[nn.Module], wave: Tensor) -> Tensor:
    first, second = parts
    return 2 * second(first(wave), gain=3e4)


def test_what_else_the_statement_computes_stays_in_low_precision(guard: Guard) -> None:
    plain = nn.Linear(4, 4)
    how = fix_of(guard, lambda: Trainer(plain, Front(), call=half_then).step(torch.ones(2, 4)).backward())
    words, _, code = how.partition(": ")
    assert words == "leave autocast for this one call"
    expected = 'return 2 * torch.autocast("cpu", enabled=False)(second)(first(wave).float(), gain=3e4)'
    assert code.partition("  #")[0] == expected


def test_a_part_that_pytorch_calls_is_changed_by_itself(guard: Guard) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Front())
    with torch.no_grad():
        net[0].weight.mul_(1e3)
    trainer = Trainer(net)
    how = fix_of(guard, lambda: trainer.step(torch.ones(2, 4)).backward())
    assert how.splitlines()[1:] == [
        "part = net[1]" if "part = net[1]" in how else how.splitlines()[1],
        'part.forward = torch.autocast("cpu", enabled=False)(part.forward)',
        "part.register_forward_pre_hook(lambda _, given: tuple(x.float() for x in given))",
    ]
    applied(how, net=net, trainer=trainer, self=trainer)
    assert trainer.step(torch.ones(2, 4)).isfinite()


def in_turn(parts: list[nn.Module], wave: Tensor) -> Tensor:
    for part in parts:
        wave = part(wave, gain=3e4)
    return wave


def test_one_of_several_that_a_loop_calls_is_changed_by_itself(guard: Guard) -> None:
    layers = nn.ModuleList([Front(), Front()])
    trainer = Trainer(*layers, call=in_turn)
    how = fix_of(guard, lambda: trainer.step(torch.ones(2, 4)).backward())
    assert "this one call" not in how
    applied(how, layers=layers, trainer=trainer)
    assert trainer.step(torch.ones(2, 4)).isfinite()


class Scan(nn.Module):
    """Enters autocast by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        with torch.autocast("cpu", dtype=torch.float16):
            return (x.float() * 3e3) @ (x.float() * 3e3).t()


def test_a_region_of_autocast_within_the_module_is_named(guard: Guard) -> None:
    how = fix_of(guard, lambda: Trainer(Scan()).step(torch.ones(2, 4)).backward())
    assert "leave out the cast" not in how
    last = how.splitlines()[-1]
    assert last.startswith(
        'and write enabled=False in: with torch.autocast("cpu", dtype=torch.float16):  # test_region'
    )


def test_casts_of_the_script_are_named_where_the_time_is_up(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(Budget):
        """Is spent once a region has been found."""

        answers: Iterator[bool] = iter([False])

        @property
        def is_spent(self) -> bool:
            return next(self.answers, True)

    monkeypatch.setattr(trying, "smallest_float32_region", lambda e, budget: smallest_float32_region(e, Short(9e9)))
    how = fix_of(guard, lambda: Trainer(Scan()).step(torch.ones(2, 4)).backward())
    assert "and write enabled=False in" in how


class Norm(nn.Module):
    """Computes in float32 and casts back by itself, as the norms of language models do."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * 2).type_as(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = Norm(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


def test_a_cast_of_the_models_own_is_not_called_autocasts(guard: Guard) -> None:
    model = Residual().half().eval()

    def body() -> None:
        with torch.no_grad():
            model(torch.full((2, 4), 3e4, dtype=torch.float16))

    first = guard(body).first
    assert (first.cause, first.op) == ("fp16-overflow", "aten.add.Tensor")
    assert "autocast" not in first.explanation
