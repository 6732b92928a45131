"""How far `ampguard run --on-nonfinite heal` carries scripts that a low precision breaks.

Every case of bench/faults that a low precision broke and another one cures is run as it is, in float32 throughout, and
healed. Where the healed run ends further than 2 % from float32's, it is also healed by switching autocast off for good,
and run in float32 from weights that differ in their last bit; and both, in float32 and healed, from weights that differ
by one rounding to float16. Prints a row a case and writes results.md beside this file.

python -m bench.heal.run                       # all (from the repository's root)
python -m bench.heal.run --only 'p-*'          # some; results.md is left alone
python -m bench.heal.run --keep /tmp/runs      # keep run folders and outputs
python -m bench.heal.run --read /tmp/runs      # run nothing: read what an earlier --keep left there
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

if not __package__:  # started as a file: make `bench` and a not installed ampguard importable
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]
    __package__ = "bench.heal"

from bench.faults.run import fresh
from bench.faults.truth import load_cases
from bench.heal.averaged import AVERAGED
from bench.heal.outcome import GOAL, Outcome, is_healable, outcome_of, run_case, run_controls

RESULTS = Path(__file__).resolve().parent / "results.md"
COLUMNS = (
    "case",
    "as it is",
    "healed",
    "explained",
    "fix",
    "final loss",
    "in float32",
    "apart",
    "noise",
    "float32 again",
    "by float16's rounding",
    "off from there",
    "bad printed",
    "step before",
    "after",
    "ratio",
    "within 2 %",
    "as well",
    "in its spread",
    "on average",
    "can be judged",
)
HEAD = (f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|")
NOTES = """\
**as it is**: the exit status without ampguard. **healed**: whether the healed run came to its end, with as many steps as
in float32. **explained**: the failing step (where steps were made before it that the script as it is skips for its loss
scale, whichever came to fail) has a report with the right cause. **final loss**: the mean over the last
tenth of the training steps, at least five. **apart**: the mean loss of the last quarter, from float32's; **noise**: how
much float32's own loss moves there from step to step; **float32 again**: how far float32's own run ends from itself when
its first weights differ in their last bit (the further of two); **by float16's rounding**: between which it ends where they
differ by float16's last bit (three runs; at least 2 %): every step before the failure was computed in float16, and differs
by more; **off from there**: as apart, of a run that is healed by
switching autocast off for good, which is float32 from the failing step on and the most that healing can do (these three
only where the healed run is further than 2 %); all as
`ampguard compare` measures them (where the loss has vanished, against a hundredth of its start). The loss of the
very step that failed and was healed is not compared.
**bad printed**: how often the script itself printed nan or inf, as it is and healed. **step before**, **after**: the
median time of a step before the first fix (without the first three) and after the last; "-": fewer than three steps
there. On this CPU float16 is slower than float32: a fix that moves much into float32 makes steps shorter here, and would
not on a GPU. **within 2 %**: a fix was applied, the run came to its end, and is at most 2 % apart, above or below. **as
well**: the same, but not above float32 by more than 2 % or the noise (the rule of `ampguard compare`): the steps before
the fix ran in the low precision, and a loop that doubles small differences does not come back to float32's course. **in
its spread**: healed, at its end, and within what **by float16's rounding** says. **on average**: how far the mean of eleven
healed runs is from the mean of eleven in float32, from the same weights, each time changed by one rounding to float16,
and its standard error: what healing itself does to the loss, where one run tells what became of one rounding. **can be
judged**: "no" where **float32 again** is more than 2 %: float32 itself does not keep what is asked of the healed run.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.heal.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name matches")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' folders and outputs here")
    parser.add_argument("--read", type=Path, metavar="DIR", help="run nothing: read what an earlier --keep left there")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one run may take")
    args = parser.parse_args()
    cases = [case for case in load_cases(args.only) if is_healable(case)]
    left_out = [case.name for case in cases if case.missing()]
    print("\n".join(HEAD), flush=True)
    outcomes = []
    with ExitStack() as stack:
        room = args.read or args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heal-")))
        for case in cases:
            if case.missing():
                continue
            if args.read is None:
                run_case(case, fresh(room / case.name), args.timeout)
                if not outcome_of(case, room / case.name).is_carried:
                    run_controls(case, room / case.name, args.timeout)
            outcomes.append(outcome_of(case, room / case.name))
            print(row(outcomes[-1]), flush=True)
    print("\n" + summary(outcomes))
    if args.only == "*":
        RESULTS.write_text(markdown(outcomes, left_out), encoding="utf-8")
    return 0


