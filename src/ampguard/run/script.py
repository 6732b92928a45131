"""Run a script under guard: the order of things, from its first line to the exit status."""

from __future__ import annotations

import sys

from ampguard.run.ending import end_as_interrupted, say_how_it_ended, wait_for_threads
from ampguard.run.held import HeldSession
from ampguard.run.mainmodule import Program, ScriptTarget, absolute_path, prepare
from ampguard.run.protocols import GuardSession

__all__ = ["GuardSession", "ScriptTarget", "execute"]


def execute(target: ScriptTarget, session: GuardSession) -> int:
    """Run `target` as `__main__` under `session` and return the exit status Python would give it.

    To be called once, at the end of a process's life: it waits for the script's threads as a shutdown does. After
    Ctrl-C it raises the `KeyboardInterrupt` again, for Python to die by SIGINT. An `AmpguardError` from
    `session.start()` passes through; the script has not started then.
    """
    try:
        program = prepare(target)
    except OSError as error:
        path = absolute_path(target.name)
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        return 2
    except Exception as error:
        does_not_compile = error
    else:
        guard = HeldSession(session if program.starts else None)
        guard.start()
        return _run(program, guard)
    return say_how_it_ended(does_not_compile)


def _run(program: Program, guard: HeldSession) -> int:
    error: BaseException | None = None
    try:
        program.run()
    except BaseException as raised:
        error = raised
    # Outside the handler: a sys.excepthook of the script's must not see an exception as being handled.
    status = say_how_it_ended(error)
    if guard.is_other_process():
        return status
    wait_for_threads()
    try:
        status = guard.finish(error) or status
    except KeyboardInterrupt as interrupt:
        error = interrupt
    if isinstance(error, KeyboardInterrupt):
        end_as_interrupted(error)
    return status
