"""Names in a script's frames are looked through for an optimizer's; what they say when they are looked at stays unsaid."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ampguard.diagnose.protocol.owners import attributes_of


class Deprecated:
    """As `torch.distributed.reduce_op` is."""

    def __init__(self) -> None:
        self.inside = 1

    def __getattribute__(self, name: str) -> Any:
        warnings.warn("do not look", FutureWarning, stacklevel=2)
        return object.__getattribute__(self, name)


def test_looking_inside_is_silent() -> None:
    assert attributes_of(Deprecated()) == {"inside": 1}
    assert attributes_of(torch.distributed.reduce_op)
    assert attributes_of(3) is None
