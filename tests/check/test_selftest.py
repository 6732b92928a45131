"""The numeric self-test must tell a right kernel from a wrong one, by numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ampguard.check import operations, selftest
from ampguard.check.examine import check_machine
from ampguard.check.facts import Device, Precision
from ampguard.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cpu() -> Device:
    return selftest.examine(CPU)


def precision(device: Device, dtype: str) -> Precision:
    return next(p for p in device.precisions if p.dtype == dtype)


def test_every_precision_is_measured(cpu: Device) -> None:
    float32 = precision(cpu, "float32")
    assert [m.op for m in float32.operations] == ["matmul", "convolution", "attention", "softmax"]
    assert all(m.grade == "good" and m.error is not None and m.error < 1e-6 for m in float32.operations)
    for name, half_spacing in (("float16", 2**-11), ("bfloat16", 2**-8)):
        low = precision(cpu, name)
        assert low.autocast is True
        for measured in low.operations:  # rounded at least once, and not many times
            assert measured.error is not None
            assert 0.2 * half_spacing < measured.error < 8 * half_spacing
    assert precision(cpu, "float16").scaler is True


def test_it_knows_what_a_dtype_holds(cpu: Device) -> None:
    half = precision(cpu, "float16")
    assert half.largest == 65504
    assert half.smallest == 2**-24
    assert half.smallest_normal == 2**-14


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        yield patch


def with_matmul(patch: pytest.MonkeyPatch, compute: object) -> None:
    patch.setitem(operations.OPERATIONS, "matmul", (compute, operations.OPERATIONS["matmul"][1]))


def sums_in_its_own_dtype(x: Sequence[Tensor]) -> Tensor:
    """A product whose partial sums are rounded to the operands' dtype, as a device without wide sums does it."""
    total = torch.zeros(x[0].shape[0], x[1].shape[1], dtype=x[0].dtype)
    for k in range(x[0].shape[1]):
        total = total + x[0][:, k : k + 1] * x[1][k : k + 1]
    return total


def test_narrow_sums_are_coarse(spoilt: pytest.MonkeyPatch) -> None:
    with_matmul(spoilt, sums_in_its_own_dtype)
    measured = precision(selftest.examine(CPU, [torch.bfloat16]), "bfloat16").operations[0]
    assert (measured.op, measured.grade) == ("matmul", "coarse")


@pytest.mark.parametrize("wrong", [lambda x: (x[0] @ x[1]).roll(1, 0), lambda x: (x[0] @ x[1]) * float("nan")])
def test_wrong_numbers_are_an_error(spoilt: pytest.MonkeyPatch, wrong: object) -> None:
    right = operations.OPERATIONS["matmul"][0]

    def only_low_is_wrong(x: Sequence[Tensor]) -> Tensor:
        assert callable(wrong)
        return wrong(x) if x[0].dtype == torch.bfloat16 else right(x)

    with_matmul(spoilt, only_low_is_wrong)
    check = check_machine(["cpu"])
    assert not check.is_sound
    assert check.findings[0].code == "wrong-numbers"
    assert "bfloat16 on cpu: matmul" in check.findings[0].what


def test_what_a_device_refuses_is_said(spoilt: pytest.MonkeyPatch) -> None:
    def refused(x: Sequence[Tensor]) -> Tensor:
        if x[0].dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")
        return x[0] @ x[1]

    with_matmul(spoilt, refused)
    check = check_machine(["cpu"])
    measured = precision(check.devices[0], "float16").operations[0]
    assert (measured.grade, measured.error) == ("unsupported", None)
    assert "not implemented" in str(measured.why)
    assert any(f.code == "not-supported" and "float16 on cpu: matmul" in f.what for f in check.findings)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"--device cuda:7: not on this machine, which has cpu"):
        check_machine(["cuda:7"])


def test_random_streams_stay_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check_machine(["cpu"])
    assert torch.equal(torch.rand(4), expected)
