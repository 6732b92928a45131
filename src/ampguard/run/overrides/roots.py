"""Calls of the script's models from outside: where autocast is gained, and where modules become known by name."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.utils.parametrize
from torch import nn

from ampguard import compat
from ampguard.capture.barrier import FaultBarrier
from ampguard.capture.patches import Patches
from ampguard.capture.root_calls.surroundings import find_prefix
from ampguard.engine.casting import cast_floats
from ampguard.replay.names import module_names, parameters_under, parts_by_name, paths_in_holders
from ampguard.run.overrides.again import Again
from ampguard.run.overrides.changed_buffers import ChangedBuffers
from ampguard.run.overrides.evaluations import Evaluations
from ampguard.run.overrides.low_calls import LowCalls, running_replay
from ampguard.run.overrides.not_borne import NotBorne
from ampguard.run.overrides.regions import Regions

OnRoot = Callable[[nn.Module, dict[str, nn.Module]], None]
"""Told of a module that is called from outside for the first time, with its parts by name."""


Needed: TypeAlias = "tuple[torch.autocast, bool] | None"
"""The region that a call needs, and whether it is gained."""


class RootCalls:
    """`nn.Module.__call__`, where no other module's call is running."""

    def __init__(
        self,
        regions: Regions,
        not_borne: NotBorne,
        barrier: FaultBarrier,
        on_root: OnRoot,
        on_gain: Callable[[], None],
    ) -> None:
        self._barrier = barrier
        self._regions = regions
        self._not_borne = not_borne
        self._on_root = on_root
        self._on_gain = on_gain
        self.again: Again | None = None
        self.evaluations: Evaluations | None = None
        self.low_calls: LowCalls | None = None
        """Where calls run on low-precision weights."""
        self.buffers: ChangedBuffers | None = None
        """Where steps are held off: what calls change is kept, to be put back."""
        self.on_return: Callable[[], None] | None = None
        """Called when a root call has returned."""
        self.on_output: Callable[[Any], None] | None = None
        """Given what a root call returns, as its own precision has it."""
        self.on_direct_forward: Callable[[nn.Module], None] | None = None
        """Told of a module whose `forward` the script calls as a function."""
        self._inside = False
        self.has_seen_any = False
        """Whether any module was ever called: those that are gone are not among `roots`."""
        self._known: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        """Tensors that the script wants a gradient of, among the arguments of the running step."""

    def install(self, patches: Patches) -> None:
        patches.replace(nn.Module, "__call__", self._watch)

    @property
    def roots(self) -> list[nn.Module]:
        return list(self._known)

    def named(self) -> dict[str, list[nn.Module]]:
        """Every module known, by the name that the user's code gives it: two models (a teacher, a fold) may share one."""
        names: dict[str, list[nn.Module]] = {}
        known = list(self._known.items())
        holders = paths_in_holders(root for root, prefix in known if not prefix)
        for root, prefix in known:
            for name, module in parts_by_name(root, prefix or holders.get(id(root), "")).items():
                if not any(module is known for known in names.setdefault(name, [])):
                    names[name].append(module)
        return names

    def unnamed(self) -> list[nn.Module]:
        """The roots that hang in no other module: a model, a criterion. All of them are called ""."""
        return [root for root, prefix in list(self._known.items()) if not prefix]

    def parameter_names(self) -> dict[int, str]:
        """`id(parameter)` to its name, for the parameters of every module known."""
        names: dict[int, str] = {}
        for root, prefix in list(self._known.items()):
            names |= parameters_under(root, module_names(root, prefix))
        return names

    def _watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if self._inside or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            return self._call(original, module, args, kwargs)

        return __call__

    def _call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if compat.in_backward() or compat.is_tracing():  # checkpointing computes again as it computed before
            return original(module, *args, **kwargs)
        if running_replay() is not None:  # in the regions that the step was recorded in
            return self._run(original, module, args, kwargs, None)
        needed = self._barrier.call(self._prepare, module, args, kwargs, sys._getframe(2))
        if self.buffers is None or not (module.training or torch.is_grad_enabled()) or compat.cuda_is_capturing():
            return self._prepared(original, module, args, kwargs, needed)
        saved = self._barrier.call(self.buffers.before_call, module)
        output = self._prepared(original, module, args, kwargs, needed)
        if saved:
            self._barrier.call(self.buffers.after_call, module, saved)
        return output

    def _prepared(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, needed: Needed) -> Any:
        if self.evaluations is not None:
            given = self._barrier.call(self.evaluations.before, module, args, kwargs)
            if given is not None:
                output = self._run(original, module, args, kwargs, needed)
                self._barrier.call(self.evaluations.after, given)
                return output
        if self.again is None or self.again.stays_out():
            return self._run(original, module, args, kwargs, needed)
        needs = [needed]  # of the first time; afterwards a fix may have changed it

        def run() -> Any:
            needed = needs.pop() if needs else self._barrier.call(self._regions.for_call, module, args, kwargs)
            return self._run(original, module, args, kwargs, needed)

        return self.again.call(module, run)

    def _run(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, needed: Needed) -> Any:
        if self.low_calls is None:
            return self._run_in(original, module, args, kwargs, needed)
        run = lambda args, kwargs: self._run_in(original, module, args, kwargs, needed)  # noqa: E731
        return self.low_calls.call(run, module, args, kwargs)

    def _run_in(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, needed: Needed) -> Any:
        self._inside = True
        try:
            run: Callable[[], Any] = lambda: self._seen(original(module, *args, **kwargs))  # noqa: E731
            if needed is None:
                return run() if self._regions.lent_on is None else self._in_lent(run, module, self._regions.lent_on)
            region, is_gained = needed
            if is_gained:
                output = self._gaining(run, module, region)
            else:
                with self._regions.around(region):
                    output = run()
        finally:
            self._inside = False
            if self.on_return is not None:
                self.on_return()
        if not is_gained or module in self._not_borne.given_up:
            return output
        self._on_gain()
        # What follows was written for float32: `.numpy()`, losses by hand, writing into float32 buffers.
        return cast_floats(output, torch.float32)

    def _gaining(self, run: Callable[[], Any], module: nn.Module, region: torch.autocast) -> Any:
        """A call under gained autocast; what its code does not bear that in runs in float32."""

        def run_in() -> Any:
            with self._regions.around(region):
                return run()

        return self._not_borne.call(module, run_in, run, lambda: self._parts(module))

    def _in_lent(self, run: Callable[[], Any], module: nn.Module, device_type: str) -> Any:
        """The same, where the region is around more than this call."""

        def run_plain() -> Any:
            with self._regions.around(self._regions.make(device_type, None)):
                return run()

        return self._not_borne.call(module, run, run_plain, lambda: self._parts(module), is_lent=True)

    def _parts(self, root: nn.Module) -> dict[str, nn.Module]:
        return parts_by_name(root, self._known.get(root, ""))

    def _seen(self, output: Any) -> Any:
        if self.on_output is not None:
            self.on_output(output)
        return output

    def _prepare(self, module: nn.Module, args: Any, kwargs: Any, frame: Any) -> Needed:
        if module not in self._known:
            self.has_seen_any = True
            if frame.f_code.co_filename == torch.nn.utils.parametrize.__file__:
                self._not_borne.given_up.add(module)  # it makes a weight, which is asked for outside every model
            prefix = self._known[module] = find_prefix(module, frame)
            self._on_root(module, parts_by_name(module, prefix))
            self._see_caller(frame, needed := self._regions.for_call(module, args, kwargs))
            self._note_inputs(args)
            return needed
        self._note_inputs(args)
        return self._regions.for_call(module, args, kwargs)

    def _see_caller(self, frame: Any, needed: Needed) -> None:
        """Whether a module whose `forward` is called as a function makes a call that gains autocast."""
        code = frame.f_code
        if needed is None or not needed[1] or not code.co_argcount or self.on_direct_forward is None:
            return
        caller = frame.f_locals.get(code.co_varnames[0])
        if isinstance(caller, nn.Module) and getattr(type(caller).forward, "__code__", None) is code:
            self.on_direct_forward(caller)

    def _note_inputs(self, args: Any) -> None:
        wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf]
        if wanted:
            live = [ref for ref in self.inputs if ref() is not None]
            self.inputs = [*live, *(weakref.ref(t) for t in wanted if all(ref() is not t for ref in live))]
