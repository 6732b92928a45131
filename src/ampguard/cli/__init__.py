"""The command line: one file per command; each is imported when it is called for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import click

from ampguard._version import __version__
from ampguard.errors import RunFolderError, UsageError

_COMMANDS = ("run", "compare", "check", "explain")


class _LazyGroup(click.Group):
    """Finds a command in the file of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ampguard.cli.{cmd_name}").command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ampguard")
def cli() -> None:
    """Run a PyTorch training script and, when its numbers break, say where, why, and what cures it."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    A command that runs a stranger's script returns it as a function, called here: click would take the script's
    Ctrl-C and `SystemExit` for its own.
    """
    try:
        result = cli.main(args=args, prog_name="ampguard", standalone_mode=False)
        return _status_of(result)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (UsageError, RunFolderError) as error:
        print(f"ampguard: {error}", file=sys.stderr)
        return 2


def _status_of(result: int | Callable[[], int] | None) -> int:
    if callable(result):
        return result()
    return result or 0
