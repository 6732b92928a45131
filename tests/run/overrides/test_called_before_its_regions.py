"""A model that is called before the script opens its first autocast region: nothing tells yet that it has any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("has_regions", [True, False])
def test_what_was_gained_is_said(overridden: Callable[..., Any], has_regions: bool) -> None:
    made = []
    with overridden("bf16") as session:
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizer = torch.optim.SGD(critic.parameters(), 0.01)
        for _ in range(3):
            with torch.no_grad():
                fake = generator(torch.randn(8, 4))
            made.append(torch.equal(fake, fake.bfloat16().float()))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_regions):
                loss = critic(fake).float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    gained = "gained autocast around calls of the script's models" in session.report.run["did"]
    said = [text for text in session.report.run["could_not"] if "before the script's first autocast region" in text]
    assert made == ([True, False, False] if has_regions else [True, True, True])
    assert (gained, len(said)) == (not has_regions, int(has_regions))
