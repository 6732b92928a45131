"""Gradients that a hook of the script's made bad after they had been added up: no replay of the step shows it.

Such hooks are not run again: some let an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import BadResult, Line, RootCall
from ampguard.incident import Incident
from ampguard.numerics import dtype_name, is_finite
from ampguard.replay.names import module_names, parameter_names

MAX_NAMES = 4


def changed_by_a_hook(bad: BadResult, rank: int) -> Incident | None:
    """The incident of gradients that are finite when the step is run again; None where a parameter has no such hook."""
    parameters = [p for p in bad.parameters if p.grad is not None and not is_finite(p.grad)]
    codes = [_last_code(compat.hooks_behind_leaf(parameter)) for parameter in parameters]
    if not codes or any(code is None for code in codes):
        return None
    code = codes[0]
    assert code is not None
    line = Line(code, code.co_firstlineno)
    place = line.location()
    names = _names(parameters, bad)
    listed = ", ".join(f"`{name}`" for name in names[:MAX_NAMES]) + (" and others" if len(names) > MAX_NAMES else "")
    return Incident(
        step=bad.step,
        rank=rank,
        mode=bad.mode,
        phase="backward",
        severity="error",
        cause="unexplained",
        module=None,
        op=None,
        dtype=dtype_name(parameters[0].dtype),
        location=place,
        explanation=(
            f"The gradients of {listed} are not finite after the hook `{place.full_name}` ran on them: in the same step run "
            f"again, without it, they are finite. It is registered with `register_post_accumulate_grad_hook`, and its code "
            f"begins at {place.file.rsplit('/', 1)[-1]}:{place.line}. Look there first for a division by something that "
            f"can be 0."
        ),
        evidence={"rung": "none", "parameters": {"nonfinite": names}, "hook": place.full_name},
    )


def _last_code(hooks: dict[int, Callable[..., Any]] | None) -> CodeType | None:
    """The code of the last hook that the script wrote itself."""
    codes = [code for hook in (hooks or {}).values() if (code := _code(hook)) is not None and is_script_code(code)]
    return codes[-1] if codes else None


def _code(hook: Callable[..., Any]) -> CodeType | None:
    function = getattr(hook, "func", hook)  # a partial
    function = getattr(function, "__func__", function)  # a method
    code = getattr(function, "__code__", None)
    if code is None:  # an object that can be called
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _names(parameters: list[Tensor], bad: BadResult) -> list[str]:
    modules: dict[int, str] = {}
    for event in bad.record.events:
        if isinstance(event, RootCall):
            modules = module_names(event.module, event.prefix) | modules
    names = parameter_names(bad.record.events, modules)
    return [names.get(id(p)) or f"a parameter of shape {tuple(p.shape)}" for p in parameters]
