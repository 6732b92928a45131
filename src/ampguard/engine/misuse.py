"""The errors of a wrong order of calls: what happened where, why it is wrong, what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ampguard.errors import ProtocolError

Line = tuple[str, int]
"""File and line."""


_NOT_THE_LOOP = ("ampguard.", "contextlib", "torch.")


def calling_line() -> Line | None:
    """The nearest line outside this package."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_NOT_THE_LOOP):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def error(cause: str, what: str, do: str, first: Line | None = None, again: Line | None = None) -> ProtocolError:
    """A ProtocolError that shows both places."""
    lines = [f"{what} [{cause}]"]
    if first is not None:
        lines.append(f"  first   {_shown(first)}")
    if again is not None:
        lines.append(f"  {'again' if first else 'at'}   {_shown(again)}")
    lines.append(f"  do      {do}   (ampguard explain {cause})")
    return ProtocolError("\n".join(lines), cause)


def _shown(line: Line) -> str:
    file, number = line
    return f"{file.rpartition('/')[2]}:{number}"


def never_differentiated(name: str, has_gradients: bool, window: int = 1) -> ProtocolError:
    if has_gradients:
        own = (
            ". Gradients that the loop writes itself (p.grad = ...) are taken as they are where amp.unscale_(optimizer) is "
            "called before"
        )
        return error(
            "unscaled-backward",
            f"`{name}` holds gradients, but amp.backward() was not called since its last step: their loss was not scaled, nor "
            "divided by accumulate, as its step expects",
            "call amp.backward(loss) instead of loss.backward(), or of scaler.scale(loss).backward()"
            + (own if window == 1 else ""),
            again=calling_line(),
        )
    return error(
        "no-gradients",
        f"amp.step() of `{name}`, but none of its parameters has a gradient",
        "call amp.backward(loss) before it, on a loss that depends on these parameters; where this loss does not, "
        "step the other optimizers by name: amp.step(optimizer)",
        again=calling_line(),
    )


_DELETE_SCALER = (
    "delete the GradScaler: amp.backward(loss) and amp.step() do what scale, unscale_, step and update did; clip with "
    "Amp(max_grad_norm=...), or after amp.unscale_()"
)


def scaled_already(scale: float) -> ProtocolError:
    return error(
        "bypassed-scaler",
        f"amp.backward() of a loss that scaler.scale() has multiplied by {scale:g}: a GradScaler is used beside this Amp, "
        "which never divides by its scale",
        _DELETE_SCALER,
        again=calling_line(),
    )


def scaled_by_another(name: str, scale: float) -> ProtocolError:
    return error(
        "bypassed-scaler",
        f"`{name}` holds gradients of scaler.scale(loss).backward(), {scale:g} times too large: a GradScaler is used beside "
        "this Amp, which never divides by its scale",
        _DELETE_SCALER,
        again=calling_line(),
    )


def scaled_by_another_amp(name: str, scale: float) -> ProtocolError:
    return error(
        "bypassed-scaler",
        f"`{name}` holds gradients of the amp.backward() of another Amp, {scale:g} times too large: that one has multiplied "
        "them by its loss scale, by which this one never divides",
        "call backward and step of the same Amp; or clear what is left from before with amp.zero_grad()",
        again=calling_line(),
    )


def unscaled_by_another(name: str, scale: float, backward: Line | None) -> ProtocolError:
    return error(
        "double-unscale",
        f"scaler.unscale_() has divided the gradients of `{name}` by {scale:g}: a GradScaler is used beside this Amp, which "
        "divides by its own scale",
        _DELETE_SCALER,
        first=backward,
        again=calling_line(),
    )


def left_over_scaler(call: str) -> ProtocolError:
    return error(
        "unscaled-backward",
        f"scaler.{call}() of a GradScaler that has scaled no loss, beside an Amp, which scales by itself",
        _DELETE_SCALER,
        again=calling_line(),
    )


def foreign_gradients(name: str) -> ProtocolError:
    return error(
        "unscaled-backward",
        f"`{name}` holds gradients already, which amp.backward() did not make: it would add scaled ones to them",
        "call amp.backward(loss) instead of loss.backward() for every loss; gradients that are left from before go with "
        "amp.zero_grad()",
        again=calling_line(),
    )


def added_with_gradients(name: str) -> ProtocolError:
    return error(
        "unscaled-backward",
        f"`{name}` was given parameters that hold gradients already: backward passes from before they were added have left "
        "them, and those of this loss would be added to them",
        "add parameters to the optimizer before the first loss that is to train them is computed; what they hold goes with "
        "amp.zero_grad()",
        again=calling_line(),
    )


def plain_backward_beside(name: str, scale: float, where: Line | None) -> ProtocolError:
    return error(
        "unscaled-backward",
        f"a loss.backward() has added to gradients of `{name}` that carry the loss scale {scale:g}: what it added was not "
        "scaled, and would be divided by it all the same",
        "call amp.backward(loss) instead of loss.backward() for every loss",
        first=where,
        again=calling_line(),
    )


