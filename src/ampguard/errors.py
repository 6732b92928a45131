"""The exceptions that ampguard raises at its users.

    AmpguardError                 everything below; `except AmpguardError` catches all of ours
    ├── UsageError                the command line or an argument asks for what cannot be done
    ├── RunFolderError            the run folder cannot be made, written or read
    └── ReplayError               a recorded step cannot be run again (never reaches a training)
        ├── DoesNotRepeatError    ... or is finite when it is
        └── ChangedSinceError     ... with the values that it had

    StopRun (BaseException)       ends a guarded script cleanly: `--steps` reached, or `--on-nonfinite stop`

A fault of ampguard's own is none of these: it is reported once, the guard switches itself off, and training goes on.
"""

from __future__ import annotations


class AmpguardError(Exception):
    """Base of every exception that ampguard raises on purpose."""


class UsageError(AmpguardError):
    """The command line or an argument asks for something that cannot be done."""


class RunFolderError(AmpguardError):
    """The run folder cannot be created, written or read."""


class ReplayError(AmpguardError):
    """A recorded step cannot be run again; the message says why."""


class DoesNotRepeatError(ReplayError):
    """The step was run again, and its result is finite."""


class ChangedSinceError(ReplayError):
    """A given of the recorded step was changed since: it can be run again only with its present value."""


class StopRun(BaseException):
    """Ends a guarded script from inside the training loop.

    Not an `Exception`: a training loop's own `except Exception` must not swallow it.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
