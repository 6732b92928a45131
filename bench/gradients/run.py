"""Do the gradients that reach the weights have the right size? Each system's own code, against float64.

Linear classifiers on scikit-learn's digits, plain SGD: what a step adds to the weights is the gradient that was used.
Every step is compared with the float64 gradient at the weights that it began with (clipped and accumulated in
float64). Prints the tables and writes results.md beside this file; exit status 1 if one of ampguard's is not right.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from lightning_systems import GuardedLightning, Lightning
from systems import Accelerate, Amp, ByHand, GuardedAccelerate, GuardedTimm, NoSuchLoopError, System, Timm

from scenarios import BATCHES, SCENARIOS, Scenario

HERE = Path(__file__).parent
OTHERS: tuple[type[System], ...] = (ByHand, Lightning, Accelerate, Timm)
OURS: tuple[type[System], ...] = (Amp, GuardedLightning, GuardedAccelerate, GuardedTimm)
NEEDS = {"Lightning": "lightning", "Accelerate": "accelerate", "timm NativeScaler": "timm"}
MISSING = "(not installed)"
PACKAGES = ("torch", "lightning", "accelerate", "timm")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the gradients that reach the weights with float64.")
    parser.add_argument("--only", default="", help="part of a scenario's title; writes no file")
    args = parser.parse_args()
    logging.getLogger("ampguard").setLevel(logging.CRITICAL)
    chosen = [scenario for scenario in SCENARIOS if args.only in scenario.title]
    text = heading()
    print(text, end="")
    is_right = True
    for systems in (OTHERS, OURS):
        lines, all_right = table(systems, chosen)
        text += "\n".join(["", *lines, ""])
        print("\n".join(["", *lines]), flush=True)
        is_right &= all_right or systems is OTHERS
    if not args.only:
        (HERE / "results.md").write_text(text)
    return 0 if is_right else 1


def table(systems: tuple[type[System], ...], scenarios: list[Scenario]) -> tuple[list[str], bool]:
    """A row for each scenario, and whether every cell is right."""
    lines = ["| | " + " | ".join(system.name for system in systems) + " |", "|---|" + "---|" * len(systems)]
    is_right = True
    for scenario in scenarios:
        cells = [cell(system, scenario) for system in systems]
        is_right &= all(words in ("right", "-") for words in cells)
        lines.append(f"| {scenario.title} | " + " | ".join(cells) + " |")
    return lines, is_right


def cell(system: type[System], scenario: Scenario) -> str:
    needed = NEEDS.get(system.name)
    if needed is not None and _version(needed) == MISSING:
        return "not installed"
    try:
        return system(scenario).run().verdict()
    except NoSuchLoopError:
        return "-"
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        return f"**{type(error).__name__}**: {first[:70]}"


def heading() -> str:
    return (
        "# The gradients that reach the weights\n\n"
        f"{', '.join(f'{name} {_version(name)}' for name in PACKAGES)}, Python {platform.python_version()}; real float16 "
        f"on the CPU, loss scale 65536, {BATCHES} batches. Written by `bench/gradients/run.py`.\n\n"
        "`right`: every update is within 1 % of the float64 one, and a step that overflowed changed nothing. "
        "`x times`: the update that was furthest off was so many times as long as the true one. `-`: the system has no "
        "such loop.\n"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return MISSING


if __name__ == "__main__":
    sys.exit(main())
