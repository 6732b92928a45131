"""A layer that was replaced or re-created after `Amp` was made: it gets gradients, and no optimizer holds it.

Nobody can be asked at each step which parameters the models have: that is a walk through all modules. But what was replaced
gets no gradient any more. So the models are looked at when more parameters of an optimizer are without one than ever before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ampguard import compat
from ampguard.engine import misuse
from ampguard.engine.holding import Holding
from ampguard.engine.setup import parameter_names

logger = logging.getLogger("ampguard")

NAMED = 3
"""Parameters that a sentence names."""


def refuse_replaced(
    models: Mapping[str, nn.Module],
    holdings: Sequence[Holding],
    names: Mapping[int, str],
    parameter_of: Callable[[Tensor], Tensor],
    is_scaled: bool,
) -> None:
    """Raise ProtocolError where parameters of a model are gone and others, which no optimizer holds, have gradients.

    `names`: those that the models had when they were last looked at. Without a loss scale it is a warning: an optimizer of
    the loop's own may update them. What was merely taken out of a model is let be.
    """
    for holding in holdings:
        holding.misses_more = False
    present = {id(p): p for model in models.values() for p in compat.all_parameters(model)}
    held = [(holding, parameter_of(p)) for holding in holdings for p in holding.parameters]
    of_holdings = {id(p) for _, p in held}
    gone = [(holding, p) for holding, p in held if id(p) in names and id(p) not in present]
    new = [p for key, p in present.items() if key not in names and key not in of_holdings and p.grad is not None]
    if not gone or not new:
        return
    found = parameter_names(models)
    shown = _listed([found.get(id(p), f"a tensor {tuple(p.shape)}") for p in new])
    was = _listed([names[id(p)] for _, p in gone])
    error = misuse.error(
        "stale-parameters",
        f"{shown} of the model came after Amp was made, and no optimizer holds {'it' if len(new) == 1 else 'them'}: "
        f"`{gone[0][0].name}` goes on holding what was {was}, and the new weights never move",
        "change the model first, and make its optimizer and Amp then; or put the new parameters into the optimizer "
        "(optimizer.add_param_group, or in place of the old ones in optimizer.param_groups)",
        again=misuse.calling_line(),
    )
    if is_scaled:
        raise error
    logger.warning("%s", error)


def _listed(names: Sequence[Any]) -> str:
    rest = len(names) - NAMED
    return ", ".join(f"`{name}`" for name in names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
