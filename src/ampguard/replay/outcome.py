"""What one replay of a step came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ampguard.capture.record import Line, Ref
from ampguard.replay.trace import Trace
from ampguard.replay.variants import Captured


@dataclass(slots=True)
class Outcome:
    """What a replay came to.

    `is_bad`: the result that was bad is bad again. `is_exact`: every result that can still be compared is bitwise the
    one of the step itself. `loss` is the first target where it is a single number.
    """

    is_bad: bool
    is_exact: bool
    trace: Trace
    targets: list[tuple[str, Tensor]] = field(default_factory=list)
    loss: float | None = None
    seconds: float = 0.0
    error: BaseException | None = None
    captured: dict[int, Captured] = field(default_factory=dict)
    zero_shares: dict[int, float] = field(default_factory=dict)
    output_names: dict[Ref, str] = field(default_factory=dict)
    """What the tensors are called in the results of the root modules (`['loss_box']`)."""
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Each parameter of the script that has a gradient, and that gradient."""
    stand_ins: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Storage of a clone that the replay used, to (the clone, the script's own tensor)."""
    own_casts: tuple[Line, ...] = ()
    """Lines within modules that left autocast which cast to low precision all the same; in the replay they did not."""
    has_true_derivatives: bool = True
    """False where an operator was changed and its derivative is still that of the operator as it ran."""
