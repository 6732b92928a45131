"""The precision modes by name: one file each, over a base class that is harmless float32."""

from __future__ import annotations

import difflib

from ampguard.engine.precision.base import Precision
from ampguard.engine.precision.bf16 import Bf16
from ampguard.engine.precision.bf16_true import Bf16True
from ampguard.engine.precision.float8 import Float8
from ampguard.engine.precision.fp16 import Fp16
from ampguard.engine.precision.o2 import O2
from ampguard.engine.precision.o3 import O3
from ampguard.engine.precision.tf32 import Tf32
from ampguard.errors import PrecisionError
from ampguard.precisions import ALIASES, usual_name

MODES: dict[str, type[Precision]] = {m.name: m for m in (Precision, Fp16, O2, O3, Bf16, Bf16True, Tf32, Float8)}


def mode_named(name: str, option: str = "precision") -> type[Precision]:
    """The mode of a name or an alias. Raises PrecisionError with the option that it was given to, and the nearest names.

    >>> mode_named("O1").name, mode_named("16-mixed").name, mode_named("bf16-true").name
    ('fp16', 'fp16', 'bf16-true')
    """
    known = MODES.get(str(name)) or MODES.get(usual_name(str(name)))
    if known is not None and name is not None:
        return known
    near = difflib.get_close_matches(str(name).lower(), [*MODES, *ALIASES], 3, 0.5) if name is not None else []
    meant = f"; nearest: {', '.join(map(repr, near))}" if near else ""
    raise PrecisionError(
        f"unknown {option} {name!r}{meant}\n"
        "  do    use one of fp32 (O0), tf32, fp16 (O1), O2, O3, bf16, bf16-true, float8"
    )
