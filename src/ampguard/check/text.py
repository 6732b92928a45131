"""A check as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ampguard.check.facts import Check, Device, Finding, Measured, Precision

WIDTH = 100


def as_text(check: Check, columns: int | None = None) -> str:
    """Versions, one table a device, then what goes wrong here. `columns`: of the terminal; None: it goes to a file."""
    width = min(WIDTH, columns or WIDTH)
    versions = ", ".join(f"{name} {version}" for name, version in check.versions.items() if version)
    lines = [*textwrap.wrap(versions, columns or len(versions), break_on_hyphens=False), ""]
    for device in check.devices:
        table = list(_table(device))
        is_too_wide = columns is not None and max(map(len, table)) > columns
        lines += [*(_listed(device, width) if is_too_wide else table), ""]
    for finding in check.findings:
        lines += _told(finding, width)
    counts = {level: sum(f.level == level for f in check.findings) for level in ("error", "warning", "note")}
    told = ", ".join(f"{n} {level}{'s' if n > 1 else ''}" for level, n in counts.items() if n) or "nothing found"
    return "\n".join([*lines, f"checked in {check.seconds:.1f} s: {told}"])


def _table(device: Device) -> Iterator[str]:
    yield _named(device)
    names = [m.op for m in device.precisions[0].operations]
    yield (f"  {'':<15}" + "".join(f"{name:<24}" for name in names)).rstrip()
    for precision in device.precisions:
        cells = "".join(f"{_cell(m):<24}" for m in precision.operations)
        yield f"  {precision.dtype:<15}{cells}{_properties(precision)}".rstrip()


def _listed(device: Device, width: int) -> Iterator[str]:
    """The same where the table is wider than the terminal."""
    yield _named(device)
    for precision in device.precisions:
        told = "; ".join(m.op.replace("storage", "") + f" {_cell(m)}" for m in precision.operations)
        properties = _properties(precision)
        text = f"{precision.dtype:<15}{told.strip()}" + (f"; {properties}" if properties else "")
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=" " * 17, break_on_hyphens=False)


def _named(device: Device) -> str:
    memory = f", {device.memory_gib} GiB" if device.memory_gib else ""
    return f"{device.kind}: {device.name}{memory}"


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


def _told(finding: Finding, width: int) -> list[str]:
    head = f"{finding.level}[{finding.code}] "
    return [
        *textwrap.wrap(head + finding.what, width, subsequent_indent="    ", break_on_hyphens=False),
        *textwrap.wrap("  do: " + finding.do, width, subsequent_indent="    ", break_on_hyphens=False),
    ]