def markdown(outcomes: Sequence[Outcome], left_out: Sequence[str]) -> str:
    parts = [
        "# Healing\n",
        f"Written by `python -m bench.heal.run`, torch {version('torch')}, CPU, one thread.\n",
        summary(outcomes),
        *HEAD,
        *map(row, outcomes),
        "",
        NOTES,
    ]
    if left_out:
        parts.append(f"Left out, their packages are missing: {', '.join(left_out)}.\n")
    notes = [f"- {o.case}: {o.note}" for o in outcomes if o.note]
    return "\n".join([*parts, *notes]).rstrip() + "\n"


def row(outcome: Outcome) -> str:
    o = outcome
    plain = "0" if o.plain_status == 0 else f"**{o.plain_status}**"
    end = "to its end" if o.came_to_its_end else f"exit {o.healed_status}, {o.steps} of {o.steps_in_fp32} steps"
    cells = [
        o.case,
        plain,
        end,
        "yes" if o.explained else "NO",
        ", ".join(f"`{fix}`" for fix in o.fixes) or "none",
        number(o.loss),
        number(o.loss_in_fp32),
        "-" if o.apart is None else f"{o.apart:+.2%}",
        f"{o.noise:.1%}",
        "-" if o.furthest_repeat is None else f"{o.furthest_repeat:.2%}",
        "{:+.2%} to {:+.2%}".format(*o.coarse_spread) if o.coarse_repeats else "-",
        "-" if o.off_from_there is None else f"{o.off_from_there:+.2%}",
        "{} / {}".format(*o.bad_printed),
        milliseconds(o.seconds_before),
        milliseconds(o.seconds_after),
        "-" if o.slower is None else f"{o.slower:.2f}",
        "yes" if o.is_carried else "NO",
        "yes" if o.trains_as_well else "NO",
        "yes" if o.is_within_spread else "NO",
        "-" if o.on_average is None else str(o.on_average),
        "yes" if o.is_repeatable else "no",
    ]
    return f"| {' | '.join(cells)} |"


def summary(outcomes: Sequence[Outcome]) -> str:
    missed = [o for o in outcomes if not o.is_carried]
    means = [o.on_average for o in missed if o.on_average is not None]
    ratios = sorted(o.slower for o in outcomes if o.slower is not None)
    lines = [
        f"- carried to the end, within {GOAL:.0%} of float32's loss: "
        f"{share(sum(o.is_carried for o in outcomes), len(outcomes))}; goal: 90 %",
        f"- carried to the end, not above float32's loss by more than {GOAL:.0%} or its noise: "
        f"{share(sum(o.trains_as_well for o in outcomes), len(outcomes))}; by more than 2 % below it: "
        f"{sum(o.trains_as_well and not o.is_carried and (o.apart or 0.0) < 0 for o in outcomes)}",
        f"- further than {GOAL:.0%}: {len(missed)}; of these, float32 does not repeat itself within {GOAL:.0%} in "
        f"{sum(not o.is_repeatable for o in missed)}, and float32 from the failing step on ends further too in "
        f"{sum(o.is_lost_before for o in missed)}",
        f"- carried to the end, within {GOAL:.0%} of float32's run or of one of its two repeats from weights that differ "
        f"in their last bit: {share(sum(o.is_as_float32_repeats for o in outcomes), len(outcomes))}",
        f"- carried to the end, within {GOAL:.0%} of float32's run, or no further from it than it ends from itself where its "
        f"first weights differ by one rounding to float16: {share(sum(o.is_within_spread for o in outcomes), len(outcomes))}",
        f"- of those further than {GOAL:.0%}, the mean of {len(AVERAGED)} healed runs is within {GOAL:.0%} of that of as many in "
        f"float32, all from weights that differ by one rounding to float16, in "
        f"{sum(mean.is_within_goal for mean in means)}; float32's own such runs differ from each other by more than "
        f"{GOAL:.0%} (standard deviation) in {sum(mean.spread > GOAL for mean in means)}",
        f"- came to their end: {share(sum(o.came_to_its_end for o in outcomes), len(outcomes))}; as they are: "
        f"{share(sum(o.plain_status == 0 for o in outcomes), len(outcomes))}",
        f"- had nothing to heal on this processor (the script as it is ended well and printed nothing bad, no fix was applied): "
        f"{sum(not o.fixes and o.plain_status == 0 and o.bad_printed[0] == 0 for o in outcomes)}",
        f"- failing step explained: {share(sum(o.explained for o in outcomes), len(outcomes))}",
    ]
    if ratios:
        lines.append(
            f"- a step after the fix takes {statistics.median(ratios):.2f} times one before it (median of {len(ratios)} "
            f"cases; {ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return "\n".join(lines) + "\n"


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "-"


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
