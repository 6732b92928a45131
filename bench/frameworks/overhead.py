"""What the guard costs inside others' loops: CPU time of a step, guarded against the same framework unguarded.

python bench/frameworks/overhead.py                 # some 8 minutes; writes results.md
python bench/frameworks/overhead.py --quick         # 2 pairs each, results.md left alone
python bench/frameworks/overhead.py --loops lightning,ddp --workloads tiny

Models, rows and block lengths are those of bench/overhead. Each figure is the median over pairs of neighbouring blocks of
one process, one plain and one with the row, in alternating order; "plain (noise)" pairs plain blocks with plain ones. For
two ranks a block's time is the sum over both.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
for room in ("overhead", "ranks"):
    sys.path.insert(0, str(HERE.parent / room))

import loops  # noqa: E402
import torch  # noqa: E402
from launch import launch  # noqa: E402
from paced import Pace  # noqa: E402
from rows import ROWS, Row  # noqa: E402
from torch import nn  # noqa: E402

from run import GOALS, STEPS_PER_BLOCK, WARM_UP_STEPS, cpu_name  # noqa: E402

LOOPS = {
    "lightning": "Lightning, Trainer.fit (float16, clipped)",
    "hf": "HF Trainer (float32, clipped)",
    "ddp": "DDP, two gloo ranks (float16)",
    "compiled": "torch.compile (float16)",
}
GUARD = "ampguard.watch"
WITHIN_S = 900.0


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.child:
        print(json.dumps(measured_here(*args.child, args)), flush=True)
        os._exit(0)  # gloo's threads now and then abort a process that ends, guarded or not
    if args.quick:
        args.pairs = 2
    text = header(args)
    print(text)
    for workload in args.workloads.split(","):
        for line in table(workload, args):
            print(line, flush=True)
            text += line + "\n"
    if not args.quick:
        (HERE / "results.md").write_text(text, encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what the guard costs inside frameworks.")
    parser.add_argument("--loops", default=",".join(LOOPS), help="comma-separated")
    parser.add_argument("--workloads", default="tiny,vit")
    parser.add_argument("--rows", default=f"plain,{GUARD}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler")
    parser.add_argument("--quick", action="store_true", help="2 pairs, results.md left alone")
    parser.add_argument("--child", nargs=3, metavar=("LOOP", "WORKLOAD", "ROW"), help=argparse.SUPPRESS)
    parser.add_argument("--shared", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def header(args: argparse.Namespace) -> str:
    return (
        "# What the guard costs inside frameworks\n\n"
        f"torch {torch.__version__}, Python {platform.python_version()}, {cpu_name()}, one thread a process; "
        f"`torch.compile` with {args.backend}. CPU time, guarded against the same framework unguarded: median of "
        f"{args.pairs} interleaved pairs, their quartiles in brackets. Written by `bench/frameworks/overhead.py`.\n"
    )


def table(workload: str, args: argparse.Namespace) -> Iterator[str]:
    yield f"\n## {workload} (goal: {GOALS[workload]:.2f}x)\n"
    yield "| loop | row | time against unguarded | quartiles | ms a step, unguarded | graphs |"
    yield "|---|---|---|---|---|---|"
    for loop in args.loops.split(","):
        for row in args.rows.split(","):
            found = measured(loop, workload, row, args)
            ratios = [guarded / bare for bare, guarded in found["seconds"]]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            middle = statistics.median(ratios)
            ms = statistics.median(bare for bare, _ in found["seconds"]) / STEPS_PER_BLOCK[workload] * 1e3
            label = "plain (noise)" if row == "plain" else row
            graphs = found["graphs"] or "-"
            yield f"| {LOOPS[loop]} | {label} | {middle:.3f}x | {low:.3f} to {high:.3f} | {ms:.1f} | {graphs} |"


def measured(loop: str, workload: str, row: str, args: argparse.Namespace) -> dict[str, list[list[float]] | int]:
    """Each row in a process of its own (two for DDP): what one leaves behind is not the next one's."""
    child = [str(HERE / "overhead.py"), "--child", loop, workload, row, "--pairs", str(args.pairs)]
    child += ["--backend", args.backend]
    with tempfile.TemporaryDirectory() as folder:
        if loop != "ddp":
            done = subprocess.run([sys.executable, *child], cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
            return json.loads(done.stdout.splitlines()[-1])
        ended = launch(2, [*child, "--shared", folder], Path(folder), WITHIN_S)
        if any(one.status != 0 for one in ended):
            raise SystemExit(f"a rank ended with {[one.status for one in ended]}:\n{ended[0].err}{ended[1].err}")
    ranks = [json.loads(one.out.splitlines()[-1])["seconds"] for one in ended]
    return {"seconds": [[a[0] + b[0], a[1] + b[1]] for a, b in zip(*ranks, strict=True)], "graphs": 0}


def measured_here(loop: str, workload: str, name: str, args: argparse.Namespace) -> dict[str, list[object] | int]:
    """In the child: one loop, all its pairs."""
    row = shared_watch(args.shared) if args.shared is not None and name == GUARD else ROWS[name]
    paces: list[Pace] = []

    def paced(model: nn.Module) -> Pace:
        paces.append(Pace(model, row, ROWS["plain"], args.pairs, WARM_UP_STEPS[workload], STEPS_PER_BLOCK[workload]))
        return paces[-1]

    run: dict[str, Callable[[], None]] = {
        "lightning": lambda: loops.lightning(workload, paced),
        "hf": lambda: loops.hf_trainer(workload, paced),
        "ddp": lambda: loops.ddp(workload, paced),
        "compiled": lambda: loops.compiled(workload, paced, args.backend),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        run[loop]()
    return {"seconds": list(paces[0].seconds), "graphs": graphs_compiled()}


def shared_watch(folder: Path) -> Row:
    """The guard of one of several ranks: all write into the same run folder, another one in each block."""
    count = 0

    @contextlib.contextmanager
    def watched(model: nn.Module) -> Iterator[None]:
        nonlocal count
        import ampguard

        count += 1
        with contextlib.redirect_stderr(io.StringIO()), ampguard.watch(out=folder / f"run-{count}"):
            yield

    return watched


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process: the guard is to add none."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if "torch._dynamo" in sys.modules else 0


if __name__ == "__main__":
    main()
