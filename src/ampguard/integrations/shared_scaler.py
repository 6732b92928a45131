"""One loss scale for all optimizers of a framework that calls `update()` after the step of each.

Lightning and Accelerate do so. With PyTorch's scaler, every optimizer after the first then has its gradients divided by a
scale that they were not multiplied with, or divided twice. Here the scale is updated once, when all that take part have
stepped; what waits for its step follows the scale, and what was divided too early is multiplied again.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampguard import compat
from ampguard.engine import misuse
from ampguard.engine.casting import tensors_in
from ampguard.engine.result import StepResult
from ampguard.engine.step import GradientCheck, check_gradients
from ampguard.errors import SetupError
from ampguard.integrations.hand_clipping import tell_of_writes
from ampguard.integrations.left_over import Mark, are_as_marked, marks_of
from ampguard.integrations.raw_backward import RawBackwards
from ampguard.integrations.scaler import EngineScaler
from ampguard.integrations.unclaimed import UnclaimedGradients
from ampguard.integrations.updating import Updating, direct_step, divide, no_gradients
from ampguard.integrations.users_line import shown, users_line

Listener = Callable[[Optimizer, Tensor], None]
"""Told of every step: the optimizer, and its found-inf (a 0-d tensor, 1 where it was skipped)."""


class SharedScaler(EngineScaler):
    """`EngineScaler` for loops that are not ours: `update()` may be called too often, `unscale_` too early or twice.

    `optimizers` gives those that share the scale, where the framework knows them before they step. `backward_call` is
    what its users call in place of `loss.backward()`, `step_call` in place of an optimizer's own step, `clip_call`
    in place of PyTorch's clipping.
    """

    def __init__(
        self,
        precision: str = "fp16",
        *,
        optimizers: Callable[[], Iterable[Optimizer]] = tuple,
        backward_call: str = "backward(loss)",
        step_call: str = "the step of the optimizer that the framework has given back",
        clip_call: str = "the framework's own clipping",
        **options: Any,
    ) -> None:
        super().__init__(precision, **options)
        self._known = optimizers
        self._backward_call = backward_call
        self._step_call = step_call
        self._clip_call = clip_call
        self._raw = RawBackwards(self._refuse_own_step)
        self._expected: frozenset[int] = frozenset()
        """The optimizers that stepped in the iteration before, by identity."""
        self._backwards = 0
        self._stepped_after: dict[int, int] = {}
        """For each optimizer, how many losses had been scaled when it last stepped."""
        self._left: dict[int, list[Mark]] = {}
        """Its gradients as that step left them."""
        self._hidden: dict[int, Tensor] = {}
        """Found-inf of gradients that were multiplied again after a division: clamping may have hidden it."""
        self._results: dict[int, StepResult] = {}
        self.listeners: list[Listener] = []
        self.measures_norm = False
        """Whether every step measures its norm, for a log."""
        self._unclaimed = UnclaimedGradients(self._refuse_unknown_step)
        self.bystanders: Callable[[], Iterable[Tensor]] = tuple
        """Parameters of optimizers that nobody has named yet: their gradients follow the scale too."""

    # --- backward -----------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """As `EngineScaler`. A backward pass follows: gradients that were divided early get the scale again."""
        self.attach()
        if not self._expected and not list(self._known()):
            self._end_iteration()  # nobody said which optimizers there are: those that stepped before this backward
        for own in self._updating.values():
            self._raw.look_again(own.holding.optimizer, own.holding.parameters)
            self._multiply_again(own)
        self._backwards += 1
        scaled = super().scale(outputs)
        for loss in tensors_in(scaled) if self._is_enabled else ():
            if loss.requires_grad:
                loss.register_hook(self._raw.scaled_begins)
        return scaled

    @contextlib.contextmanager
    def scaled_backward(self) -> Iterator[None]:
        """Around the backward pass of what `scale` returned, where the framework's own call is known."""
        with self._raw.scaled(), self._unclaimed.scaled(self._not_updated() if self._is_enabled else ()):
            yield

    def _not_updated(self) -> list[Tensor]:
        """The bystanders that none of the optimizers known so far updates, where these are not told beforehand."""
        if list(self._known()):
            return []
        held = {id(p) for own in self._updating.values() for p in own.holding.parameters}
        return [p for p in self.bystanders() if p.requires_grad and id(p) not in held]

    def attach(self) -> None:
        """Watch the optimizers that the framework knows by now."""
        for optimizer in self._known():
            self._of(optimizer)

    def _multiply_again(self, own: Updating) -> None:
        check, own.check = own.check, None
        hidden = self._hidden.pop(id(own.holding.optimizer), None)
        flags = [flag for flag in (check.found_inf if check is not None else None, hidden) if flag is not None]
        if not flags:
            return
        if own.holding.has_gradients():
            if check is not None:
                self._multiply(own.holding.parameters, self._loss_scale.value)  # it may have changed since the division
                self._announcer.rescaled(own.holding.optimizer)
            norm = check_gradients(own.holding.parameters).norm
            assert norm is not None
            was_bad = torch.stack([flag.reshape(()) for flag in flags]).amax()
            self._hidden[id(own.holding.optimizer)] = was_bad * (norm != 0)  # 0: cleared in place since
        elif check is not None:
            self._forget_announced(own)

    # --- unscale, step, update ----------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> Tensor:
        """Divide its gradients now, once: a second call, or one without gradients, changes nothing. The true norm."""
        own = self._of(optimizer)
        self._refuse_raw(own)
        if own.check is None:
            if not own.holding.has_gradients() or self._is_at_rest(own):
                return torch.zeros(())
            check = self._checked(own, wants_norm=True)
            if own.stepped_at is not None:
                self._forget_announced(own)
            self._announcer.unscaled(optimizer, check.found_inf)
            if self._is_enabled:
                divide(own.holding.parameters, check)
            own.check, own.divided_at = check, users_line()
        assert own.check.norm is not None
        return own.check.norm

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        wants_norm: bool = False,
        **words: Any,
    ) -> StepResult:
        """As `EngineScaler.step`; `words` go to the optimizer's own. A second step begins a new iteration."""
        own = self._of(optimizer)
        if not self._is_enabled and (closure is not None or not own.holding.has_gradients()):
            optimizer.step(*([closure] if closure is not None else []), **words)
            return StepResult()  # as without us: nothing of it can be compared
        if closure is not None:
            raise SetupError(
                f"`{own.holding.name}` was given a closure, whose losses would be neither scaled nor checked\n"
                "  do    compute the loss and call the backward pass before the step, and step without a closure"
            )
        self._refuse_raw(own)
        if own.stepped_at is not None:
            self._end_iteration()
        with _with_words(optimizer, words):
            result = super().step(optimizer, max_norm=max_norm, wants_norm=wants_norm or self.measures_norm)
        own.stepped_at = users_line() or ("", 0)
        own.check = own.divided_at = None
        self._stepped_after[id(optimizer)] = self._backwards
        self._left[id(optimizer)] = marks_of(own) if len(self._updating) > 1 else []
        self._raw.forget(optimizer)
        self._results[id(optimizer)] = result
        for listener in self.listeners:
            listener(optimizer, self._found_infs[-1])
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The scale for the next iteration, if this was the last optimizer of this one; else nothing yet."""
        if new_scale is not None:
            self._end_iteration(new_scale)
            return
        stepped = self._stepped()
        expected = self._expected or frozenset(map(id, self._known()))
        if expected and stepped >= expected:
            self._end_iteration()

    def settle(self) -> None:
        """The iteration has ended, whoever has stepped in it."""
        self._end_iteration()

    def get_scale(self) -> float:
        """The loss scale; 1 where there is none. Waits for the device."""
        if not self._expected and not list(self._known()):
            self._end_iteration()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """GradScaler's keys, as its own `state_dict` has them."""
        self._end_iteration()
        return super().state_dict()

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Begin with the scale, factors and interval of another scaler's state, as if given to the constructor."""
        self._loss_scale.load_state_dict(state)

    @property
    def skipped_steps(self) -> int:
        """Since the beginning, of all optimizers together."""
        self._verdicts.settle()
        return self._verdicts.attempts - self._verdicts.steps

    def norms(self) -> dict[str, float]:
        """The true norm of each optimizer's last step, as far as measured and finite: `grad_norm`, or `grad_norm/0`, `/1`, ..."""
        measured = [r.grad_norm for key, r in self._results.items() if key in self._updating]
        names = ["grad_norm"] if len(measured) == 1 else [f"grad_norm/{i}" for i in range(len(measured))]
        return {n: norm for n, norm in zip(names, measured, strict=True) if norm is not None and math.isfinite(norm)}

    def forget_all_but(self, optimizers: Sequence[Optimizer]) -> None:
        """The others are gone: another training begins."""
        self._end_iteration()
        kept = set(map(id, optimizers))
        for key in [key for key in self._updating if key not in kept]:
            own = self._updating.pop(key)
            self._raw.leave(own.holding.optimizer)
            self._stepped_after.pop(key, None)
            self._left.pop(key, None)
            self._results.pop(key, None)
            self._hidden.pop(key, None)
        self._expected &= kept

    # --- the steps in between -----------------------------------------------------------------------------------------

    def _stepped(self) -> frozenset[int]:
        return frozenset(key for key, own in self._updating.items() if own.stepped_at is not None)

    def _end_iteration(self, new_scale: float | Tensor | None = None) -> None:
        stepped = self._stepped()
        if not stepped and new_scale is None:
            return
        self._expected = stepped or self._expected
        divided = [(own, own.check, own.divided_at) for own in self._updating.values()]
        super().update(new_scale)
        for own, check, line in divided:  # without a step yet: they stay divided
            own.check, own.divided_at = check, line

    def _of(self, optimizer: Optimizer) -> Updating:
        own = super()._of(optimizer)
        if self._is_enabled:
            self._raw.watch(optimizer, own.holding.parameters)
        return own

    def _is_at_rest(self, own: Updating) -> bool:
        """Whether its gradients are what its last step left: no loss was scaled since, or none that reached them."""
        key = id(own.holding.optimizer)
        if not self._is_enabled or key not in self._stepped_after:
            return False
        return self._stepped_after[key] == self._backwards or are_as_marked(own, self._left[key])

    def _checked(self, own: Updating, wants_norm: bool) -> GradientCheck:
        if not own.holding.has_gradients():
            raise no_gradients(own.holding)
        if self._is_enabled and self._raw.are_rewritten(own.holding.optimizer) and not compat.several_ranks():
            tell_of_writes(
                own.holding, super().get_scale(), f"call {self._clip_call}"
            )  # averaging over ranks writes too
        check = super()._checked(own, wants_norm)
        hidden = self._hidden.pop(id(own.holding.optimizer), None)
        if hidden is None:
            return check
        return GradientCheck(check.norm, torch.maximum(check.found_inf, hidden), check.inverse_scale)

    @torch.no_grad()
    def _rescale(self, ratio: Tensor) -> None:
        """Gradients that carry the old scale follow the new one: by powers of two, so nothing is rounded."""
        if ratio.is_cpu and float(ratio) == 1.0:
            return
        held: set[int] = set()
        for own in self._updating.values():
            held.update(map(id, own.holding.parameters))
            if own.check is None and not self._is_at_rest(own):
                self._multiply(own.holding.parameters, ratio)
        self._multiply([p for p in self.bystanders() if id(p) not in held], ratio)

    @torch.no_grad()
    def _multiply(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        with self._raw.writing():
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(factor.to(p.grad.device))

    def _forget_announced(self, own: Updating) -> None:
        """Who listens is not told of a second division as if it were one too many."""
        listened = self._announcer._scaler
        if listened is not None:
            compat.forget_optimizer(listened, own.holding.optimizer)

    def _refuse_own_step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()` past the framework's wrapper, on gradients that carry the scale."""
        own = self._updating.get(id(optimizer))
        if own is None or self._is_stepping or own.check is not None or not self._raw.are_scaled(optimizer):
            return
        scale = super().get_scale()
        if scale != 1.0:
            raise direct_step(own.holding.name, scale, f"call {self._step_call}")

    def _refuse_unknown_step(self, optimizer: Optimizer) -> None:
        """The same of one that has never stepped through the framework."""
        scale = super().get_scale()
        if id(optimizer) not in self._updating and not self._is_stepping and scale != 1.0:
            raise direct_step(type(optimizer).__name__, scale, f"call {self._step_call}")

    def _refuse_raw(self, own: Updating) -> None:
        optimizer = own.holding.optimizer
        never = self._backwards == 0
        if not self._is_enabled or not own.holding.has_gradients() or not (never or self._raw.are_held(optimizer)):
            return
        if self._raw.are_held(optimizer):
            made_by = f"loss.backward() at {shown(self._raw.line(optimizer))}"
            instead = f"call {self._backward_call} instead of loss.backward()"
        else:  # written to `.grad`, or older than what sees a backward pass
            made_by = f"a backward pass other than {self._backward_call}"
            instead = f"call {self._backward_call}; multiply by the loss scale what is written to .grad by hand"
        self._raw.forget(optimizer)
        raise misuse.error(
            "unscaled-backward",
            f"`{own.holding.name}` holds gradients of {made_by}: that loss was not scaled, and its "
            f"gradients would be divided by the loss scale {super().get_scale():g} all the same",
            instead,
            again=users_line(),
        )


@contextlib.contextmanager
def _with_words(optimizer: Optimizer, words: Mapping[str, Any]) -> Iterator[None]:
    """Whoever calls the optimizer's step calls it with these keyword arguments."""
    if not words:
        yield
        return
    before = vars(optimizer).get("step")
    optimizer.step = functools.partial(optimizer.step, **words)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before  # type: ignore[method-assign]
