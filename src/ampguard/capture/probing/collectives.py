"""The probe of the script's own collectives: what they bring is kept, and a replay is given that instead of calling them."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.frames import is_user_code
from ampguard.capture.probing.probe import Probe
from ampguard.capture.ranks.collectives import POSTED, RESULTS, SENDS, Call
from ampguard.capture.root_calls.trees import tensors_in

DIFFERENTIABLE = "torch.distributed.nn.functional"
"""PyTorch's module of collectives with a derivative: it calls them for the script."""


class CollectiveProbe(Probe):
    """Tells the recorder of collectives that the script calls, not of PyTorch's own (DDP's, FSDP's)."""

    def install(self) -> None:
        if not torch.distributed.is_available():
            return
        for name, position in RESULTS.items():
            if hasattr(torch.distributed, name):
                self._patches.replace(torch.distributed, name, functools.partial(self._watch, name, position))
        for name in SENDS:
            if hasattr(torch.distributed, name):
                self._patches.replace(torch.distributed, name, functools.partial(self._watch, name, None))
        if hasattr(torch.distributed, "P2POp"):
            for name in ("__new__", "__init__"):
                self._patches.replace(torch.distributed.P2POp, name, _of_pytorchs_own)

    def _watch(self, name: str, position: int | None, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        collectives, guarded = recorder.collectives, recorder.barrier.call
        parameters = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # Dynamo follows this, and knows its own function behind it
                return original(*args, **kwargs)
            frame = sys._getframe(1)
            if compat.is_compiling() or not is_the_scripts(frame):
                return original(*args, **kwargs)
            given = dict(zip(parameters, args, strict=False)) | kwargs
            if collectives.replay is not None and recorder.paused:
                collectives.replay.called(call_of(name, given, parameters, position))
                return _answer(name, given)
            if not recorder.active or recorder.counting or position is None:
                return original(*args, **kwargs)
            is_outside = not recorder.paused and recorder.turns.thread == threading.get_ident()
            call = guarded(call_of, name, given, parameters, position) if in_a_group() else None
            begun = guarded(collectives.before, call, is_outside, frame) if call is not None else None
            paused, recorder.paused = recorder.paused, True
            try:
                handle = original(*args, **kwargs)
            finally:
                recorder.paused = paused
            if call is not None and begun is not None:
                guarded(collectives.after, call, begun, is_outside, frame)
            return handle

        return collective


def call_of(name: str, given: dict[str, Any], parameters: list[str], position: int | None) -> Call:
    """What a collective is asked to do. `given`: its arguments by name. `position`: of what it writes to; None: nothing."""
    first = given.get(parameters[position]) if position is not None else None
    if name == "batch_isend_irecv":
        first = [p2p.tensor for p2p in first or () if p2p.op.__name__ == "irecv"]
    objects = first if "_object" in name and isinstance(first, list) else None
    written = tensors_in(first) if "_object" not in name else []
    is_sum = given.get("op", torch.distributed.ReduceOp.SUM) == torch.distributed.ReduceOp.SUM
    mine, put_in = None, None
    if name == "all_gather":
        rank = torch.distributed.get_rank(given.get("group"))
        mine, put_in = (rank if rank >= 0 else None), given.get(parameters[1])
    is_done = not given.get("async_op") and name not in POSTED
    return Call(name, written, put_in, mine, is_sum, is_done, objects)


def _answer(name: str, given: dict[str, Any]) -> Any:
    """What a collective returns that is not called."""
    if name == "batch_isend_irecv":
        return [Done() for _ in given.get("p2p_op_list", ())]
    if given.get("async_op") or name in POSTED:
        return Done()
    return given.get("src") if name in ("recv", "recv_object_list") else None


def _of_pytorchs_own(original: Any) -> Any:
    """`P2POp` takes `isend` and `irecv` by identity, and calls them later: it is given those that stand behind ours."""

    here = sys.modules[torch.distributed.P2POp.__module__]
    own = {id(function): function for name in ("isend", "irecv") if (function := getattr(here, name, None)) is not None}

    def behind(op: Any) -> Any:
        return own.get(id(getattr(op, "__wrapped__", None)), op)

    @functools.wraps(original)
    def make(first: Any, *args: Any, **kwargs: Any) -> Any:
        if "op" in kwargs:
            kwargs["op"] = behind(kwargs["op"])
        elif args:
            args = behind(args[0]), *args[1:]
        return original(first, *args, **kwargs)

    return staticmethod(make) if isinstance(original, staticmethod) else make


def in_a_group() -> bool:
    """Whether there is anybody to send to; else PyTorch raises."""
    return torch.distributed.is_initialized()


class Done:
    """The handle of a collective that was not called."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def is_the_scripts(frame: Any) -> bool:
    """Whether a collective that is called in this frame is the script's, a library's included."""
    return is_user_code(frame.f_code) or frame.f_globals.get("__name__") == DIFFERENTIABLE
