"""Hooks on parameters that are frozen for a while: the generator's, while the discriminator learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def test_the_guard_stays_on(guard: Callable[..., Any]) -> None:
    def loop() -> None:
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
        opt_g, opt_d = torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for p in generator.parameters():
            p.register_hook(lambda gradient: gradient.nan_to_num())
        for _ in range(8):
            for optimizer, own, other in ((opt_d, critic, generator), (opt_g, generator, critic)):
                own.requires_grad_(True)
                other.requires_grad_(False)
                with torch.autocast("cpu", torch.float16):
                    loss = (critic(generator(torch.randn(8, 4))) - float(own is critic)).float().square().mean()
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()

    run = guard(loop)
    assert "a fault of its own" not in run.stderr
    assert run.report.steps == 8
    assert [i.cause for i in run.report.incidents if i.severity != "info"] == []
