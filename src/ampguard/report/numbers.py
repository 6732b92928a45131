"""Numbers as people read them."""

from __future__ import annotations

import math


def readable_number(value: object) -> str:
    """Five significant digits, whole numbers whole, NaN and infinity as in the texts; anything else as `str` has it.

    >>> [readable_number(x) for x in (65504.0, 0.1 + 0.2, 1e-8, 3.4028234663852886e38, float("-inf"), True)]
    ['65504', '0.3', '1e-08', '3.4028e+38', '-Inf', 'yes']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.5g}"
