"""The numeric self-test of a device: every operation in every precision against float64."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ampguard.check import operations
from ampguard.check.facts import Device, Grade, Measured, Precision

FLOAT8 = tuple(t for name in ("float8_e4m3fn", "float8_e5m2") if (t := getattr(torch, name, None)) is not None)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

GOOD_ROUNDINGS = 8.0
"""Errors up to so many roundings of the result are what a careful kernel makes (float32's own sums of 1024 terms: 3 to 6)."""
WRONG_ERROR = 0.1
"""A relative error that no precision here explains. (bfloat16 sums kept in bfloat16: 0.03; TF32 for float32: 0.0003.)"""
RUNS = 5


def available_devices() -> list[torch.device]:
    """The CPU and every accelerator that this PyTorch sees."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    for kind in ("mps", "xpu"):
        module = getattr(torch.backends, kind, None) or getattr(torch, kind, None)
        if module is not None and getattr(module, "is_available", lambda: False)():
            devices.append(torch.device(kind))
    return devices


def examine(device: torch.device, dtypes: Sequence[torch.dtype] = (*DTYPES, *FLOAT8)) -> Device:
    """Compute on `device` in every precision. Takes a second or so on a CPU core; frees what it allocated."""
    baseline: dict[str, float] = {}
    return Device(_name(device), str(device), _memory(device), tuple(_precision(device, t, baseline) for t in dtypes))


def _precision(device: torch.device, dtype: torch.dtype, baseline: dict[str, float]) -> Precision:
    facts = torch.finfo(dtype)
    subnormal = facts.smallest_normal * facts.eps
    short = str(dtype).removeprefix("torch.")
    if dtype in FLOAT8:
        return Precision(short, facts.max, facts.smallest_normal, subnormal, (_storage(device, dtype),))
    measured = tuple(_measure(name, device, dtype, baseline) for name in operations.OPERATIONS)
    is_low = dtype != torch.float32
    return Precision(
        short,
        facts.max,
        facts.smallest_normal,
        subnormal,
        measured,
        _answer(operations.sums_are_wide, device, dtype) if dtype == torch.float16 else None,
        _answer(operations.keeps_subnormals, device, dtype),
        _autocasts(device, dtype) if is_low else None,
        _answer(_scaler_works, device, dtype) if dtype == torch.float16 else None,
    )


def _measure(name: str, device: torch.device, dtype: torch.dtype, baseline: dict[str, float]) -> Measured:
    operation, operands = operations.OPERATIONS[name]
    exact = operands(torch.Generator().manual_seed(0))
    rounded = [t.to(dtype) for t in exact]
    try:
        given = [t.to(device) for t in rounded]
        with torch.no_grad():
            result = operation(given)
            seconds = _fastest(operation, given, device)
    except (RuntimeError, NotImplementedError, TypeError) as why:
        return Measured(name, "unsupported", why=str(why).splitlines()[0][:160])
    with torch.no_grad():
        truth = operation([t.double() for t in rounded])
    error = float((result.cpu().double() - truth).norm() / truth.norm())
    roundings = error / (torch.finfo(dtype).eps / 2)
    milliseconds = seconds * 1e3
    if dtype == torch.float32:
        baseline[name] = milliseconds
    ratio = milliseconds / baseline[name] if name in baseline else None
    return Measured(name, _grade(error, roundings), error, roundings, milliseconds, ratio)


def _grade(error: float, roundings: float) -> Grade:
    if roundings <= GOOD_ROUNDINGS:
        return "good"
    return "coarse" if error <= WRONG_ERROR else "wrong"  # NaN compares false: wrong


def _fastest(operation: operations.Operation, given: Sequence[Tensor], device: torch.device) -> float:
    """Seconds of the fastest of a few runs."""
    best = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        operation(given)
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _storage(device: torch.device, dtype: torch.dtype) -> Measured:
    """Float8 is a format to store in; products need scales, which are a library's business (torchao)."""
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    try:
        back = exact.to(device).to(dtype).float().cpu()
    except (RuntimeError, NotImplementedError, TypeError) as why:
        return Measured("storage", "unsupported", why=str(why).splitlines()[0][:160])
    error = float((back - exact).norm() / exact.norm())
    roundings = error / (torch.finfo(dtype).eps / 2)
    return Measured("storage", "good" if roundings < 1.5 else "wrong", error, roundings)


def _autocasts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matrix product under autocast really comes out in `dtype`: autocast turns itself off with a warning."""
    x = torch.ones(8, 8, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autocast(device.type, dtype=dtype):
                return (x @ x).dtype == dtype
    except RuntimeError:
        return False


def _scaler_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a scaler of this device divides gradients, and skips a step whose gradients are infinite."""
    weight = torch.ones(4, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    is_divided = bool((weight == 0).all())
    weight.grad = None
    (scaler.scale(weight.sum()) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    return is_divided and bool((weight == 0).all()) and scaler.get_scale() == 2.0


def _answer(question: object, device: torch.device, dtype: torch.dtype) -> bool | None:
    """True or False, or None where the device cannot even be asked."""
    assert callable(question)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(question(device, dtype))
    except (RuntimeError, NotImplementedError, TypeError, AssertionError):
        return None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (capability {major}.{minor})"
    if device.type == "cpu":
        return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    return device.type


def _memory(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return round(float(torch.cuda.get_device_properties(device).total_memory) / 2**30, 1)