def not_reached(name: str, backward: Line | None) -> ProtocolError:
    return error(
        "no-gradients",
        f"amp.step() of `{name}`: the last amp.backward() reached none of its parameters, or their gradients were "
        "cleared since",
        "step only the optimizers whose parameters the loss depends on, amp.step(optimizer); call zero_grad before "
        "amp.backward, not between it and amp.step",
        first=backward,
        again=calling_line(),
    )


def unscaled_too_early(name: str) -> ProtocolError:
    return error(
        "no-gradients",
        f"amp.unscale_() of `{name}` was called before amp.backward(): there was no gradient to divide",
        "call amp.unscale_() after the last amp.backward() of the step; alone it says that the loop writes the gradients",
        again=calling_line(),
    )


def never_averaged(name: str, backward: Line | None) -> ProtocolError:
    return error(
        "no-gradients",
        f"amp.step() of `{name}`, whose gradients have not been averaged over the ranks: all backward passes of this step "
        "were inside no_sync()",
        "leave no_sync() for the last micro-step of the window",
        first=backward,
        again=calling_line(),
    )


def stepped_already(name: str, window: int) -> ProtocolError:
    flush = "; to end a window that may be complete already, ask `if result.accumulating` first" if window > 1 else ""
    return error(
        "no-gradients",
        f"amp.step() of `{name}`: it was stepped or cleared after the last amp.backward(), and holds no gradient any more",
        f"call amp.backward(loss) before each amp.step(){flush}",
        again=calling_line(),
    )


def left_out_of_backward(name: str, reached: Sequence[str], backward: Line | None) -> ProtocolError:
    given = ", ".join(map(repr, reached))
    one = given if len(reached) == 1 else "optimizer"
    return error(
        "no-gradients",
        f"amp.step() of `{name}`, which holds no gradient: the last amp.backward() was for {given} alone",
        f"step what has gradients, amp.step({one}); for gradients of `{name}`, call amp.backward(loss) without naming others",
        first=backward,
        again=calling_line(),
    )


def nothing_to_count(name: str, micro_step: int, window: int) -> ProtocolError:
    return error(
        "accumulation-broken",
        f"amp.step() of `{name}` after micro-step {micro_step} of {window}, and amp.backward() was not called since: the "
        "mean would be over a micro-step that is not there",
        "call amp.backward(loss) before each amp.step(); to end the window early, amp.step(last=True)",
        again=calling_line(),
    )


def unequal_windows(held: dict[str, int], window: int) -> ProtocolError:
    counts = ", ".join(f"`{name}` {count}" for name, count in held.items())
    return error(
        "accumulation-broken",
        f"amp.step() of optimizers whose windows hold different numbers of micro-steps (of {window}: {counts}): their "
        "means have different divisors",
        "step them one by one: amp.step(optimizer)",
        again=calling_line(),
    )


def all_frozen(names: list[str]) -> ProtocolError:
    which = ", ".join(f"`{name}`" for name in names)
    return error(
        "no-gradients",
        f"amp.backward() for {which}, none of whose parameters requires a gradient",
        "unfreeze them first (requires_grad_(True)), or leave this backward pass out",
        again=calling_line(),
    )


def cleared_in_window(name: str, micro_step: int, window: int) -> ProtocolError:
    return error(
        "accumulation-broken",
        f"the gradients of `{name}` were cleared after micro-step {micro_step} of {window}: what was accumulated is lost",
        "delete the zero_grad() call: amp.step() clears the gradients at the end of each window",
        again=calling_line(),
    )


def stale_flat(name: str) -> ProtocolError:
    return error(
        "stale-parameters",
        f"`{name}` updates a flat buffer whose gradient is not where the model's gradients are: its weights would "
        "never move",
        "keep gradients in place: zero_grad(set_to_none=False), or amp.step(), which clears them so",
        again=calling_line(),
    )


def direct_step(name: str, scale: float, backward: Line | None) -> ProtocolError:
    return error(
        "bypassed-scaler",
        f"optimizer.step() of `{name}` with gradients that are {scale:g} times too large: they carry the loss scale",
        "call amp.step(optimizer) instead",
        first=backward,
        again=calling_line(),
    )


def of_breach(cause: str, name: str, first: Line | None) -> ProtocolError:
    """What the state machine objects to."""
    what, do = _BREACHES.get(cause, ("the gradients of `{name}` are not what they should be", "see the explanation"))
    return error(cause, what.format(name=name), do, first, calling_line())


_BREACHES = {
    "double-unscale": (
        "the gradients of `{name}` were unscaled twice",
        "delete the second amp.unscale_(): amp.step() sees that they are unscaled already",
    ),
    "accumulation-broken": (
        "amp.backward() added scaled gradients to those of `{name}` that amp.unscale_() had unscaled already",
        "call amp.unscale_() once, after the last amp.backward() of the step",
    ),
    "unscaled-backward": (
        "`{name}` holds a sum of scaled and unscaled gradients",
        "call amp.backward(loss) instead of loss.backward() for every loss",
    ),
}
