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

MODES: dict[str, type[Precision]] = {m.name: m for m in (Precision, Fp16, O2, O3, Bf16, Bf16True, Tf32, Float8)}

ALIASES = {
    "o0": "fp32", "32": "fp32", "32-true": "fp32", "float32": "fp32", "no": "fp32", "none": "fp32",
    "o1": "fp16", "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16",
    "o2": "O2", "o3": "O3", "16-true": "O3", "fp16-true": "O3",
    "bfloat16": "bf16", "bf16-mixed": "bf16", "bfloat16-true": "bf16-true", "fp8": "float8",
}  # fmt: skip
"""What else these modes are called, in lower case."""


def mode_named(name: str, option: str = "precision") -> type[Precision]:
    """The mode of a name or an alias. Raises PrecisionError with the option that it was given to, and the nearest names.

    >>> mode_named("O1").name, mode_named("16-mixed").name, mode_named("bf16-true").name
    ('fp16', 'fp16', 'bf16-true')
    """
    lower = str(name).lower()
    known = MODES.get(str(name)) or MODES.get(ALIASES.get(lower, lower))
    if known is not None and name is not None:
        return known
    near = difflib.get_close_matches(lower, [*MODES, *ALIASES], 3, 0.5) if name is not None else []
    meant = f"; nearest: {', '.join(map(repr, near))}" if near else ""
    raise PrecisionError(
        f"unknown {option} {name!r}{meant}\n"
        "  do    use one of fp32 (O0), tf32, fp16 (O1), O2, O3, bf16, bf16-true, float8"
    )
