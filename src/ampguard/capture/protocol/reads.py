"""Norms that a script computes by hand of gradients that are still scaled, and gradients that it clips by hand.

In the few iterations that are looked at closely, and only between a backward pass and the next call of the protocol,
the functions by which magnitudes are computed and used are wrapped. What is told is not that a scaled norm was
computed but that it was used as if it were not scaled: a ratio of two norms, a norm divided by the scale, a limit
multiplied by it are right.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.frames import is_user_code
from ampguard.capture.protocol import powers
from ampguard.capture.protocol.called_functions import CalledFunctions, CalledMethod
from ampguard.capture.protocol.clipped_samples import ClippedSamples
from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.kept_gradients import KeptGradients
from ampguard.capture.protocol.kept_quantities import KeptQuantities
from ampguard.capture.protocol.moves import Moves
from ampguard.capture.protocol.own_moves import MOVES
from ampguard.capture.protocol.plain_parts import IN_PLACE
from ampguard.capture.protocol.powers import Held, Powers, first_of
from ampguard.capture.protocol.read_verdicts import Clip, Number, Seen, Verdict
from ampguard.capture.protocol.script_lines import script_line
from ampguard.capture.protocol.script_names import spots_of
from ampguard.capture.protocol.script_units import computes_with_scale
from ampguard.capture.protocol.sums import SUMS
from ampguard.capture.record import Line
from ampguard.protocol.states import Stage

_METHODS = tuple(
    name
    for name in sorted(
        powers.KEEPS | set(powers.FACTORS) | powers.POWERS | powers.TIMES | powers.OVER | powers.UNDER
        | powers.COMPARES | powers.COUNTS | powers.READS | {"clamp_", "copy_", "sub_", "__isub__"} | powers.DRAWS_IN_PLACE
        | SUMS | MOVES
    )
    if hasattr(torch.Tensor, name)
)  # fmt: skip
_FUNCTIONS = (
    *((torch, name) for name in ("norm", "abs", "square", "sqrt", "stack", "cat", "sum", "max", "clamp", "mul", "div")),
    *(
        (torch, name)
        for name in (
            "maximum",
            "minimum",
            "mean",
            "sign",
            "pow",
            "reciprocal",
            "rsqrt",
            *sorted(powers.DRAWS - powers.DRAWS_IN_PLACE),
            *powers.COUNTS,
        )
    ),
    *((torch, name) for name in dir(torch) if name in powers.FOREACH),
    *((torch.linalg, "norm"), (torch.linalg, "vector_norm")),
)
_WRITES = frozenset({"add_", "sub_", "__iadd__", "__isub__", "copy_"})
_QUESTIONS = ("isfinite", "isnan", "isinf")
MAX_NUMBERS = 256
OTHER_SCALE = 64.0
"""A smaller scale does not tell a norm that carries it from one that does not."""
SMALLEST_LIMIT = 1e-3
"""Times the scale: what a limit for scaled gradients must at least be, if the scale is in it."""


class ReadWindow:
    """Open between a backward pass and whatever comes next."""

    def __init__(
        self,
        moves: Moves,
        guarded: Callable[..., Any],
        kept: KeptQuantities,
        wrote: Callable[[object, Line | None], None] = lambda *_: None,
    ) -> None:
        """`kept` is told of what outlives the window, `wrote` of what is written to in place, and where."""
        self._moves = moves
        self._kept = kept
        self._wrote = wrote
        self._guarded = guarded
        self._saved: list[tuple[Any, str, Any, Any, bool]] = []
        self._functions = CalledFunctions()
        self._made: dict[tuple[Any, str], tuple[Any, Any]] = {}
        """What was made for the windows before, and of which original: most of what it costs to open one."""
        self._busy = False
        self._arrived: list[int] = []
        """Gradients that were given to a hook just now, by their memory."""
        self._arrived_for: OptimizerWatch | None = None
        """Whose they are, where the hook is one on a parameter."""
        self.is_within_backward = False
        """A backward pass is under way, and what hooks do is looked at."""
        self._seen = Seen()
        self._powers: Powers | None = None
        self._true = KeptGradients()
        self._samples: ClippedSamples | None = None
        """Once `torch.autograd.grad` has returned gradients of a scaled loss."""

    @property
    def is_open(self) -> bool:
        return bool(self._saved)

    def open(self) -> None:
        """Wrap the functions."""
        if self._saved or torch.compiler.is_compiling():
            return
        scale = self._scale()
        if not scale > 1.0:
            return
        carried = self._moves.carried
        self._powers = Powers(scale, is_scaled_loss=lambda loss: carried.is_scaled(loss))
        machine = self._moves.machine
        self._powers.hold(w for w in self._moves.mine() if machine.stage(w).is_scaled)
        self._powers.hold((w for w in self._moves.mine() if machine.stage(w) is Stage.PLAIN), 0.0)
        self._true.window_opens(self._powers)
        self._seen = Seen()
        for name in _METHODS:
            self._replace(torch.Tensor, name, self._watch)
        for module, name in _FUNCTIONS:
            self._functions.replace(module, name, self._watch)
        self._functions.put()
        for owner, name in ((o, n) for n in _QUESTIONS for o in (torch, torch.Tensor)):
            self._replace(owner, name, self._ask)

    def _replace(self, owner: Any, name: str, make: Callable[[Any, str], Any]) -> None:
        original = getattr(owner, name)
        known, replacement = self._made.get((owner, name), (None, None))
        if known is not original:
            replacement = make(original, name)
            if owner is torch.Tensor:
                replacement = CalledMethod(original, replacement)
            self._made[owner, name] = original, replacement
        self._saved.append((owner, name, original, replacement, name in vars(owner)))
        setattr(owner, name, replacement)

    def put_back(self) -> None:
        """Every function is the original again."""
        self._functions.undo()
        for owner, name, original, replacement, was_own in reversed(self._saved):
            if vars(owner).get(name) is not replacement:
                continue
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._saved.clear()

    # --- hooks ----------------------------------------------------------------------------------------------------------

    def before_hooks(self) -> None:
        """A scaled backward pass begins in which hooks of the script's may read gradients."""
        self.open()
        self.is_within_backward = self.is_open
        if self._powers is not None and self.is_open:
            self._moves.scale_was_read = False
            self._powers.hold_weights(self._moves.mine())

    def arrives(self, gradient: Tensor, watch: OptimizerWatch | None) -> None:
        """A hook is about to get this gradient. (What the last one got may be gone, and its memory be something else's.)"""
        whose = watch or next(iter(self._moves.mine()), None)
        if not self.is_within_backward or self._powers is None or whose is None or gradient.layout is not torch.strided:
            return
        if watch is not None:
            for key in self._arrived:
                self._powers.gradients.pop(key, None)
            self._arrived = []
        self._arrived_for = watch
        self._powers.gradients[gradient.data_ptr()] = Held(gradient.numel(), whose)
        self._arrived.append(gradient.data_ptr())

    def behind_hooks(self) -> bool:
        """The backward pass is over. Whether one of them has asked for the scale."""
        was_within, self.is_within_backward = self.is_within_backward, False
        return was_within and self._moves.scale_was_read

    def goes_on(self, knows_scale: bool) -> None:
        """It goes on with the gradients that the pass has left. `knows_scale`: hooks of it have asked for the scale."""
        if self._powers is None or not self.is_open:
            return
        for key in self._arrived:
            self._powers.gradients.pop(key, None)
        self._arrived = []
        machine = self._moves.machine
        self._powers.hold(w for w in self._moves.mine() if machine.stage(w).is_scaled)
        if self._moves.close.clips_in_hook:
            self._seen = Seen()
        with compat.unseen():
            self._seen.plain.hooks_left(self._moves.close.left_by_hooks)
        self._moves.scale_was_read = knows_scale

    def close(self, tell: bool = True) -> None:
        """Put them back; tell what was used as if it were not scaled, unless the script has asked for the scale."""
        self.put_back()
        self.is_within_backward = False
        seen, self._seen = self._seen, Seen()
        found, self._powers = self._powers, None
        self._true.window_closes()
        samples, self._samples = self._samples, None
        seen.clips += samples.clips if samples is not None else []
        is_told = tell and not self._moves.scale_was_read
        if found is not None:
            self._kept.window_closes(found, is_told)
        if found is not None and is_told:
            Verdict(self._moves, seen, found).judge()

    def track(self, norm: Any, watch: OptimizerWatch, where: Line | None) -> None:
        """`norm` was computed, by a function of PyTorch's, from gradients of `watch` that are still scaled."""
        if self._powers is not None:
            self._powers.note(norm, 1.0, watch, where)

    def taken(self, inputs: Any, results: Any, is_scaled: bool, where: Line | None) -> None:
        """`torch.autograd.grad` has returned `results`, of a scaled loss or of one that is not."""
        if self._powers is None:
            return
        wanted = (inputs,) if isinstance(inputs, Tensor) else inputs
        owners = {id(p): watch for watch in self._moves.mine() for p in watch.parameters()}
        pairs = [(gradient, owners.get(id(p))) for p, gradient in zip(wanted, results, strict=False)]
        mine = [(g, w) for g, w in pairs if w is not None and isinstance(g, Tensor) and not g.requires_grad]
        self._kept.taken(mine, float(is_scaled), self._powers, where)
        if is_scaled and mine:
            self._samples = self._samples or ClippedSamples(self._powers.scale)
            self._samples.taken(mine, where)

    def is_scaled(self, norm: Any) -> bool:
        """Whether this is a norm that carries the scale as it is."""
        carried = self._powers.of(norm) if self._powers is not None else None
        return carried is not None and carried[0] == 1.0

    def limit_knows_scale(self, limit: float) -> bool:
        """Whether a limit for scaled gradients was multiplied by the scale, which the script knows by a name."""
        scale = self._scale()
        frames = spots_of(sys._getframe(1), scale) if scale > 1.0 else ()
        return limit >= SMALLEST_LIMIT * scale and any(map(computes_with_scale, frames))

    def may_carry_scale(self, limit: float) -> bool:
        """Whether it is large enough for that."""
        return limit >= SMALLEST_LIMIT * self._scale() > SMALLEST_LIMIT * OTHER_SCALE

    def _scale(self) -> float:
        return next((float(w.current_scale()) for w in self._moves.watches.scalers if w.is_enabled and w.uses), 0.0)

    # --- what happens in it -------------------------------------------------------------------------------------------

    def _ask(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def question(*args: Any, **kwargs: Any) -> Any:
            self._seen.asked_if_finite = True
            return original(*args, **kwargs)

        return question

    def _watch(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        recorder = self._moves.recorder

        @functools.wraps(original)
        def use(*args: Any, **kwargs: Any) -> Any:
            if self._busy or not args or not is_user_code(sys._getframe(1).f_code):
                return original(*args, **kwargs)
            is_paused = recorder.paused and not self.is_within_backward
            if is_paused or not recorder.active or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._busy = True
            try:
                self._guarded(self._before, name, args, kwargs)
                result = original(*args, **kwargs)
                self._guarded(self._after, name, args, kwargs, result)
                self._guarded(self._added, name, args, kwargs, result)
                if self._samples is not None and not self.is_within_backward:
                    self._guarded(self._of_samples, name, args, kwargs, result)
                return result
            finally:
                self._busy = False

        return use

    def _before(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        found = self._powers
        if found is None:
            return
        with compat.unseen():
            if name in _WRITES:
                self._wrote(args[0], script_line(sys._getframe(3)))
            if name in powers.READS:
                self._read(name, args[0], found)
            elif name in powers.COMPARES:
                self._compared(args, found)
            elif name in powers.COUNTS:
                self._counted(args[0], [*args[2:4], *(options[k] for k in ("min", "max") if k in options)], found)
            elif not self.is_within_backward and (name in powers.IN_PLACE or name in ("clamp_", "copy_")):
                self._written(name, args, found)

    def _after(self, name: str, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        found = self._powers
        if found is None or name in powers.READS or name in powers.COMPARES:
            self._number_read(args[0], result)
            return
        with compat.unseen():
            self._multiplied(name, args, options, found)
            target = found.gradient(first_of(args[0]))
            if target is not None and name in powers.IN_PLACE:
                return
            if name in powers.ADDED_PRODUCTS:
                self._product_added(powers.ADDED_PRODUCTS[name], args[1:3], found)
                return
            carried = found.result(name, args)
            if carried is None:
                found.veil(name, args, result)
            else:
                for arg in args[:2]:
                    found.mark_used(arg)
                is_product = target is not None and name in powers.TIMES | powers.OVER and isinstance(result, Tensor)
                if is_product and target is not None and not self.is_within_backward:
                    clip = self._clip(name, args, target.watch, found, sys._getframe(3))
                    self._seen.products.append((weakref.ref(result), clip))
                if result is not args[0] or (name in powers.DRAWS and target is None):
                    is_limited = found.is_limited(name, args, options, carried[0])
                    found.note(result, *carried, script_line(sys._getframe(3)), is_limited, args)

    @staticmethod
    def _product_added(name: str, operands: tuple[Any, ...], found: Powers) -> None:
        """`addcmul_` and its like: the product of two operands goes into a sum."""
        if found.result(name, operands) is None:
            found.veil(name, operands, None)
        else:
            for operand in operands:
                found.mark_used(operand)

    def _number_read(self, value: Any, number: Any) -> None:
        carried = self._powers.of(value) if self._powers is not None else None
        if self._powers is not None and carried is not None and carried[0]:
            known = self._powers.quantity(value)
            self._powers.note_read(number, carried[0], known.where if known is not None else None)

    @staticmethod
    def _multiplied(name: str, args: tuple[Any, ...], options: dict[str, Any], found: Powers) -> None:
        """By a number, perhaps one that takes the scale out."""
        if name in powers.TIMES | powers.OVER and len(args) > 1:
            for value, factor in (args[:2], args[1::-1]):
                carried = found.of(value)
                power = carried[0] if carried is not None else float(found.is_veiled(value))
                if isinstance(factor, float):
                    found.note_factor(factor, power if name in powers.TIMES else -power)
        factor = options.get("alpha", options.get("value"))
        if isinstance(factor, float) and len(args) > 1:
            carried = found.of(args[1])
            found.note_factor(factor, carried[0] if carried is not None else float(found.is_veiled(args[1])))

    def _added(self, name: str, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Has something that carries no scale been added to gradients that do?"""
        if self._powers is None or (self.is_within_backward and self._arrived_for is None):
            return
        with compat.unseen():
            frame = sys._getframe(3)
            if not self.is_within_backward:
                self._kept.called(name, args, options, result, self._powers, frame)
                self._true.copied(name, args, result, self._powers, frame)
            watch = self._seen.plain.is_one(name, args, options.get("alpha", 1), self._powers)
            if watch is None or any(map(computes_with_scale, spots_of(frame, self._powers.scale))):
                return
            if self.is_within_backward:
                self._seen.plain.add_in_hook(watch, script_line(frame), result)
                return
            changes_gradient = name in IN_PLACE and self._powers.gradient(first_of(args[0])) is not None
            self._seen.plain.add(watch, script_line(frame), result, changes_gradient)

    def _of_samples(self, name: str, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        if self._samples is not None and name not in powers.READS | powers.COMPARES:
            with compat.unseen():
                self._samples.called(name, args, options, result, sys._getframe(3))

    def _note_hook(self, where: Line | None) -> None:
        if self.is_within_backward:
            self._seen.in_hooks.add(where)

    def _read(self, name: str, value: Any, found: Powers) -> None:
        carried = found.of(value)
        known = found.quantity(value)
        self._seen.plain.read(value, found)
        if carried is None or not carried[0] or len(self._seen.numbers) >= MAX_NUMBERS or value.numel() > 64:
            return
        found.mark_used(value)
        frame = sys._getframe(4)
        where = known.where if known is not None else script_line(frame)
        in_hook = self.is_within_backward
        spots = list(spots_of(frame, found.scale, in_hook))
        self._note_hook(where)
        self._seen.numbers.append(Number(carried[1], carried[0], where, spots, name in powers.SHOWS, in_hook))

    def _compared(self, args: tuple[Any, ...], found: Powers) -> None:
        sides = [found.of(arg) for arg in args[:2]]
        known = next((side for side in sides if side is not None and side[0]), None)
        if known is None:
            return
        for arg in args[:2]:
            found.mark_used(arg)
        carried = [side[0] if side is not None else found.of_number(a) for side, a in zip(sides, args, strict=False)]
        if len(set(carried)) == 1 or any(isinstance(arg, (int, float)) and not arg for arg in args[:2]):
            return  # two norms of the same kind, or a look at the sign
        quantity = found.quantity(args[0]) or found.quantity(args[1])
        where = quantity.where if quantity is not None else script_line(sys._getframe(4))
        self._note_hook(where)
        self._seen.compared.append((known[1], where))

    def _counted(self, values: Any, limits: list[Any], found: Powers) -> None:
        """Values are counted between limits; those that are 0 both stand for the values' own."""
        carried = found.of(values)
        if carried is None or not carried[0] or not any(limits) or any(found.of_number(limit) for limit in limits):
            return
        found.mark_used(values)
        where = script_line(sys._getframe(4))
        self._note_hook(where)
        self._seen.compared.append((carried[1], where))

    def _written(self, name: str, args: tuple[Any, ...], found: Powers) -> None:
        """Gradients are changed in place by a factor."""
        targets = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
        held = [h for t in targets if (h := found.gradient(t)) is not None]
        if not held:
            return
        where, whose = script_line(sys._getframe(4)), held[0].watch
        if name in ("clamp_", "copy_"):
            is_copy = name == "copy_"
            if is_copy:  # a gradient of one element that was computed anew (a mean over ranks) is no norm
                found.mark_used(args[-1])
            self._seen.clips.append(Clip(whose, args[-1], None, where, False, not is_copy, is_copy))
            return
        clip = self._clip(name, args, whose, found, sys._getframe(4))
        by_scale = found.of_number(clip.factor) if clip.power is None else 0.0
        for each in held:
            each.power += -by_scale if clip.is_division else by_scale
            if by_scale:
                each.watch.divided_at = where
        if not by_scale:
            found.mark_used(clip.factor)
            self._seen.clips.append(clip)

    @staticmethod
    def _clip(name: str, args: tuple[Any, ...], watch: OptimizerWatch, found: Powers, frame: FrameType) -> Clip:
        factor = args[1] if len(args) > 1 else 1.0
        carried, known = found.of(factor), found.quantity(factor)
        ratio = found.of_ratio(factor) if carried is None else None
        power = carried[0] if carried is not None else ratio[0] if ratio is not None else None
        is_limited = known is not None and known.is_limited
        is_limited = is_limited and not any(map(computes_with_scale, spots_of(frame, found.scale)))
        return Clip(watch, factor, power, script_line(frame), name in powers.OVER, is_limited=is_limited)
