"""A line of running code as a report names it."""

from __future__ import annotations

import sys

from ampguard.capture.record import Line


class Attention:
    def forward(self) -> Line:
        frame = sys._getframe()
        return Line(frame.f_code, frame.f_lineno)


def test_a_location_has_the_bare_name_of_its_function_and_the_class_beside_it() -> None:
    location = Attention().forward().location()
    assert (location.function, location.code) == ("forward", "return Line(frame.f_code, frame.f_lineno)")
    assert location.qualname == ("Attention.forward" if sys.version_info >= (3, 11) else "forward")


def test_functions_around_a_function_are_named_without_their_locals() -> None:
    def step() -> Line:
        frame = sys._getframe()
        return Line(frame.f_code, frame.f_lineno)

    location = step().location()
    assert location.function == "step"
    if sys.version_info >= (3, 11):
        assert location.qualname == f"{sys._getframe().f_code.co_name}.step"
