"""The scene of a breach: its numbers and places in the words of the user's code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.models import Models
from ampguard.capture.protocol.script_lines import framework_in
from ampguard.capture.protocol.watches import ScalerWatch
from ampguard.capture.record import Line
from ampguard.diagnose.locate.cuts import Cut, cuts, holder
from ampguard.diagnose.protocol.owners import (
    common_module,
    only_optimizer,
    parameter_names,
    repeated_in,
    tensor_called,
    variable_name,
    whole_modules,
)
from ampguard.incident import Incident
from ampguard.protocol.events import Breach

MAX_NAMES = 12
NAMELESS = "the optimizer"


class Scene:
    """Built in the frame of the breach, while the script's names can be looked up."""

    def __init__(
        self,
        breach: Breach,
        models: Models,
        trained: Callable[[], list[Tensor]] = list,
        spoiled_by: Callable[[str | None], Incident | None] = lambda name: None,
        told: Callable[[str], Incident | None] = lambda cause: None,
    ) -> None:
        """`trained` gives what optimizers move, in a module or not; `spoiled_by` the incident that has made the buffer of a
        name bad, or the parameters (None); `told` the last one of a cause."""
        self.spoiled_by = spoiled_by
        self.told = told
        self.breach = breach
        self.facts = breach.facts
        self.first: Line | None = breach.first
        self.again: Line | None = breach.again
        self._models = models
        self._trained = trained
        self.optimizer = self.name_of(breach.optimizer) or only_optimizer() or NAMELESS
        self.scaler = self.name_of(breach.scaler) or "scaler"
        self.framework = _framework(breach.scaler, breach.optimizer)
        """Whose loop it is, where a framework drives the scaler."""
        self.parameters = self._names(breach.facts.get("parameters") or [])

    @staticmethod
    def name_of(watch: Any) -> str | None:
        """What the script calls an optimizer or a scaler; its class and number where no name is found."""
        if not isinstance(watch, (OptimizerWatch, ScalerWatch)):
            return None
        subject = watch.ref()
        if subject is None:
            return None
        if isinstance(watch, ScalerWatch):
            return variable_name(subject)
        return variable_name(subject) or f"{type(subject).__name__} number {watch.number}"

    @staticmethod
    def name_of_object(subject: object) -> str | None:
        """What the script calls it, where it does."""
        return variable_name(subject) if subject is not None else None

    def paths_of_optimizer(self) -> list[str]:
        """`optimizers['a']`, `optimizers['b']`, where one container of the script holds the optimizer more than once."""
        watch = self.breach.optimizer
        subject = watch.ref() if isinstance(watch, OptimizerWatch) else None
        return repeated_in(subject) if subject is not None else []

    def _names(self, parameters: list[Tensor]) -> list[str]:
        names = parameter_names(self._models.roots(), parameters) if parameters else {}
        self._all_names = frozenset(names.values())
        return [names.get(id(p)) or tensor_called(p) for p in parameters]

    def hangs_in_module(self, name: str) -> bool:
        """Whether this name of a parameter is that of a module and an attribute, and not what the script calls it."""
        return name in self._all_names

    def cuts(self) -> list[Cut]:
        """Where the way from the loss to the parameters in question is cut."""
        return cuts(self._models.record(), self.breach.facts.get("parameters") or [])

    def holder(self) -> Line | None:
        """Where a module that holds the parameters in question is called for the loss, and lets gradients through itself."""
        call = holder(self._models.record(), self.breach.facts.get("parameters") or [])
        return call.line if call is not None else None

    def in_model(self, name: str, saved: Tensor) -> Tensor | None:
        """The parameter or buffer that a tensor of a checkpoint is, or is a copy of: by its memory, else by its name."""
        here = self._by_memory.get(compat.storage_key(saved))
        if here is not None:
            return here
        return next((t for k, t in self._state.items() if t.shape == saved.shape and _is_named(name, k)), None)

    def is_trained(self, tensor: Tensor) -> bool:
        """Whether it wants a gradient, or an optimizer moves it."""
        return tensor.requires_grad or compat.storage_key(tensor) in {compat.storage_key(p) for p in self._trained()}

    @cached_property
    def _state(self) -> dict[str, Tensor]:
        return self._models.state()

    @cached_property
    def _by_memory(self) -> dict[int, Tensor]:
        known = {compat.storage_key(t): t for t in (*self._state.values(), *self._trained())}
        return {key: tensor for key, tensor in known.items() if key}

    @property
    def module(self) -> str | None:
        """The module that owns all the parameters in question."""
        return common_module([name for name in self.parameters if self.hangs_in_module(name)])

    def owners(self) -> list[str]:
        """What a person would name: the modules that own nothing but the parameters in question, and single parameters."""
        return whole_modules(self.parameters, self._all_names)

    def others(self, watches: Any) -> str:
        """Names of other optimizers."""
        return "`, `".join(filter(None, (self.name_of(watch) for watch in watches)))

    @property
    def factor(self) -> str:
        """ "65536 times too large", "too small": by how much the gradients are wrong."""
        return factor_words(self.breach.factor)


def is_one_line(scene: Scene) -> bool:
    """Whether both places of a breach are the same line of the script."""
    first, again = scene.first, scene.again
    return first is not None and again is not None and (first.code, first.number) == (again.code, again.number)


def _is_named(one: str, other: str) -> bool:
    """Whether two dotted names are the same but for a prefix of one of them.

    >>> _is_named("model.head.bias", "head.bias"), _is_named("ahead.bias", "head.bias")
    (True, False)
    """
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def _framework(scaler: Any, optimizer: Any) -> str | None:
    """Seen when the first loss was scaled; where none was, in the call that PyTorch has refused."""
    if isinstance(scaler, ScalerWatch) and scaler.uses:
        return scaler.driver
    return framework_in(sys._getframe(2)) if optimizer is not None else None


def factor_words(factor: float | None) -> str:
    """
    >>> factor_words(65536.0), factor_words(2**-16), factor_words(2.0)
    ('65536 times too large', '65536 times too small', '2 times too large')
    """
    if factor is None or not factor > 0:
        return "wrong by the loss scale"
    times, way = (factor, "large") if factor > 1 else (1 / factor, "small")
    return f"{number(times)} times too {way}"


def number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and value < 1e12 else f"{value:.4g}"


def at(line: Line | None) -> str:
    """ "train.py:88 (`scaler.unscale_(opt_d)`)"."""
    if line is None:
        return "an unknown line"
    code = line.location().code
    return f"{place_of(line)} (`{code}`)" if code else place_of(line)


def place_of(line: Line) -> str:
    """ "train.py:88"."""
    place = line.location()
    return f"{place.file.rsplit('/', 1)[-1]}:{place.line}"


def statement(line: Line | None) -> str:
    """The code of a line without a comment behind it; empty where there is no line."""
    return line.location().code.partition("  #")[0].rstrip() if line is not None else ""


def listed(names: list[str], most: int = 4) -> str:
    """
    >>> listed(["a", "b", "c"], most=2)
    '`a`, `b` and 1 more'
    """
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
