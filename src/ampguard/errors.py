"""The exceptions that ampguard raises at its users.

    AmpguardError                 everything below; `except AmpguardError` catches all of ours
    ├── UsageError                the command line or an argument asks for what cannot be done
    ├── RunFolderError            the run folder cannot be made, written or read
    └── ReplayError               a recorded step cannot be run again (never reaches a training)
    │   ├── DoesNotRepeatError    ... or is finite when it is
    │   └── ChangedSinceError     ... with the values that it had
    └── EngineError               raised by `ampguard.Amp`
        ├── PrecisionError        a precision is unknown, or this machine or this model cannot do it
        ├── PatternError          a module pattern matches nothing
        ├── SetupError            models, optimizers and schedulers that do not fit each other
        ├── ProtocolError         scale, backward, unscale, clip, step in a wrong order; `cause` is its code
        ├── LossError             a loss that cannot be differentiated
        ├── UnknownCallError      a call that Amp does not have (an AttributeError too)
        ├── NonfiniteError        a step was not finite, and the policy (or too many in a row) ends the run
        ├── PoisonedStateError    a state that holds NaN or Inf is not saved
        └── CheckpointError       a state of another mode or model, truncated or altered; nothing was loaded

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


class EngineError(AmpguardError):
    """Base of what `ampguard.Amp` raises."""


class PrecisionError(EngineError):
    """A precision is unknown, or this machine, this model or this optimizer cannot do it."""


class PatternError(EngineError):
    """A module pattern matches nothing."""


class SetupError(EngineError):
    """The models, optimizers and schedulers given do not fit each other."""


class ProtocolError(EngineError):
    """The calls of a training loop came in an order that makes the gradients wrong."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause
        """The code that `ampguard explain` knows."""


class LossError(EngineError):
    """A loss cannot be differentiated."""


class UnknownCallError(EngineError, AttributeError):
    """A call that `Amp` does not have; GradScaler's, often."""


class NonfiniteError(EngineError):
    """A step was not finite, and the run is not to go on."""

    def __init__(self, message: str, parameters: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.parameters = parameters
        """Names of the parameters whose gradients were not finite."""


class PoisonedStateError(EngineError):
    """A state that holds NaN or Inf is not saved."""


class CheckpointError(EngineError):
    """A saved state does not belong to this model and mode, or is damaged. Nothing was loaded."""


def message_of(error: BaseException) -> str:
    """What an exception says; nothing where it cannot: the script's own classes may fail in their `__str__`."""
    try:
        return str(error)
    except Exception:
        return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the host or of a device: torch has a class of its own for devices only."""
    is_devices = type(error).__name__ == "OutOfMemoryError"
    return is_devices or isinstance(error, MemoryError) or "can't allocate memory" in message_of(error)
