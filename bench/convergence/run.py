"""Where each precision ends: a ViT and a character model, the same seeds and batches under every mode of the engine.

The loss is that of held-out data, evaluated in float32, as a mean over the seeds; the difference from float32 is that
of the means. Writes results.md beside this file.

Run `python bench/convergence/run.py`, or with `--only PATTERN` for some of the modes, `--seeds N`, `--steps N`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from workloads import WORKLOADS, Workload

import ampguard

HERE = Path(__file__).parent
WARM_UP = 20
"""Steps that are not timed, and over which the learning rate rises."""

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {},
    "O2": {},
    "bf16": {},
    "bf16-true, stochastic rounding": {"rounding": "stochastic"},
    "bf16-true, Kahan": {"rounding": "kahan"},
    "bf16-true, rounded to nearest": {"rounding": "nearest"},
}


@dataclass(frozen=True)
class Outcome:
    """One run: the held-out loss, median CPU time of a step, bytes that training keeps for each parameter, skipped steps."""

    loss: float
    step_ms: float
    bytes_each: float
    skipped: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare where the precisions end.")
    parser.add_argument("--only", default="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ampguard").setLevel(logging.ERROR)
    lines = list(tables(options.only, options.seeds, options.steps))
    if options.only == "*" and options.steps is None:
        head = (
            f"# Convergence\n\nWritten by `bench/convergence/run.py`: {options.seeds} seeds, one thread, on a CPU.\n\n"
        )
        (HERE / "results.md").write_text(head + "".join(f"{line}\n" for line in lines))


def tables(only: str, seeds: int, steps: int | None) -> Iterator[str]:
    for name, make in WORKLOADS.items():
        work = make()
        rows = _table(work, only, seeds, steps or work.steps)
        yield from _shown(itertools.chain([f"## {name}", ""], rows, [""]))


def _table(work: Workload, only: str, seeds: int, steps: int) -> Iterator[str]:
    yield f"| {steps} steps | held-out loss | from float32 | spread over seeds | CPU ms a step | bytes a parameter | skipped |"
    yield "|---|---|---|---|---|---|---|"
    base = math.nan
    for mode, options in MODES.items():
        if not fnmatch(mode, only) and mode != "fp32":
            continue
        runs = [run(work, mode.partition(",")[0], options, seed, steps) for seed in range(seeds)]
        loss = statistics.mean(r.loss for r in runs)
        base = loss if mode == "fp32" else base
        spread = statistics.pstdev([r.loss for r in runs])
        step_ms = statistics.median(r.step_ms for r in runs)
        skipped = sum(r.skipped for r in runs)
        yield (
            f"| {mode} | {loss:.4f} | {loss / base - 1:+.2%} | {spread:.4f} | {step_ms:.1f} | {runs[0].bytes_each:.1f} "
            f"| {skipped} |"
        )


def run(work: Workload, precision: str, options: dict[str, Any], seed: int, steps: int) -> Outcome:
    torch.manual_seed(seed)
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    amp = ampguard.Amp(
        model, optimizer, precision, max_grad_norm=1.0, eval_precision="fp32", schedulers=scheduler, **options
    )
    generator = torch.Generator().manual_seed(seed)
    times = []
    kept = 0
    for _ in range(steps):
        x, y = work.batch(generator)
        begin = time.process_time()
        with amp.autocast():
            loss = work.loss(model(x), y)
        amp.backward(loss)
        kept = kept or sum(t.nbytes for t in gradients(model, optimizer))
        amp.step()
        times.append(time.process_time() - begin)
    count = sum(p.numel() for p in model.parameters())
    kept += sum(t.nbytes for t in kept_tensors(model, optimizer))
    return Outcome(
        held_out_loss(work, amp, model), 1e3 * statistics.median(times[WARM_UP:]), kept / count, steps - amp.steps
    )


@torch.no_grad()
def held_out_loss(work: Workload, amp: ampguard.Amp, model: nn.Module) -> float:
    model.eval()
    x, y = work.held_out
    with amp.autocast():
        return float(work.loss(model(x), y))


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for p in _parameters(model, optimizer) if p.grad is not None]


def kept_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights, master weights and optimizer state."""
    state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, Tensor)]
    return [*_parameters(model, optimizer), *state]


def _parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in (*model.parameters(), *held)}.values())


def _rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine to zero: the last updates are the small ones."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1)))


def _shown(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        print(line, flush=True)
        yield line


if __name__ == "__main__":
    main()
