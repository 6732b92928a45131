"""`ampguard compare SCRIPT [options] [-- ARGS...]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ampguard.errors import UsageError
from ampguard.precisions import usual_name
from ampguard.run.overrides.asked import AUTOCAST, PRECISIONS
from ampguard.run.seeds import LARGEST_SEED, LEAST_SEED

if TYPE_CHECKING:
    from ampguard.compare.runs import Subject

STEPS = 200


@click.command(
    name="compare",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS]",
)
@click.option("-m", "module", metavar="MODULE", help="Compare a module, as `python -m MODULE` runs it.")
@click.option("--precisions", default="fp32,fp16,bf16", show_default=True, metavar="LIST", help="Separated by commas.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of each run.  [default: 200; with --eval all of them]",
)
@click.option(
    "--eval",
    "evaluates",
    is_flag=True,
    help="Run once, in float32, make every evaluation call again in the other precisions, and compare what each module "
    "returns, the worst first.",
)
@click.option(
    "--seed",
    type=click.IntRange(LEAST_SEED, LARGEST_SEED),
    metavar="N",
    default=0,
    show_default=True,
    help="The same for each run.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="For the run folders; new or empty.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [-- ARGS]...")
def command(
    module: str | None,
    precisions: str,
    steps: int | None,
    evaluates: bool,
    seed: int,
    out: Path | None,
    form: Literal["text", "json"],
    words: tuple[str, ...],
) -> int:
    """Run SCRIPT under each precision with the same seeds, and say which one suits it.

    These options may stand before or after SCRIPT; what is not one of them, and all after `--`, belongs to the script.
    The exit status is 0 where a precision can be recommended (with --eval: where something was compared), else 1.
    """
    from ampguard.compare.runs import Subject, make_folder, run_each
    from ampguard.compare.table import as_json, print_comparison
    from ampguard.compare.verdict import recommend

    names = _names(precisions)
    if module is None and not words:
        raise click.UsageError("Missing argument 'SCRIPT' (or -m MODULE).")
    if module is None and not Path(words[0]).exists():
        raise UsageError(f"{words[0]}: no such script")
    target = (module, *words) if module is not None else words
    folder = make_folder(out, Path(target[0]).stem)
    if evaluates:
        return _evaluate(Subject(target, module is not None, steps, seed), names, folder, form)
    subject = Subject(target, module is not None, steps or STEPS, seed)
    courses = run_each(subject, names, folder, lambda line: print(f"ampguard: {line}", file=sys.stderr, flush=True))
    verdict = recommend(courses)
    if form == "json":
        click.echo(as_json(courses, verdict).decode())
    else:
        print_comparison(courses, verdict)
    return 0 if verdict.recommended is not None else 1


def _evaluate(subject: Subject, names: list[str], folder: Path, form: str) -> int:
    from ampguard.compare.evaluation import as_json, print_evaluation, run_evaluation

    converting = [name for name in names if name not in AUTOCAST]
    if converting:
        raise UsageError(
            f"--eval with {converting[0]!r}: evaluations are made again under autocast, with the weights as they are; "
            f"name precisions among {', '.join(AUTOCAST)}, or leave --eval out"
        )
    others = [name for name in names if name != "fp32"]
    if not others:
        raise UsageError("--eval compares with float32: name another precision in --precisions")
    found = run_evaluation(subject, others, folder)
    if form == "json":
        click.echo(as_json(found).decode())
    else:
        print_evaluation(found)
    return 0 if found.modules else 1


def _names(precisions: str) -> list[str]:
    words = [name.strip() for name in precisions.split(",") if name.strip()]
    names = [usual_name(name) for name in words]
    unknown = [word for word, name in zip(words, names, strict=True) if name not in PRECISIONS]
    if unknown:
        raise UsageError(f"--precisions: {unknown[0]!r} is not one of {', '.join(PRECISIONS)}")
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--precisions {precisions!r}: name each precision once")
    return names
