"""`ampguard.force_fp32`, in its three forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import nn

from ampguard.engine.force_fp32.modules import ForcedModules, force_modules
from ampguard.engine.force_fp32.region import Region, decorated, is_descriptor
from ampguard.engine.patterns import listed_patterns
from ampguard.errors import PatternError

F = TypeVar("F", bound=Callable[..., Any])


@overload
def force_fp32(  # type: ignore[overload-overlap]
    target: nn.Module, /, *patterns: str, cast_back: bool = True
) -> ForcedModules: ...
@overload
def force_fp32(target: F, /, *, cast_back: bool = True) -> F: ...
@overload
def force_fp32(*values: Any, cast_back: bool = True) -> Region: ...
def force_fp32(*values: Any, cast_back: bool = True) -> Any:
    """Run something in float32: inputs cast, autocast left, results cast back to the type of the inputs.

        ampguard.force_fp32(model, "blocks.*.attn", "head")      # modules by pattern; .undo() reverts it

        @ampguard.force_fp32                                     # a function, a method, a property, a module class
        def scan(u, delta, A, B, C): ...

        with ampguard.force_fp32(q, k) as (q, k):                # a few lines; what comes out stays float32
            scores = q @ k.transpose(-2, -1)

    With `cast_back=False` results stay float32: for a module whose own result does not fit the low precision.
    """
    target = values[0] if values else None
    if isinstance(target, str):
        raise PatternError(
            f"force_fp32({target!r}): patterns name modules of a model, which is missing\n"
            f"  do    force_fp32(model, {target!r}), or Amp(..., force_fp32=[{target!r}])"
        )
    if isinstance(target, nn.Module):
        if not values[1:]:
            raise PatternError("force_fp32(model) needs patterns; to force all of it, write force_fp32(model, '')")
        return force_modules(target, listed_patterns(values[1:]), cast_back)
    if callable(target) or is_descriptor(target):
        return decorated(target, cast_back)
    return Region(values, cast_back)
