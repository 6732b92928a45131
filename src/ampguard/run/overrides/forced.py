"""`--force-fp32`: modules by pattern, as soon as the model that they belong to is called."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from inspect import isfunction

from torch import nn

from ampguard import compat
from ampguard.engine.force_fp32 import ForcedModules
from ampguard.engine.patterns import called_in, nearest, outermost
from ampguard.errors import PatternError
from ampguard.replay.names import parts_by_name, paths_in_holders
from ampguard.run.overrides.ledger import Ledger
from ampguard.run.overrides.plan import Plan
from ampguard.stderr import say


class Forced:
    """The modules that run in float32 at the user's wish, and those that a fix put there."""

    def __init__(self, patterns: Sequence[str], ledger: Ledger, plan: Plan) -> None:
        self._plan = plan
        self._unmatched = list(patterns)
        self._patterns = tuple(patterns)
        self._ledger = ledger
        self._seen: list[str] = []
        self._changed: list[ForcedModules] = []
        self._asked_for: set[str] = set()
        """The names of modules that the patterns name."""
        self.names: list[str] = []

    def see(self, root: nn.Module, modules: dict[str, nn.Module]) -> None:
        """A model is called for the first time: force what the patterns name in it.

        A part of a model that a function calls (`model.encoder(x)`) has its names in the model, as on a card, and its own.
        """
        if not self._patterns:
            return
        path = paths_in_holders([root]).get(id(root)) if "" in modules and compat.has_parameters(root) else None
        in_model = parts_by_name(root, path) if path else modules
        self._seen += in_model
        found: dict[str, nn.Module] = {}
        for pattern in self._patterns:
            matched = _matching(in_model, pattern) or _matching(modules, pattern)
            if matched and pattern in self._unmatched:
                self._unmatched.remove(pattern)
            found |= matched
        for name, module in _without_forward(in_model, self._patterns).items():
            self._ledger.failed(
                f"--force-fp32: `{name}` ({type(module).__name__}) has no forward pass; of what its other methods compute, "
                "only the modules inside it are in float32. Name the module whose forward calls it"
            )
        if found:
            self._asked_for |= outermost(found).keys()
            self.force(list(outermost(found).items()), cast_back=True)

    def force(self, modules: Sequence[tuple[str, nn.Module]], cast_back: bool) -> bool:
        """Make modules run in float32 from now on. Returns whether all could be changed."""
        is_done = True
        for name, module in modules:
            try:
                self._changed.append(ForcedModules({name: module}, cast_back, without_floats=self._plan.low_dtype))
            except PatternError as error:
                self._ledger.failed(str(error).splitlines()[0])
                is_done = False
            else:
                if name not in self.names:
                    self.names.append(name)
        return is_done

    def release(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Take back what `force` did to these modules."""
        for forced in [f for f in self._changed if any(m in f.modules for _, m in modules)]:
            forced.undo()
            self._changed.remove(forced)
        released = {name for name, _ in modules}
        self.names = [name for name in self.names if name not in released]

    def end(self) -> None:
        """The run is over: give modules their classes back, and say which patterns named nothing."""
        self._say_what_never_ran()
        for forced in self._changed:
            forced.undo()
        self._changed.clear()
        for pattern in self._unmatched:
            self._ledger.failed(f"--force-fp32 {pattern!r} matches no module{self._meant(pattern)}")
        self._unmatched.clear()

    def _say_what_never_ran(self) -> None:
        """A module whose weights others use (`out_proj` of `nn.MultiheadAttention`), or of which another method is called."""
        if compat.has_compiled():  # calls inside compiled code are not seen
            return
        live = [forced for forced in self._changed if forced.modules]
        ran = {name for forced in live if not forced.never_ran for name in forced.names}
        asked = [forced for forced in live if self._asked_for.intersection(forced.names)]
        if ran & self._asked_for and not any(forced.met_low_precision for forced in asked):
            self._ledger.failed(
                "--force-fp32 had nothing to do: no module that it names was called under autocast, with low-precision inputs or "
                "weights. The run is in float32 there without it"
            )
        idle = {name for forced in live for name in forced.names if name in self._asked_for} - ran
        for name in sorted(idle):
            self.names.remove(name)
            self._ledger.failed(
                f"--force-fp32: `{name}` was never called as a module: whatever used its weights or its other methods is as it "
                "was. Name the module around it"
            )

    def first_step(self) -> None:
        """A model was trained: what matches nothing by now is most likely misspelt, and is not said after hours only."""
        for pattern in self._unmatched:
            say(f"--force-fp32 {pattern!r} matches no module so far{self._meant(pattern)}")

    def _meant(self, pattern: str) -> str:
        if not self._seen:
            return "; no model was called"
        near = nearest(pattern, self._seen)
        top = list(dict.fromkeys(name.partition(".")[0] for name in self._seen if name))
        return f"; nearest: {', '.join(near)}" if near else f"; the top modules are {', '.join(top[:8]) or 'none'}"


def _without_forward(modules: dict[str, nn.Module], patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Matched modules that have methods of their own, but none that is called as a module is."""
    matched = {n: m for n, m in modules.items() if n and any(fnmatchcase(n, pattern) for pattern in patterns)}
    return {n: m for n, m in matched.items() if n not in called_in({n: m}) and _has_methods(type(m))}


def _has_methods(kind: type[nn.Module]) -> bool:
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    of_script = [one for one in own if not one.__module__.startswith("torch.")]
    return any(
        isfunction(value) and not name.startswith("__") for one in of_script for name, value in vars(one).items()
    )


def _matching(modules: dict[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    return called_in({name: module for name, module in modules.items() if name and fnmatchcase(name, pattern)})
