"""torch.autograd.detect_anomaly, switched on for the whole script.

It checks gradients for NaN (never for Inf, never a forward pass), raises with the backward function's name, and prints
the traceback of the forward call. Its answer names an operator and a line; never a module.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from bench.faults.baselines import host
from bench.faults.scoring import Claim

RAISED = re.compile(r"Function '(\w+)' returned nan values")
FRAME = re.compile(r'File "(.+?)", line (\d+), in (.+)')


class Listener:
    """Reads what anomaly mode prints (a Python warning) just before it raises."""

    def __init__(self) -> None:
        self.forward: tuple[str, str] | None = None

    def install(self) -> None:
        import warnings

        shown = warnings.showwarning

        def listen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            text = str(message)
            if "Traceback of forward call" in text:
                self.forward = innermost_line(text)
            shown(message, *args, **kwargs)  # type: ignore[arg-type]

        warnings.showwarning = listen


def innermost_line(text: str) -> tuple[str, str] | None:
    """(file, code) of the innermost frame in a printed traceback that is the user's or a library's, not PyTorch's."""
    frames = [(file, int(line)) for file, line, _ in FRAME.findall(text) if not host.is_pytorch(file)]
    return (frames[-1][0], host.code_at(*frames[-1])) if frames else None


def main() -> None:
    claim_path, command = Path(sys.argv[1]), sys.argv[2:]
    clock, listener = host.Clock(), Listener()
    clock.install()
    listener.install()
    switch = torch.autograd.set_detect_anomaly
    switch(True)
    # Lightning's Trainer switches it off unless told otherwise; its user would have told it.
    torch.autograd.set_detect_anomaly = lambda mode, check_nan=True: switch(True, check_nan)
    claim = Claim(found=False)
    backward = torch.autograd.backward

    def listened(*args: Any, **kwargs: Any) -> Any:
        """A script may swallow the exception: note it where it is raised."""
        nonlocal claim
        try:
            return backward(*args, **kwargs)
        except RuntimeError as error:
            if (match := RAISED.search(str(error))) and not claim.found:
                file, code = listener.forward or (None, None)
                claim = Claim(
                    found=True,
                    step=clock.step,
                    mode="train",
                    ops=(match[1],),
                    file=file,
                    code=code,
                    note=str(error).splitlines()[0],
                )
            raise

    torch.autograd.backward = listened
    try:
        host.run_script(command)
    finally:
        host.write_claim(claim_path, claim)


if __name__ == "__main__":
    main()
