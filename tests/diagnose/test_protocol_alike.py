"""Several optimizers that meet the same failure at one line of a loop are one failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Guard = Callable[..., Any]


def nets(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, 2) for _ in range(count)]


def bypass(count: int) -> None:
    models = nets(count)
    opts = {f"net{i}": torch.optim.SGD(model.parameters(), lr=1e-6) for i, model in enumerate(models)}
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            x = torch.randn(8, 4)
            loss = sum(model(x).float().pow(2).mean() for model in models)
        for opt in opts.values():
            opt.zero_grad()
        scaler.scale(loss).backward()
        for opt in opts.values():
            opt.step()


def test_two_optimizers_stepped_past_the_scaler_in_one_loop(guard: Guard) -> None:
    run = guard(lambda: bypass(2))

    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert run.first.evidence["optimizers"] == ["opts['net0']", "opts['net1']"]
    assert run.first.explanation.endswith("The same is true of `opts['net1']`.")
    assert run.first.occurrences == 6


def test_many_of_them_are_not_all_named(guard: Guard) -> None:
    run = guard(lambda: bypass(7))

    assert (run.faults, run.causes) == (0, ["bypassed-scaler"]), run.stderr
    assert run.first.explanation.endswith("`opts['net1']`, `opts['net2']`, `opts['net3']` and 3 more optimizers.")


def test_what_each_of_them_lost_is_named(guard: Guard) -> None:
    def body() -> None:
        models = nets(2)
        opts = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        whole = nn.ModuleDict({"left": nn.Linear(4, 2), "right": nn.Linear(4, 2)})  # made anew
        for _ in range(6):
            x = torch.randn(8, 4)
            for opt, model in zip(opts, whole.values(), strict=True):
                model.zero_grad()
                model(x).pow(2).mean().backward()
                opt.step()

    run = guard(body)

    (incident,) = [i for i in run.report.incidents if i.cause == "stale-parameters"]
    assert incident.evidence["optimizers"] == ["opts[0]", "opts[1]"], run.stderr
    assert "The same is true of `opts[1]` (" in incident.explanation
