"""Gradients that are watched for a script that cleans them belong to the thread whose optimizer uses them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from ampguard.capture.cleaned import CleanedGradients


class Asked(nn.Parameter):
    """A parameter that notes which threads ask for its gradient."""

    by: set[int]

    @property
    def grad(self) -> Tensor:  # type: ignore[override]
        self.by.add(threading.get_ident())
        return torch.ones(2)


def test_gradients_of_another_threads_optimizer_are_left_alone() -> None:
    """Autograd writes to `.grad` without the interpreter's lock: reading it meanwhile ended the process."""
    parameter = Asked(torch.zeros(2))
    parameter.by = set()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    cleaned = CleanedGradients()
    other = threading.Thread(target=cleaned.are_used, args=(optimizer, False, list))
    other.start()
    other.join()
    assert len(parameter.by) == 1
    parameter.by.clear()

    cleaned.differentiated([])
    assert not parameter.by

    cleaned.are_used(optimizer, False, list)  # from here on it is this thread's
    cleaned.differentiated([])
    assert parameter.by == {threading.get_ident()}
