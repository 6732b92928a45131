"""The probe of CUDA graphs: between the beginning and the end of a capture the guard stays out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ampguard import compat
from ampguard.capture.probing.aliases import names_of
from ampguard.capture.probing.probe import Probe
from ampguard.errors import ReplayError


class DeviceGraphProbe(Probe):
    """Tells the recorder when a CUDA graph is captured, and when one is replayed."""

    def install(self) -> None:
        kind = torch.cuda.CUDAGraph
        if all(hasattr(kind, name) for name in ("capture_begin", "capture_end", "replay")):
            self._patches.replace(kind, "capture_begin", self._watch_begin)
            self._patches.replace(kind, "capture_end", self._watch_end)
            self._patches.replace(kind, "replay", self._watch_replay)
        make = torch.cuda.make_graphed_callables
        for module, name in [(torch.cuda, make.__name__), (torch.cuda.graphs, make.__name__), *names_of(make)]:
            self._patches.replace(module, name, self._watch_making)

    def _watch_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        captures = self._recorder.captures

        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_in_a_replay_of_ours("captures")
            captures.begin(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                captures.end(graph, is_captured=False)
                raise

        return capture_begin

    def _watch_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        captures = self._recorder.captures

        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            is_captured = False
            try:
                result = original(graph, *args, **kwargs)
                is_captured = True
                return result
            finally:
                captures.end(graph, is_captured)

        return capture_end

    def _watch_replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        captures, guarded = recorder.captures, recorder.barrier.call

        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_in_a_replay_of_ours("replays")
            is_mine = recorder.turns.thread == get_ident() and not compat.is_of_inductor(sys._getframe(1))
            is_followed = recorder.active and not recorder.paused and is_mine
            if is_followed:
                guarded(captures.before_replay, graph)
            result = original(graph, *args, **kwargs)
            if is_followed:
                guarded(captures.after_replay, graph)
            return result

        return replay

    def _watch_making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Its warm-up runs are no steps of the script; and a replay of ours runs what was graphed as it was before."""
        captures, guarded = self._recorder.captures, self._recorder.barrier.call

        @functools.wraps(original)
        def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
            plain = guarded(compat.forwards_of, callables) or []
            token = object()
            captures.begin(token, is_one=False)
            try:
                made = original(callables, *args, **kwargs)
            finally:
                captures.end(token, is_captured=False)
            guarded(compat.note_graphed, plain)
            return made

        return make_graphed_callables


def _refuse_in_a_replay_of_ours(does: str) -> None:
    """A graph of the script's would write over results that the script still holds, and read its weights, not ours."""
    if compat.is_without_graphs():
        raise ReplayError(f"the model {does} a CUDA graph in its forward pass, which writes into memory of the script")
