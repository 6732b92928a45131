"""`--amp-opt-level` and `--disable-amp` for a script's own argparse parser, and what they ask for.

add_amp_arguments(parser)
args = parser.parse_args()
amp = amp_of(args)                      # ampguard.precision: autocast and scaler that belong together
amp.prepare(model, optimizer)           # O2 and O3; nothing in the others
loss_scaler = NativeScalerWithGradNormCount(precision=amp)
with amp.autocast(): ...
"""

from __future__ import annotations

import argparse

import torch

from ampguard.engine.own_loop import LoopPrecision, precision
from ampguard.errors import UsageError

LEVELS = ("O0", "O1", "O2", "O3", "bf16")

HELP = (
    "O0: float32. O1: float16 autocast. O2: float16 model, float32 master weights. O3: float16 throughout. "
    "bf16: bfloat16 autocast."
)


def add_amp_arguments(parser: argparse.ArgumentParser, default: str = "O1") -> None:
    """Add `--amp-opt-level {O0,O1,O2,O3,bf16}`, `--disable-amp` (also `--disable_amp`) and `--enable-amp`.

    Takes the place of options of these names that the parser has already: Swin's, whose O1 and O2 do nothing, and
    SimMIM's `--disable-amp`, which leaves the loss scale on. `default` holds where none of them is given.
    """
    if default not in LEVELS:
        raise UsageError(f"default={default!r}: the levels are {', '.join(LEVELS)}")
    group = parser.add_argument_group("mixed precision", conflict_handler="resolve")
    group.add_argument("--amp-opt-level", "--amp_opt_level", choices=LEVELS, default=None, help=HELP)
    group.add_argument("--disable-amp", "--disable_amp", dest="disable_amp", action="store_true", help="the same as O0")
    group.add_argument(
        "--enable-amp", "--enable_amp", dest="enable_amp", action="store_true", help="O1, where O0 is the default"
    )
    parser.set_defaults(amp_default=default, enable_amp=False, disable_amp=False)


def level_of(args: argparse.Namespace) -> str:
    """The level that the arguments ask for. Raises UsageError where they contradict each other."""
    level: str | None = getattr(args, "amp_opt_level", None)
    default: str = getattr(args, "amp_default", "O1")
    if getattr(args, "disable_amp", False):
        if level not in (None, "O0") or getattr(args, "enable_amp", False):
            other = f"--amp-opt-level {level}" if level not in (None, "O0") else "--enable-amp"
            raise UsageError(f"--disable-amp and {other} contradict each other: give one of them")
        return "O0"
    if level == "O0" and getattr(args, "enable_amp", False):
        raise UsageError("--enable-amp and --amp-opt-level O0 contradict each other: give one of them")
    if level is not None:
        return level
    if getattr(args, "enable_amp", False) and default == "O0":
        return "O1"
    return default


def amp_of(args: argparse.Namespace, device: str | torch.device | None = None) -> LoopPrecision:
    """Autocast and scaler for them: `autocast, scaler = amp_of(args)`, or kept whole for `prepare`."""
    return precision(level_of(args), device)
