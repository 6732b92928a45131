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
    """Tells the mode that sees the operators (the tape, or that of a replay) what is made a dual number, and taken out of one.

    `torch.func.jvp`, `jacfwd`, `hessian` and `torch.autograd.functional` come by the same way.
    """

    def install(self) -> None:
        recorder = self._recorder
        guarded = recorder.barrier.call

        def tell(tangents: tuple[Any, ...], is_made: bool) -> None:
            mode = compat.top_dispatch_mode()
            if mode is None and recorder.tape.is_on_stack:
                mode = recorder.tape
            if isinstance(mode, compat.DispatchMode):
                for tangent in tangents:
                    guarded(_note, mode, tangent, is_made)

        def watch_make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def make_dual(tensor: Any, tangent: Any, *args: Any, **kwargs: Any) -> Any:
                if not compat.is_compiling():
                    tell((tangent,), is_made=True)
                return original(tensor, tangent, *args, **kwargs)

            return make_dual

        def watch_unpack(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def unpack_dual(*args: Any, **kwargs: Any) -> Any:
                unpacked = original(*args, **kwargs)
                if not compat.is_compiling():
                    tell(unpacked, is_made=False)
                return unpacked

            return unpack_dual

        def watch_level(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def enter_dual_level(*args: Any, **kwargs: Any) -> Any:
                if recorder.active and not recorder.paused and not compat.is_compiling():
                    guarded(recorder.tape.begins_dual_level)
                return original(*args, **kwargs)

            return enter_dual_level

        forward_ad = torch.autograd.forward_ad
        self._patches.replace(forward_ad, "make_dual", watch_make)
        self._patches.replace(forward_ad, "unpack_dual", watch_unpack)
        self._patches.replace(forward_ad, "enter_dual_level", watch_level)


def _note(mode: compat.DispatchMode, tangent: Any, is_made: bool) -> None:
    if isinstance(tangent, Tensor):
        mode.met_tangent(compat.without_transforms(tangent), is_made)
