"""gradient-underflow, suspected: gradients that stand at the lower edge of float16.

A share of zeros alone says nothing: ReLU, dropout and unused embedding rows make as many. What gives it away is that
the gradients that are left are whole multiples, 1 to 8 times, of the smallest number that float16 has, which is what
the flushed ones were a little smaller than. Where many of them are, few zeros are enough: a sum over many positions is
seldom 0, though most of its terms are lost. Where nothing is left there is no telling. A replay at another loss scale can
prove it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampguard.capture.sampling.weights import LayerSample, WeightSample
from ampguard.diagnose.dynamics.finding import Situation

ZERO_SHARE = 0.3
FAINT_SHARE = 0.2
MANY_FAINT = 0.3
SETTLED = 2
SHOWN = 8


def gradient_underflow(situation: Situation) -> Iterator[str]:
    """A note on the layers of the newest look that seem to lose gradients, if any."""
    look = situation.trajectory.looks[-1]
    suspects = [layer for layer in look.layers if is_suspect(layer, look.step) and layer.parameter() is not None]
    is_new = faint_since(situation.trajectory.looks) == look.step
    if not suspects or (look.step & (look.step - 1) and not is_new):
        return  # told at steps 1, 2, 4, 8..., and when it begins: a note, not a log
    names = []
    for layer in suspects[:SHOWN]:
        parameter = layer.parameter()
        name = situation.name_of(parameter) if parameter is not None else None
        names.append(f"{name or 'a parameter'} {layer.zeros / layer.elements:.0%}")
    yield f"gradients at float16's lower edge, and the share that is exactly 0: {', '.join(names)}"


def faint_since(looks: Sequence[WeightSample]) -> int | None:
    """The first of the newest optimizer's looks in a row in which some gradients stood at float16's lower edge, or all were 0;
    where none stands there now, in which those layers had nothing but zeros that have nothing else now. None: not now.

    One layer of zeros says nothing else: it may be behind one that was initialised to zero.
    """
    since = None
    dead = (
        set[int]()
        if any(map(_is_partly_faint, looks[-1].layers))
        else set(map(_key, filter(_is_dead, looks[-1].layers)))
    )
    for look in reversed(looks):
        if look.optimizer() is not looks[-1].optimizer():
            continue
        are_zero = [_is_dead(layer) for layer in look.layers]
        mine = [layer for layer in look.layers if _key(layer) in dead]
        is_dead = bool(mine) and all(map(_is_dead, mine))
        if not all(are_zero) and not is_dead and not any(map(_is_partly_faint, look.layers)):
            break
        since = look.step
    return since


def _key(layer: LayerSample) -> int:
    return id(layer.parameter())


def _is_dead(layer: LayerSample) -> bool:
    return layer.zeros == layer.elements


def _is_partly_faint(layer: LayerSample) -> bool:
    return not _is_dead(layer) and is_faint(layer)


def is_suspect(layer: LayerSample, step: int) -> bool:
    """Many zeros, and a good part of what is not zero at the lower edge; or more of it; or nothing but zeros, though not
    at the start.

    A layer behind one that was initialised to zero has no gradient in the first step, and a run that fails at once has
    another trouble.
    """
    if _is_dead(layer):
        return step >= SETTLED
    if step == 0:
        return False
    return is_faint(layer)


def is_faint(layer: LayerSample) -> bool:
    """Whether a good part of the gradients that are not zero are a few times the smallest number that float16 has."""
    left = layer.elements - layer.zeros
    faint = FAINT_SHARE if layer.zeros >= ZERO_SHARE * layer.elements else MANY_FAINT
    return layer.faint >= faint * max(left, 1)
