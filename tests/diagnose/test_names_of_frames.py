"""Names in a script's frames are looked through for an optimizer's; what they say when they are looked at stays unsaid."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ampguard.capture.protocol.script_objects import attributes_of
from ampguard.diagnose.protocol import owners


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


class Estimator:
    """As scikit-learn's estimators are: it trains with an optimizer of its own, and is no optimizer."""

    def __init__(self) -> None:
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    def name_seen_from_fit(self) -> str | None:
        return owners.variable_name(self._optimizer)


def test_what_holds_an_optimizer_is_not_called_one() -> None:
    m = Estimator()
    assert m.name_seen_from_fit() == "self._optimizer"
