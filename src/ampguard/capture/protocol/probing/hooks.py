"""The probe of hooks that the script puts into the graph."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from ampguard import compat
from ampguard.capture.protocol.probing.witness import Call, Witness


class HookProbe:
    """Puts a look around hooks on computed tensors and on modules, in iterations that are looked at closely; of those on
    parameters, which are looked at when they run, it notes that there are new ones."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def install(self) -> None:
        self._witness.patches.replace(torch.Tensor, "register_hook", self._watch_tensor)
        self._witness.patches.replace(torch.Tensor, "register_post_accumulate_grad_hook", self._watch_tensor)
        if compat.MODULE_BACKWARD_HOOK is not None:
            self._witness.patches.replace(compat.MODULE_BACKWARD_HOOK, "__init__", self._watch_module)

    def _watch_tensor(self, original: Call) -> Call:
        witness, close = self._witness, self._witness.moves.close

        @functools.wraps(original)  # (or register_post_accumulate_grad_hook, which leaves alone have)
        def register_hook(self: Tensor, hook: Any) -> Any:
            if witness.recorder.active and self.grad_fn is not None:
                hook = witness.guarded(close.graph_hooks.on_tensor, hook) or hook
            elif witness.recorder.active:
                witness.guarded(close.hook_on_leaf, hook, sys._getframe(1))
            return original(self, hook)

        return register_hook

    def _watch_module(self, original: Call) -> Call:
        witness, hooks = self._witness, self._witness.moves.close.graph_hooks

        @functools.wraps(original)
        def __init__(self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:  # noqa: N807
            if witness.recorder.active:
                user_hooks = [witness.guarded(hooks.on_module, hook) or hook for hook in user_hooks]
                user_pre_hooks = [witness.guarded(hooks.before_module, hook) or hook for hook in user_pre_hooks]
            original(self, module, user_hooks, user_pre_hooks)

        return __init__
