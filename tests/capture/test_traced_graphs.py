"""While PyTorch traces a graph nothing has a value: what is differentiated there belongs to no step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ampguard import compat


def test_tracing_is_told_from_running() -> None:
    seen: list[bool] = []

    def noting(x: Tensor) -> Tensor:
        seen.append(compat.is_compiling())
        return x + 1

    noting(torch.ones(2))
    make_fx(noting)(torch.ones(2))
    noting(torch.ones(2))
    assert seen == [False, True, False]
