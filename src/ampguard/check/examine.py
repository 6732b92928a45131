"""The whole check of a machine."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterator, Sequence

import torch

from ampguard._version import __version__
from ampguard.check import selftest
from ampguard.check.combinations import combinations
from ampguard.check.facts import Check, Device, Finding, Precision
from ampguard.errors import UsageError

PACKAGES = ("torch", "numpy", "lightning", "transformers", "accelerate", "timm", "torchao")
SLOWER_THAN_FLOAT32 = 1.5
"""Times float32's, in a matrix product, from which on a low precision is called slow."""


def check_machine(names: Sequence[str] = ()) -> Check:
    """Versions, devices and what goes wrong. `names` picks devices ("cpu", "cuda:1"); none means all that there are.

    Raises UsageError for a device that is not there. Some seconds on a slow CPU.
    """
    started = time.perf_counter()
    devices = tuple(selftest.examine(device) for device in _chosen(names))
    findings = [f for device in devices for f in _findings_of(device)] + combinations()
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda finding: order[finding.level])
    return Check(_versions(), devices, tuple(findings), round(time.perf_counter() - started, 2))


def _chosen(names: Sequence[str]) -> list[torch.device]:
    there = selftest.available_devices()
    chosen = [device for device in there if not names or str(device) in names or device.type in names]
    unknown = [name for name in names if all(name not in (str(d), d.type) for d in there)]
    if unknown:
        raise UsageError(f"--device {unknown[0]}: not on this machine, which has {', '.join(map(str, there))}")
    return chosen


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"ampguard": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["cuda"] = torch.version.cuda
    return versions


def _findings_of(device: Device) -> Iterator[Finding]:
    for precision in device.precisions:
        yield from _wrong_or_missing(device, precision)
        yield from _slow_or_coarse(device, precision)


def _wrong_or_missing(device: Device, precision: Precision) -> Iterator[Finding]:
    where = f"{precision.dtype} on {device.kind}"
    wrong = [m.op for m in precision.operations if m.grade == "wrong"]
    missing = [m.op for m in precision.operations if m.grade == "unsupported"]
    if wrong:
        yield Finding(
            "error", "wrong-numbers", f"{where}: {', '.join(wrong)} gives wrong numbers.", "do not train in it."
        )
    if missing:
        yield Finding(
            "warning",
            "not-supported",
            f"{where}: {', '.join(missing)} does not exist.",
            "another precision, or autocast.",
        )
    if precision.autocast is False:
        yield Finding("warning", "no-autocast", f"{where}: autocast does not compute in it.", "use another precision.")
    if precision.scaler is False:
        yield Finding(
            "warning", "no-scaler", f"{where}: GradScaler('{device.kind}') does not scale or skip.", "use bfloat16."
        )


def _slow_or_coarse(device: Device, precision: Precision) -> Iterator[Finding]:
    where = f"{precision.dtype} on {device.kind}"
    coarse = [m for m in precision.operations if m.grade == "coarse"]
    if coarse:
        worst = max(coarse, key=lambda m: m.roundings or 0.0)
        tf32 = " (TF32 is on)" if precision.dtype == "float32" else " (sums are kept in low precision)"
        yield Finding(
            "note",
            "coarse",
            f"{where}: {', '.join(m.op for m in coarse)} is coarse{tf32}: {worst.roundings:.0f} roundings.",
            "compare losses with float32 before trusting a small difference.",
        )
    if precision.wide_sums is False:
        yield Finding(
            "warning",
            "narrow-sums",
            f"{where}: sums inside a product overflow at {precision.largest:g}.",
            "use bfloat16.",
        )
    products = next((m for m in precision.operations if m.op == "matmul"), None)
    if products is not None and (products.against_float32 or 0) > SLOWER_THAN_FLOAT32:
        yield Finding(
            "note",
            "slow",
            f"{where}: a matrix product takes {products.against_float32:.1f} times float32's time.",
            "use it to save memory or to look for failures, not for speed.",
        )
