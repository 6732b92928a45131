"""A check as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ampguard.check.facts import Check, Device, Finding, Measured, Precision

WIDTH = 100


def as_text(check: Check) -> str:
    """Versions, one table a device, then what goes wrong here."""
    lines = [", ".join(f"{name} {version}" for name, version in check.versions.items() if version), ""]
    for device in check.devices:
        lines += [*_table(device), ""]
    for finding in check.findings:
        lines += _told(finding)
    counts = {level: sum(f.level == level for f in check.findings) for level in ("error", "warning", "note")}
    told = ", ".join(f"{n} {level}{'s' if n > 1 else ''}" for level, n in counts.items() if n) or "nothing found"
    return "\n".join([*lines, f"checked in {check.seconds:.1f} s: {told}"])


def _table(device: Device) -> Iterator[str]:
    memory = f", {device.memory_gib} GiB" if device.memory_gib else ""
    yield f"{device.kind}: {device.name}{memory}"
    names = [m.op for m in device.precisions[0].operations]
    yield f"  {'':<15}" + "".join(f"{name:<24}" for name in names)
    for precision in device.precisions:
        cells = "".join(f"{_cell(m):<24}" for m in precision.operations)
        yield f"  {precision.dtype:<15}{cells}{_properties(precision)}".rstrip()


def _cell(measured: Measured) -> str:
    if measured.error is None:
        return "not there"
    ratio = measured.against_float32
    time = f", {ratio:.1f}x time" if ratio is not None and not 0.95 <= ratio <= 1.05 else ""
    label = "as storage" if measured.op == "storage" else measured.grade
    return f"{label} {measured.error:.0e}{time}"


def _properties(precision: Precision) -> str:
    facts = {
        "autocast": precision.autocast,
        "GradScaler": precision.scaler,
        "wide sums": precision.wide_sums,
        "subnormals": precision.keeps_subnormals,
    }
    return ", ".join(name if fact else f"no {name}" for name, fact in facts.items() if fact is not None)


def _told(finding: Finding) -> list[str]:
    head = f"{finding.level}[{finding.code}] "
    return [
        *textwrap.wrap(head + finding.what, WIDTH, subsequent_indent="    ", break_on_hyphens=False),
        *textwrap.wrap("  do: " + finding.do, WIDTH, subsequent_indent="    ", break_on_hyphens=False),
    ]
