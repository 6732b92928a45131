"""Spectra: a chain of bad values goes through `.real`, `.imag` and back, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

from ampguard.numerics import NAN, POS_INF
from ampguard.replay.trace import bad_elements

Guard = Callable[..., Watched]


def by_parts(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    power = spectrum.real.pow(2) + spectrum.imag.pow(2)
    return power.sqrt()


def by_angle(x: Tensor) -> Tensor:
    parts = torch.view_as_real(torch.fft.rfft(x))
    return parts.square().sum(-1).sqrt()


@pytest.mark.parametrize("magnitude", [by_parts, by_angle])
def test_root_of_a_spectrum_at_silence(guard: Guard, magnitude: Callable[[Tensor], Tensor]) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False))
        for step in range(3):
            x = torch.randn(4, 16)
            if step == 2:
                x[1] = 0
            out = net(x)
            loss = (magnitude(out) - magnitude(x)).abs().mean() + (out - x).square().mean()
            loss.backward()

    run = guard(body)

    assert run.faults == 0, run.stderr
    assert (run.first.step, run.first.cause, run.first.phase) == (2, "singular-gradient", "backward")
    assert run.first.location is not None
    assert "sqrt" in run.first.location.code
    assert run.first.fixes[0].verified


def test_complex_numbers_have_no_bound(guard: Guard) -> None:
    """The square root of a complex 0: an epsilon is what helps, and `clamp` does not take complex numbers."""

    def body() -> None:
        parts = nn.Linear(3, 4, bias=False)(torch.zeros(2, 3))
        number = torch.complex(parts[:, :2], parts[:, 2:])
        number.sqrt().real.sum().backward()

    run = guard(body)

    assert run.faults == 0, run.stderr
    assert run.first.cause == "singular-gradient"
    assert [(fix.action, fix.verified) for fix in run.first.fixes] == [("add-epsilon", True)]


def test_real_part_that_is_bad_before_it_becomes_complex(guard: Guard) -> None:
    class Polar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            size, angle = self.layer(x).chunk(2, -1)
            size = size.sub(size).log()
            return torch.view_as_real(torch.complex(angle, size)).square().mean()

    run = guard(lambda: Polar()(torch.ones(2, 4)).backward())

    assert (run.first.cause, run.first.op) == ("domain-error", "aten.log.default")


def test_parts_of_a_complex_number_are_places_of_their_own() -> None:
    z = torch.zeros(3, dtype=torch.complex64)
    z[1] = complex(0.0, math.inf)
    z[2] = complex(math.nan, math.inf)
    bad = bad_elements(z)
    imaginary = bad_elements(z.imag)

    assert bad is not None
    assert imaginary is not None
    assert bad.flat.tolist() == [1, 2, 2]
    assert bad.kinds.tolist() == [POS_INF, NAN, POS_INF]
    assert bad.offsets.tolist() == [3, 4, 5]
    assert imaginary.offsets.tolist() == [3, 5]
    assert bad.position_of(5) == 2
