"""What a check found: plain values that can be printed or written as JSON, without torch."""

from __future__ import annotations

from typing import Literal

import msgspec

Grade = Literal["good", "coarse", "wrong", "unsupported"]
Level = Literal["error", "warning", "note"]

SCHEMA = "ampguard.check/1"


class Measured(msgspec.Struct, frozen=True):
    """One operation in one precision, compared with float64 on the same (rounded) operands.

    `error`: ||y - y64|| / ||y64||; `roundings`: the same in units of half the dtype's spacing, so that 1 is "the result was
    rounded once". `milliseconds`: of one run, and `against_float32` how many times float32's.
    """

    op: str
    grade: Grade
    error: float | None = None
    roundings: float | None = None
    milliseconds: float | None = None
    against_float32: float | None = None
    why: str | None = None


class Precision(msgspec.Struct, frozen=True):
    """One dtype on one device. `autocast` is None where autocast does not apply to the dtype (float32, float8)."""

    dtype: str
    largest: float
    smallest_normal: float
    smallest: float
    operations: tuple[Measured, ...]
    wide_sums: bool | None = None
    """Whether sums inside a matrix product may pass the dtype's largest number."""
    keeps_subnormals: bool | None = None
    autocast: bool | None = None
    scaler: bool | None = None
    """Whether a GradScaler of this device scales, unscales and skips."""


class Device(msgspec.Struct, frozen=True):
    """One device, and what it computes in each precision."""

    name: str
    kind: str
    memory_gib: float | None
    precisions: tuple[Precision, ...]


class Finding(msgspec.Struct, frozen=True):
    """Something that goes wrong here, or may: what was seen, and what to do."""

    level: Level
    code: str
    what: str
    do: str


class Check(msgspec.Struct, frozen=True):
    """The whole answer of `ampguard check`."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    findings: tuple[Finding, ...]
    seconds: float
    schema: str = SCHEMA

    @property
    def is_sound(self) -> bool:
        """Whether no device gives wrong numbers."""
        return all(finding.level != "error" for finding in self.findings)


def to_json(check: Check) -> bytes:
    """The check as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(check), indent=2)
