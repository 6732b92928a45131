"""transformers.debug_utils.DebugUnderflowOverflow, attached to every root module that the script calls.

It raises at the first module whose weight, input or output holds NaN or Inf, after printing the last frames; the last
one names the module. No operator, no line.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any
from weakref import WeakSet

from bench.faults.baselines import host
from bench.faults.scoring import Claim
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow

FRAME = re.compile(r"^ {18}(\S*) (\w+)$", re.MULTILINE)
ALARM = "DebugUnderflowOverflow: inf/nan detected"


def last_module(printed: str) -> str | None:
    """The module that the last printed frame names: the one whose output was bad."""
    frames = FRAME.findall(printed)
    return frames[-1][0] if frames else None


def main() -> None:
    claim_path, command = Path(sys.argv[1]), sys.argv[2:]
    clock, attached = host.Clock(), WeakSet[nn.Module]()
    clock.install()
    claim = Claim(found=False)

    def attach(module: nn.Module) -> None:
        clock.root = module
        if module not in attached and not isinstance(module, nn.modules.loss._Loss):
            attached.add(module)
            DebugUnderflowOverflow(module)

    dump = DebugUnderflowOverflow.dump_saved_frames

    def heard(debug: Any) -> None:
        nonlocal claim
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            dump(debug)
        sys.stdout.write(printed.getvalue())
        name = last_module(printed.getvalue())
        if not claim.found:
            modules = () if name is None else (name,)
            claim = Claim(found=True, step=clock.step, mode=clock.mode, modules=modules, note=f"bad output of {name!r}")

    DebugUnderflowOverflow.dump_saved_frames = heard
    host.watch_roots(attach)
    try:
        host.run_script(command)
    except Exception as error:
        if ALARM not in str(error) and not claim.found:
            claim = Claim(
                found=False, note=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        raise
    finally:
        host.write_claim(claim_path, claim)


if __name__ == "__main__":
    main()
