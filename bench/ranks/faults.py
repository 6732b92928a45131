"""Throw one fault at a random place into trainings of two and four ranks under the guard, and see how they end.

    python bench/ranks/faults.py --runs 200 --seed 0
    python bench/ranks/faults.py --runs 200 --seed 0 --record faults.jsonl    go on after the last run in that file

A run is good if no rank hangs, every rank that was not killed left its report, and the merged report says what was to be
said: the failing rank and step for a fault of numbers, nothing for any other. Writes results.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from launch import Ended, launch

from ampguard.errors import RunFolderError
from ampguard.report.store import read_report
from ampguard.run.ranks import is_due

HERE = Path(__file__).parent
WITHIN_S = 120.0
CAUSES = {
    "nan-batch": "nonfinite-input",
    "log": "domain-error",
    "overflow": "fp16-overflow",
    "drift": "rank-divergence",
    "scale": "rank-divergence",
    "inside": "domain-error",
}
NUMBERS = tuple(CAUSES)
OTHERS = ("none", "raise", "kill", "slow", "die-late", "kill-late")
DRAWN = (*(fault for fault in NUMBERS if fault != "inside"), *OTHERS)
"""What is thrown where nothing else is asked for."""


@dataclass(frozen=True)
class Case:
    """What is thrown where."""

    ranks: int
    engine: str
    fault: str
    on: int
    at: int
    policy: str

    @property
    def command(self) -> list[str]:
        amp = ["--amp"] if self.fault in ("overflow", "scale") else []
        where = ["--engine", self.engine, "--fault", self.fault, "--on", str(self.on), "--at", str(self.at)]
        guard = ["-m", "ampguard", "run", "--out", "out", "--on-nonfinite", self.policy]
        return [*guard, str(HERE / "train.py"), *where, *amp, "--steps", "20", "--timeout", "20"]


@dataclass(frozen=True)
class Outcome:
    """What became of a run; `problem` is empty where all was well."""

    case: Case
    seconds: float
    hung: list[int]
    lost: list[int]
    problem: str

    @property
    def is_good(self) -> bool:
        return not (self.hung or self.lost or self.problem)


def chosen(rng: random.Random, faults: Sequence[str]) -> Case:
    fault = rng.choice(faults)
    engine = "ddp" if fault in ("drift", "scale") else rng.choice(("ddp", "fsdp"))
    ranks = rng.choice((2, 4))
    policy = rng.choice(("observe", "skip")) if fault in ("nan-batch", "log", "inside") else "observe"
    return Case(ranks, engine, fault, rng.randrange(ranks), rng.randrange(1, 12), policy)


def run(case: Case) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ended = launch(case.ranks, case.command, Path(folder), WITHIN_S)
        seconds = time.monotonic() - began
        hung = [rank for rank, one in enumerate(ended) if one.status is None]
        lost = [rank for rank, one in enumerate(ended) if not is_killed(one) and not has_report(folder, rank)]
        return Outcome(case, seconds, hung, lost, problem_of(case, Path(folder) / "out", ended))


def is_killed(one: Ended) -> bool:
    return one.status is None or one.status == -9


def has_report(folder: str, rank: int) -> bool:
    try:
        read_report(Path(folder) / "out" / f"rank-{rank}.json")
    except RunFolderError:
        return False
    return True


def problem_of(case: Case, out: Path, ended: list[Ended]) -> str:
    if any("a fault of its own" in one.err for one in ended):
        return "a fault of the guard's own"
    try:
        report = read_report(out)
    except RunFolderError as error:
        return f"no merged report: {error}"
    told = [i for i in report.incidents if i.severity == "error"]
    if case.fault not in NUMBERS:
        wrong = [i for i in told if case.fault not in ("die-late", "kill-late")]
        return f"told of {wrong[0].cause}" if wrong else ""
    if not told:
        return "nothing was told"
    first = told[0]
    ranks = first.evidence.get("ranks", [first.rank])
    if case.fault in ("drift", "scale"):  # all are compared with rank 0, which may be the odd one
        others = [rank for rank in range(case.ranks) if rank != 0] if case.on == 0 else [case.on]
        equal = max((step for step in range(case.at) if is_due(step)), default=None)
        is_right = first.cause == CAUSES[case.fault] and ranks == others and first.evidence["last_equal_step"] == equal
    else:
        is_right = (first.cause, first.step, ranks) == (CAUSES[case.fault], case.at, [case.on]) and len(told) == 1
    seen = f"{first.cause} in step {first.step} on ranks {ranks}, {len(told)} errors in all"
    return "" if is_right else f"told: {seen}"


def table(outcomes: list[Outcome], seed: int) -> str:
    lines = [
        "# Faults thrown into several ranks",
        "",
        f"{len(outcomes)} runs, seed {seed}; torch {torch.__version__}, Python {platform.python_version()}, gloo, "
        "one thread a rank.",
        f"`python bench/ranks/faults.py --runs {len(outcomes)} --seed {seed}`",
        "",
        "A report is wrong if it does not name the cause, the step and the rank of a fault of numbers, as the one error; for",
        "weights that drift apart and for other loss scales, the ranks that differ and the last step after which they did",
        "not; or if it has an error where the numbers were good. `die-late` and `kill-late`: the rank raises, or is killed,",
        "when its failing step is run again; under FSDP2 it need not be, and it lives. A `kill` under FSDP2 or with four",
        "ranks may take the others the 20 s timeout of the process group.",
        "",
        "| fault | runs | with 4 ranks | FSDP2 | hung | lost a survivor's report | report wrong | longest, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault in (*NUMBERS, *OTHERS, None):
        some = [o for o in outcomes if fault is None or o.case.fault == fault]
        if some:
            name = "all" if fault is None else fault
            counts = [
                len(some),
                sum(o.case.ranks == 4 for o in some),
                sum(o.case.engine == "fsdp" for o in some),
                sum(bool(o.hung) for o in some),
                sum(bool(o.lost) for o in some),
                sum(bool(o.problem) for o in some),
                round(max(o.seconds for o in some)),
            ]
            lines.append(f"| {name} | " + " | ".join(map(str, counts)) + " |")
    bad = [o for o in outcomes if not o.is_good]
    lines += ["", "What went wrong:" if bad else "Nothing went wrong.", ""]
    lines += [f"- {o.case}: hung {o.hung}, lost {o.lost}; {o.problem}" for o in bad]
    return "\n".join(lines).rstrip() + "\n"


def recorded(file: Path) -> Iterator[Outcome]:
    """The runs that were made before."""
    for line in file.read_text().splitlines() if file.exists() else ():
        values = json.loads(line)
        yield Outcome(**{**values, "case": Case(**values["case"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", choices=(*NUMBERS, *OTHERS), default=DRAWN, help="those to choose from")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    parser.add_argument("--record", type=Path, help="keep every run in this file, and go on after the last one in it")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    cases = [chosen(rng, asked.faults) for _ in range(asked.runs)]
    outcomes = list(recorded(asked.record)) if asked.record else []
    if [o.case for o in outcomes] != cases[: len(outcomes)]:
        parser.error(f"{asked.record} holds other runs than those of --seed {asked.seed}: give another file")
    for case in cases[len(outcomes) :]:
        outcome = run(case)
        outcomes.append(outcome)
        state = "ok" if outcome.is_good else f"{outcome.hung} {outcome.lost} {outcome.problem}"
        print(f"{len(outcomes) - 1:4d} {outcome.seconds:5.1f} s  {outcome.case}: {state}", flush=True)
        asked.out.write_text(table(outcomes, asked.seed))
        if asked.record:
            with asked.record.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    main()
