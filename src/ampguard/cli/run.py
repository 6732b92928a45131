"""`ampguard run [options] SCRIPT [ARGS...]` and `ampguard run [options] -m MODULE [ARGS...]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import click

from ampguard.precisions import usual_name
from ampguard.run.late import LateSession
from ampguard.run.overrides.asked import LEVELS, PRECISIONS, overrides_of
from ampguard.run.protocols import GuardSession
from ampguard.run.script import ScriptTarget, execute
from ampguard.run.seeds import LARGEST_SEED, LEAST_SEED, seed_everything, seed_torch


class _RunCommand(click.Command):
    """Options end at SCRIPT or at `-m MODULE`: what follows is the script's, whatever it looks like."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._close_after_module(args))

    def _close_after_module(self, args: list[str]) -> list[str]:
        """Put `--` after `-m MODULE`, as click knows only a positional argument as the end of the options."""
        with_value = {name for p in self.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
        i = 0
        while i < len(args) and args[i].startswith("-") and args[i] != "--":
            takes_next = args[i] in with_value
            after = i + (2 if takes_next else 1)
            if args[i].startswith("-m") and after <= len(args):  # `-m mod` and `-mmod`, as python has it
                return [*args[:after], "--", *args[after:]]
            i = after
        return args


class _Named(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A choice of precisions that takes other spellings, too."""

    def __init__(self, names: Sequence[str], usual: Callable[[str], str]) -> None:
        super().__init__(names)
        self._usual = usual

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        usual = self._usual(str(value))
        return str(super().convert(usual if usual in self.choices else value, param, ctx))


def _level(name: str) -> str:
    return name.upper() if name.lower().startswith("o") else name.lower()


@click.command(
    name="run",
    cls=_RunCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m MODULE` does.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Stop cleanly after N iterations.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The run folder; new or empty.  [default: ampguard-runs/<date>-<script>]",
)
@click.option(
    "--max-incidents",
    type=click.IntRange(min=0),
    metavar="N",
    default=5,
    show_default=True,
    help="How many incidents are investigated in full; more are counted.",
)
@click.option(
    "--on-nonfinite",
    type=click.Choice(["observe", "stop", "skip", "heal"]),
    default="observe",
    show_default=True,
    help="observe: report and let the script go on. stop: end it at the first error, with exit status 3. skip: hold the "
    "optimizer's step off, and stop after too many in a row. heal: the same, and apply the smallest verified fix.",
)
@click.option(
    "--precision", type=_Named(PRECISIONS, usual_name), help="Run the script in this precision, whatever it says."
)
@click.option(
    "--amp-opt-level",
    type=_Named(tuple(LEVELS), _level),
    help="The same, by apex's names: O1 is fp16.",
)
@click.option("--disable-amp", is_flag=True, help="The same as --precision fp32.")
@click.option(
    "--force-fp32",
    multiple=True,
    metavar="PATTERN",
    help="Run the modules whose path matches in float32 (`blocks.*.attn`). May be repeated.",
)
@click.option("--compare-eval", default="", hidden=True, help="Precisions to make evaluation calls again in.")
@click.option(
    "--seed",
    type=click.IntRange(LEAST_SEED, LARGEST_SEED),
    metavar="N",
    help="Seed Python's, numpy's and torch's random numbers first.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def command(
    module: str | None,
    steps: int | None,
    out: Path | None,
    max_incidents: int,
    on_nonfinite: Literal["observe", "stop", "skip", "heal"],
    precision: str | None,
    amp_opt_level: str | None,
    disable_amp: bool,
    force_fp32: tuple[str, ...],
    compare_eval: str,
    seed: int | None,
    words: tuple[str, ...],
) -> Callable[[], int]:
    """Run SCRIPT as Python would, and explain the first bad number that reaches its loss, gradients or outputs.

    Options after SCRIPT (or after -m MODULE) belong to the script. The exit status is the script's own.
    """
    target = _target(module, words)
    overrides = overrides_of(
        precision, amp_opt_level, disable_amp, force_fp32, tuple(filter(None, compare_eval.split(",")))
    )

    if seed is not None:
        seed_everything(seed)

    def session() -> GuardSession:
        from ampguard.run.session import RunOptions, Session  # here: it imports torch

        if seed is not None:
            seed_torch(seed)

        options = RunOptions(
            out=out,
            steps=steps,
            max_incidents=max_incidents,
            on_nonfinite=on_nonfinite,
            script_name=target.stem,
            overrides=overrides,
            seed=seed,
        )
        return Session(options)

    return lambda: execute(target, LateSession(session, out, target.stem))


def _target(module: str | None, words: tuple[str, ...]) -> ScriptTarget:
    if module is not None:
        return ScriptTarget(module, words, is_module=True)
    if not words:
        raise click.UsageError("Missing argument 'SCRIPT' (or -m MODULE).")
    return ScriptTarget(words[0], words[1:])
