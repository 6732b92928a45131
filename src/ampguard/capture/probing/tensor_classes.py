"""The probe of tensor classes: those of the script's own that are asked about each call are not to be asked by the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampguard import compat
from ampguard.capture.probing.probe import Probe


class TensorClassProbe(Probe):
    """Learns of the classes that there are, and of each that is defined from now on."""

    def install(self) -> None:
        compat.note_known_classes()
        self._patches.replace(Tensor, "__init_subclass__", self._watch)

    def _watch(self, original: Any) -> Any:
        guarded = self._recorder.barrier.note
        is_own: Callable[..., Any] | None = original.__func__ if isinstance(original, classmethod) else None

        def __init_subclass__(cls: type[Tensor], /, **kwargs: Any) -> None:  # noqa: N807
            if is_own is not None:
                is_own(cls, **kwargs)
            else:
                super(Tensor, cls).__init_subclass__(**kwargs)
            guarded(compat.note_class, cls)

        return classmethod(__init_subclass__)
