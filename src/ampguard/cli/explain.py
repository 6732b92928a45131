"""`ampguard explain [CODE]`."""

from __future__ import annotations

import click

from ampguard.report.explain import explain, list_causes


@click.command(name="explain")
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Say what a cause means, why it happens and what to do; without CODE, list all causes."""
    click.echo(list_causes() if code is None else explain(code.strip().lower().replace("_", "-")))
