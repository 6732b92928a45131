"""What a step was given and nobody recorded, computed again from the script's own variables.

Late in a run of short steps, what a script computes behind a rollout or a teacher's call may be passed over. But where the
failure is explained, the script's variables still stand: the expression that was assigned to the bad one is computed once
more, if it only computes, and if it gives the very values that the step read, its operators are put in front of the record.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from typing import Any

import msgspec
import torch
from torch import Tensor

from ampguard.capture.frames import frames_here, locals_of
from ampguard.capture.glue.told import is_plain, operators_in, shifted
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import BackwardCall, BadResult, Event, GlueOp, Held, Line, Ref, StepRecord
from ampguard.diagnose.code.assigned import assigned_to
from ampguard.diagnose.code.pure import is_pure
from ampguard.diagnose.code.source import line_of_code
from ampguard.diagnose.evidence import Evidence
from ampguard.incident import Incident
from ampguard.replay.sandbox import neutral_thread, quiet
from ampguard.replay.trace import identical, is_like

MAX_FRAMES = 60
MAX_OPERATORS = 64


def with_what_made_it(bad: BadResult, evidence: Evidence) -> BadResult | None:
    """The bad result with what made the given tensor in its record; None where that cannot be computed again."""
    tensor, values = evidence.given_tensor, evidence.given_values
    if evidence.intended or tensor is None or values is None or tensor.requires_grad:
        return None
    if not any(held.tensor is tensor for _, _, held in evidence.held()):
        return None
    operators = _operators_of(tensor, values)
    events = bad.record.events
    if not operators or not events or events[0].index < len(operators):
        return None
    first = events[0].index - len(operators)
    for op in operators:
        op.index += first
        op.args, op.kwargs = shifted(op.args, first), shifted(op.kwargs, first)
    made = Ref(operators[-1].index, 0)
    record = bad.record
    renamed: list[Event] = [*operators, *(_given(event, tensor, made) for event in events)]
    return dataclasses.replace(
        bad,
        record=StepRecord(renamed, record.complete, record.writers, min(record.iteration_start, first)),
        targets=tuple(_named(target, tensor, made) for target in bad.targets),
    )


def told(incident: Incident) -> Incident:
    """Said with the incident that comes of it."""
    text = (
        " What made it was not recorded: it was computed again from the script's variables, which gave the same values."
    )
    return msgspec.structs.replace(
        incident, explanation=incident.explanation + text, evidence=incident.evidence | {"computed_again": True}
    )


def _operators_of(tensor: Tensor, values: Tensor) -> list[GlueOp]:
    """Those that give these values once more; none where the script's code does not say what made a tensor."""
    for frame in frames_here(sys._getframe(1), MAX_FRAMES):
        if not is_script_code(frame.f_code):
            continue
        variables = locals_of(frame)
        name = next((name for name, value in variables.items() if value is tensor), None)
        line = line_of_code(Line(frame.f_code, frame.f_lineno)) if name is not None else None
        expression = (
            assigned_to(line.source, name, frame.f_lineno, is_checked=False) if line is not None and name else None
        )
        names = {**frame.f_globals, **variables}
        if expression is None or not is_pure(expression, names):
            continue
        code = compile(ast.Expression(expression), frame.f_code.co_filename, "eval")
        with neutral_thread(), quiet(), torch.no_grad():
            operators, output = operators_in(lambda c=code, n=names: eval(c, n))  # type: ignore[misc]
            if not isinstance(output, Tensor) or not is_like(output, values) or not identical(values, output):
                continue
        if len(operators) > MAX_OPERATORS or not all(map(is_plain, operators)):
            continue
        for op in operators:
            if op.line is not None and op.line.code is code:
                op.line = Line(frame.f_code, op.line.number)
        return operators
    return []


def _given(event: Event, tensor: Tensor, made: Ref) -> Event:
    """The event, given what an operator made in place of the script's tensor."""
    args = _named(event.args, tensor, made)
    if isinstance(event, BackwardCall):
        return dataclasses.replace(event, args=args)
    return dataclasses.replace(event, args=args, kwargs=_named(event.kwargs, tensor, made))


def _named(tree: Any, tensor: Tensor, made: Ref) -> Any:
    if isinstance(tree, Held):
        return made if tree.tensor is tensor and tree.copy is None else tree
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        items = [_named(item, tensor, made) for item in tree]
        return tuple(items) if type(tree) is tuple else items
    if isinstance(tree, dict):
        return {key: _named(item, tensor, made) for key, item in tree.items()}
    return tree
