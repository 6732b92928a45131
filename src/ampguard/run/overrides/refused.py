"""Modules that a device does not compute under autocast: an LSTM in float16 on a CPU, say. Each is tried, none is listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import nn

from ampguard import compat
from ampguard.numerics import dtype_name
from ampguard.run.overrides.regions import Regions

Recurrent: TypeAlias = type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]
RECURRENT: tuple[Recurrent, ...] = (nn.LSTM, nn.GRU, nn.RNN)


def refuses(kind: Recurrent, device: str, dtype: torch.dtype, regions: Regions) -> bool:
    """Whether a small module of this kind raises under autocast in `dtype`. Leaves random streams as they were.

    It is tried with gradients and without: a processor may have an LSTM in float16 for one of them only.
    """
    state = torch.get_rng_state()
    try:
        for has_grad in (True, False):
            with compat.unseen(), torch.set_grad_enabled(has_grad), regions.around(regions.make(device, dtype)):
                kind(2, 2).to(device).forward(torch.zeros(1, 1, 2, device=device))
    except RuntimeError:
        return True
    finally:
        torch.set_rng_state(state)
    return False


def refused(
    modules: Mapping[str, nn.Module], dtype: torch.dtype, regions: Regions
) -> Iterator[tuple[str, nn.Module, str]]:
    """Those of the named modules that would end the script, each with its name and why."""
    tried: dict[tuple[Recurrent, str], bool] = {}
    for name, module in modules.items():
        kind = next((kind for kind in RECURRENT if isinstance(module, kind)), None)
        parameter = next(iter(compat.all_parameters(module)), None)
        if kind is None or parameter is None or parameter.dtype != torch.float32:
            continue
        device = parameter.device.type
        if (kind, device) not in tried:
            is_possible = torch.amp.is_autocast_available(device)
            tried[kind, device] = is_possible and refuses(kind, device, dtype, regions)
        if tried[kind, device]:
            what = f"nn.{kind.__name__} raises under {dtype_name(dtype)} autocast on {device}"
            yield name, module, f"{name or kind.__name__} in float32: {what}"
