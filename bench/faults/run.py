"""Scores ampguard, and other tools, on small training scripts that break as public bug reports say.

python -m bench.faults.run                         # ampguard on every case
python -m bench.faults.run --only 'f-*' -j 2       # some cases
python -m bench.faults.run --tool all              # the other tools as well; keeps the rows and writes results.md
python -m bench.faults.run --write                 # ampguard again; results.md keeps the other tools' rows
python -m bench.faults.run --check                 # only: can the truths be true?
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import msgspec

if not __package__:  # started as a file: make `bench` and a not installed ampguard importable
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]
    __package__ = "bench.faults"

from bench.faults import tables
from bench.faults.scoring import Score
from bench.faults.tools import BASELINES, Status, run_bare, run_tool
from bench.faults.truth import CASES, Case, load_cases, problems

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.md"
ROWS = HERE / "results"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.faults.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="cases whose name matches (shell pattern or part)"
    )
    parser.add_argument("--tool", default="ampguard", choices=["ampguard", *BASELINES, "all"])
    parser.add_argument("-j", "--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that one run may take")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' folders and outputs here")
    parser.add_argument("--cases", type=Path, default=CASES, metavar="DIR", help="where the case folders are")
    parser.add_argument("--check", action="store_true", help="check the truths and run nothing")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} (with --tool all: always)")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    cases = load_cases(args.only, args.cases)
    if not cases:
        print(f"no case matches {args.only!r} in {args.cases}", file=sys.stderr)
        return 2
    doubtful = [(case, problem) for case in cases if not case.missing() for problem in problems(case)]
    for case, problem in doubtful:
        print(f"{case.name}: {problem}", file=sys.stderr)
    if args.check:
        print(f"{len(cases)} cases, {len(doubtful)} problems")
        return 1 if doubtful else 0

    for case in cases:
        if missing := case.missing():
            print(f"{case.name}: left out, needs {', '.join(missing)}", file=sys.stderr)
    cases = [case for case in cases if not case.missing()]
    chosen = ["ampguard", *BASELINES] if args.tool == "all" else [args.tool]
    with ExitStack() as stack:
        room = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        results = run_all(cases, chosen, room, args.jobs, args.timeout)
    print(tables.totals_text(results))
    if args.write or (args.tool == "all" and args.only == "*"):
        RESULTS.write_text(tables.markdown(kept_rows(results), version("torch")), encoding="utf-8")
        print(f"\nwritten: {RESULTS}")
    return 0


def run_all(cases: list[Case], chosen: list[str], room: Path, jobs: int, timeout: float) -> dict[str, list[Score]]:
    """Every case under every chosen tool; prints each row as soon as it and those before it are there."""
    bare: dict[str, Status] = {}
    results: dict[str, list[Score]] = {}

    def one(tool: str, case: Case) -> Score:
        if tool == "ampguard":
            bare[case.name] = run_bare(case, fresh(room / "bare" / case.name), timeout).status
        return run_tool(tool, case, fresh(room / tool / case.name), timeout, bare.get(case.name, 0))

    with ThreadPoolExecutor(jobs) as pool:
        for tool in chosen:
            print(f"\n{tool}\n{tables.header()}")
            results[tool] = []
            for row in pool.map(lambda case, tool=tool: one(tool, case), cases):
                results[tool].append(row)
                print(tables.line(row), flush=True)
    return results


def kept_rows(results: dict[str, list[Score]]) -> dict[str, list[Score]]:
    """Keep each tool's rows in a file, and return those of every tool that was ever run here."""
    ROWS.mkdir(exist_ok=True)
    for tool, rows in results.items():
        (ROWS / f"{tool}.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    kept = {tool: ROWS / f"{tool}.json" for tool in ("ampguard", *BASELINES)}
    return {
        tool: msgspec.json.decode(file.read_bytes(), type=list[Score]) for tool, file in kept.items() if file.exists()
    }


def fresh(folder: Path) -> Path:
    """An empty folder, whatever an earlier `--keep` left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
