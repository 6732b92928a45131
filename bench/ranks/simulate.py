"""What the guard costs on many ranks: local work measured here, the rest counted and simulated.

    python bench/ranks/simulate.py

The guard sends nothing between ranks. What grows with their number are files: notes for the comparison of weights, and
the reports at the end. Notes are made by the code that makes them in a run, and weighed. The end of a run is simulated
event by event, by the rules of `ampguard.report.store`: whoever gets the lock merges all reports that are there, the
others look again after a pause that doubles up to a second, and leave after ten.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import math
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ampguard.capture.ranks.checksums import digest_of
from ampguard.numerics import bit_sum
from ampguard.report.store import MERGE_ROUNDS, MERGE_WITHIN_S
from ampguard.run.ranks import COURSE, is_due
from ampguard.run.ranks_exchange import Check, Exchange, Sums

RANKS = (8, 64, 1024, 16384)
ENDS_WITHIN_S = 2.0
"""The ranks of a run end within this time of each other."""


@dataclass(frozen=True)
class Disk:
    """Seconds for one small file: to read it, to write it durably, to take and leave a lock."""

    name: str
    read: float
    write: float
    lock: float


DISKS = (Disk("one machine's disk", 60e-6, 1e-3, 0.2e-3), Disk("shared file system", 1e-3, 10e-3, 3e-3))


@dataclass
class End:
    """What the end of a run came to."""

    merges: int = 0
    reads: int = 0
    complete_after: float = 0.0
    longest_stay: float = 0.0
    left_early: int = 0


def end_of_run(ranks: int, disk: Disk, seed: int = 0) -> End:
    """Simulate how the reports of all ranks become one."""
    rng = random.Random(seed)
    written = sorted(rng.uniform(0.0, ENDS_WITHIN_S) + disk.write for _ in range(ranks))
    looks = [(when, when, 0.02) for when in written]
    heapq.heapify(looks)
    end, held_until, began_last, begins = End(), -1.0, -1.0, []
    while looks:
        now, came, pause = heapq.heappop(looks)
        while begins and begins[0][1] <= now:  # merges that are complete by now
            began_last = begins.pop(0)[0]
        if came < began_last:
            end.longest_stay = max(end.longest_stay, now - came)
        elif now >= held_until:
            begins, held_until = merging(written, now, disk, end)
            end.longest_stay = max(end.longest_stay, held_until - came)
        elif now - came > MERGE_WITHIN_S:
            end.left_early += 1
            end.longest_stay = max(end.longest_stay, now - came)
        else:
            heapq.heappush(looks, (now + pause * rng.uniform(0.5, 1.0), came, min(1.0, 2 * pause)))
    return end


def merging(written: list[float], now: float, disk: Disk, end: End) -> tuple[list[tuple[float, float]], float]:
    """One rank merges, again while more has come: when each round began and ended, and when the lock is free again."""
    rounds: list[tuple[float, float]] = []
    now += disk.lock
    for _ in range(MERGE_ROUNDS):
        present = came_by(written, now)
        if rounds and present == came_by(written, rounds[-1][0]):
            break
        after = now + present * disk.read + 2 * disk.write
        end.merges, end.reads, end.complete_after = end.merges + 1, end.reads + present, after
        rounds.append((now, after))
        now = after
    return rounds, now


def came_by(times: list[float], now: float) -> int:
    """How many of some sorted times have come."""
    return bisect.bisect_right(times, now)


def measured(parameters: int, tensors: int) -> tuple[float, int, int]:
    """Seconds to sum up the bits of a model on one thread here; bytes of a note, and of the sums beside it."""
    torch.set_num_threads(1)
    model = [torch.randn(parameters // tensors) for _ in range(tensors)]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        sums = [int(bit_sum(p)) % 2**64 for p in model]
        seconds.append(time.perf_counter() - began)
    names = [f"layers.{i // 8}.attention.projection_{i % 8}.weight" for i in range(tensors)]
    with tempfile.TemporaryDirectory() as folder:
        exchange = Exchange(Path(folder), 0, 0)
        exchange.write(
            Check(100_000, digest_of(sums), [(99_000 + i, 65536.0, False) for i in range(COURSE)]), Sums(names, sums)
        )
        sizes = {file.suffix: file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()}
    return min(seconds), sizes[".json"], sizes[".sums"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    steps = 10_000
    checks = sum(map(is_due, range(steps)))
    seconds, note, sums = measured(100_000_000, 400)
    print(f"Comparing weights: {checks} times in {steps} steps. 100 M parameters in 400 tensors, one thread here:")
    print(
        f"  summing up their bits {seconds * 1e3:.0f} ms a comparison, {seconds * checks / steps * 1e3:.2f} ms a step"
    )
    print(f"  written by the first rank {note + sums:,} bytes, read by every other {note:,} bytes a comparison\n")
    head = (
        "ranks",
        "sent by the guard, bytes a step",
        "read by all ranks, bytes a step",
        "engine, FSDP2: one all-reduce, us",
    )
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for ranks in RANKS:
        read = (ranks - 1) * note * checks / steps
        print(f"| {ranks:,} | 0 | {read:,.0f} | {2 * math.ceil(math.log2(ranks)) * 10} |")
    print("\n(the all-reduce of 4 bytes on paper: a tree up and down, 10 us a hop)\n")
    head = (
        "ranks",
        "disk",
        "files",
        "signed in, s",
        "merges",
        "files read",
        "complete, s",
        "longest stay, s",
        "left early",
    )
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for ranks in RANKS:
        for disk in DISKS:
            end = end_of_run(ranks, disk)
            sign_in = ranks * (disk.lock + disk.read + disk.write)
            row = (f"{ranks:,}", disk.name, f"{3 * ranks + 3:,}", f"{sign_in:.1f}", end.merges, f"{end.reads:,}")
            after = f"{max(0.0, end.complete_after - ENDS_WITHIN_S):.1f}"
            print("| " + " | ".join(map(str, (*row, after, f"{end.longest_stay:.1f}", end.left_early))) + " |")
    print(f"\n(ranks end within {ENDS_WITHIN_S:.0f} s; complete: seconds after the last has ended)")


if __name__ == "__main__":
    main()
