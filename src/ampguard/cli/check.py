"""`ampguard check`."""

from __future__ import annotations

import shutil
import sys
from typing import Literal

import click


@click.command(name="check")
@click.option(
    "--device", "devices", multiple=True, metavar="NAME", help="Only this one: cpu, cuda, cuda:1. May be repeated."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(devices: tuple[str, ...], form: Literal["text", "json"]) -> int:
    """Compute on this machine's devices in every precision, and say what they support and what goes wrong here.

    The exit status is 1 where a device gives wrong numbers, else 0.
    """
    from ampguard.check.examine import check_machine  # here: it imports torch
    from ampguard.check.facts import to_json
    from ampguard.check.text import as_text

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    check = check_machine(devices)
    click.echo(to_json(check).decode() if form == "json" else as_text(check, columns))
    return 0 if check.is_sound else 1
