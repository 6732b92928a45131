"""Calls in evaluation that are only looked at, while keeping each would cost too much: see `pace`."""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ampguard.capture.raised import is_conversion_refusal, refused_values
from ampguard.capture.recorder import FlightRecorder
from ampguard.capture.root_calls.given_objects import with_objects
from ampguard.capture.root_calls.trees import PLAIN_TYPES, map_tensors

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_PLAIN = PLAIN_TYPES | {Tensor, nn.Parameter, torch.Size, torch.Generator}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class RestingCalls:
    """Has such a call recorded after all where anything is wrong with it."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A call begins. What it was given, where a container or an object is among it, which it may fill (a cache)."""
        recorder = self._recorder
        recorder.tape.leave()
        recorder.passed_over = recorder.steps.count
        pace, backwards = recorder.pace, recorder.steps.backwards
        if pace.is_behind:
            pace.end_behind(recorder.log.kept)
        if pace.backwards == backwards:
            pace.calls += 1
        else:
            pace.count(backwards)
        if recorder.judge.has_open_questions:
            recorder.judge.settle(module, (args, kwargs))
        if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
            return None
        args, kwargs = map_tensors((args, kwargs), _as_it_is)
        return with_objects(args, _as_it_is), with_objects(kwargs, _as_it_is)

    def look_at(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It has returned: are its results finite?"""
        recorder = self._recorder
        if recorder.turns.thread != threading.get_ident():
            return
        if recorder.judge.outputs.wants_to_know(module, output, recorder.pace):
            root = recorder.enter_root(module, args, kwargs)
            if root is not None:
                recorder.leave_root(root, output)
        elif recorder.is_amid_training:
            recorder.resume_tape()  # a teacher's call, in the middle of a loss
        elif (pace := recorder.pace).calls == pace.calls_before and pace.goes_behind(recorder.log.kept):
            recorder.resume_tape()  # a rollout is over

    def look_at_error(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """It has raised: were its numbers why?"""
        recorder = self._recorder
        is_followed = recorder.turns.thread == threading.get_ident()
        if is_followed and (is_conversion_refusal(error) or refused_values(error)):
            root = recorder.enter_root(module, args, kwargs)
            if root is not None:
                recorder.root_raised(root, error)
