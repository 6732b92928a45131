"""The probe of forward-mode derivatives: which tensors are tangents, from where to where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.probing.probe import Probe


class ForwardModeProbe(Probe):
    """Tells the mode that sees the operators (the tape, or that of a replay) which tensors `torch.func.jvp` is given as
    tangents, and which it returns; and the tape that dual numbers are in use.

    `jacfwd` and `hessian` come by the same way. Functions of `torch.autograd.forward_ad` are left alone: Dynamo knows them
    by their names, and compiles no others in their place.
    """

    def install(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def tell(tangents: Any, is_made: bool) -> None:
            mode = compat.top_dispatch_mode()
            if mode is None and recorder.tape.is_on_stack:
                mode = recorder.tape
            if isinstance(mode, compat.DispatchMode):
                guarded(_note, mode, tangents, is_made)

        def watch_slopes(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def jvp_with_argnums(func: Any, primals: Any, tangents: Any, *args: Any, **kwargs: Any) -> Any:
                if compat.is_compiling():
                    return original(func, primals, tangents, *args, **kwargs)
                tell(tangents, is_made=True)
                result = original(func, primals, tangents, *args, **kwargs)
                tell(result[:2], is_made=False)
                return result

            return jvp_with_argnums

        def watch_level(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def enter(level: Any) -> Any:
                if not compat.is_compiling() and recorder.active and not recorder.paused:
                    guarded(recorder.tape.begins_dual_level)
                return original(level)

            return enter

        place = compat.functional_slope()
        if place is not None:
            self._patches.replace(*place, watch_slopes)
        self._patches.replace(torch.autograd.forward_ad.dual_level, "__enter__", watch_level)


def _note(mode: compat.DispatchMode, tangents: Any, is_made: bool) -> None:
    for tangent in compat.tree_leaves(tangents):
        if isinstance(tangent, Tensor):
            mode.met_tangent(compat.without_transforms(tangent), is_made)
