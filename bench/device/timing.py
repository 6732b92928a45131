"""What watching costs on a CUDA device, early in a run and later: time between CUDA events, and peak memory of the device.

Each figure is that of three neighbouring blocks of steps in one process, plain, guarded and plain; the guard is on anew
in each block, so that the looks of a run's first steps are in it, which grow rarer the longer a run is.

Run `python bench/device/timing.py [SECONDS a workload] [WORKLOAD ...]` on a machine with a CUDA device.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "overhead"))
from rows import ROWS
from vit import ViT

BLOCKS = {
    "tiny": (72, 128),
    "large fp16": (12, 24),
    "large bf16": (12, 24),
    "tiny, later": (600, 400),
    "large fp16, later": (132, 120),
    "convolutions fp16": (40, 60),
}
"""Steps that are not timed, and those that are."""


def large(precision: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A ViT of 86 M parameters on 48 images of 224 x 224; with GradScaler, or in bfloat16 without."""
    torch.manual_seed(0)
    model = ViT(dim=768, depth=12, heads=12, patch=16, size=224).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, training(model, optimizer, torch.randn(48, 3, 224, 224, device="cuda"), precision)


def convolutions(precision: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """40 layers of convolution and BatchNorm, whose running statistics every step changes, on 64 images of 64 x 64."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(128 if i else 3, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU())
        for i in range(40)
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, training(model, optimizer, torch.randn(64, 3, 64, 64, device="cuda"), precision)


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, precision: str
) -> Callable[[], Tensor]:
    """A function that trains the model by one step."""
    labels = torch.randint(10, (len(images),), device="cuda")
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16", init_scale=1024.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16 if precision == "fp16" else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def made(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    kind, *precision = name.split(",")[0].split()
    if kind == "tiny":
        return importlib.import_module("tiny").make("cuda")  # type: ignore[no-any-return]
    return {"large": large, "convolutions": convolutions}[kind](*precision)


def block(row: str, model: nn.Module, step: Callable[[], Tensor], warm_up: int, steps: int) -> tuple[float, int]:
    """Milliseconds a step, and the peak of the device's memory."""
    with ROWS[row](model):
        for _ in range(warm_up):
            step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / steps, torch.cuda.max_memory_allocated()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    print("| workload | plain ms | plain (noise) | ampguard.watch | memory | triples |")
    print("|---|---|---|---|---|---|")
    for name, (warm_up, steps) in BLOCKS.items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        model, step = made(name)
        for _ in range(30):
            step()
        began, noise, watched, memory, plain = time.time(), [], [], [], []
        while time.time() - began < seconds or len(watched) < 2:
            first, peak = block("plain", model, step, warm_up, steps)
            guarded, guarded_peak = block("ampguard.watch", model, step, warm_up, steps)
            second, _ = block("plain", model, step, warm_up, steps)
            plain.append(first)
            noise.append(second / first)
            watched.append(2 * guarded / (first + second))
            memory.append(guarded_peak / peak)
        figures = [f"{statistics.median(v):.3f}x ({min(v):.3f} to {max(v):.3f})" for v in (noise, watched, memory)]
        print(f"| {name} | {statistics.median(plain):.1f} | {' | '.join(figures)} | {len(watched)} |", flush=True)


if __name__ == "__main__":
    main()
