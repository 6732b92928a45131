"""What the ranks that train one model decide together.

Whether a step is skipped they see alike, by gradients that are equal everywhere. Whose loss was bad, or whose state can be
saved, each rank knows of itself only, and to go on from different weights would be the end of the training: so they ask.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampguard import compat
from ampguard.engine.precision.base import Precision
from ampguard.errors import SetupError


class RanksOfModels:
    """The ranks that hold the same weights, or shards of the same, as this one."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._wrappers: list[DistributedDataParallel] | None = None
        """Not known before the first backward pass: models are often wrapped after they were given away."""

    def refuse_converting(self, mode: Precision) -> None:
        """Raise SetupError where the weights cannot be made low any more: ranks have agreed on what they exchange."""
        if mode.weights_dtype == torch.float32 or not compat.distributed_is_on():
            return
        if any(compat.needs_other_ranks(model) for model in self._models):
            raise SetupError(
                f"precision={mode.name!r} casts the weights, and these are spread over ranks already (fully_shard)\n"
                "  do    let FSDP cast them: fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "
                "with precision='fp32'; or use precision='fp16' or 'bf16'"
            )
        if self._found_wrappers():
            raise SetupError(
                f"precision={mode.name!r} casts the weights, and DistributedDataParallel has the model already: it would go on "
                "averaging the gradients of the old weights, and the ranks would train different models\n"
                "  do    make Amp first, and wrap the model then: amp = Amp(model, optimizer, ...); ddp = "
                "DistributedDataParallel(model)"
            )

    def wrappers(self) -> list[DistributedDataParallel]:
        """DDP around the models, once training has begun."""
        if self._wrappers is None:
            self._wrappers = self._found_wrappers() if compat.distributed_is_on() else []
        return self._wrappers

    def all_agree(self, here: bool) -> bool:
        """Whether it is so on every rank: one reduction of one number, in which all of them have to take part.

        Only `here` where no other rank has to keep up with this one.
        """
        if not compat.several_ranks():
            return here
        device = next((p.device for model in self._models for p in compat.all_parameters(model)), torch.device("cpu"))
        flag = torch.tensor(float(here), device=device)
        for group in self._groups():
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(flag)

    def _groups(self) -> list[Any]:
        """Of DDP those that have averaged the gradients, of shards each dimension of their mesh; in the same order everywhere.

        Gradients that were not averaged are bad on one rank alone, and the others would not come.
        """
        groups = [
            ddp.process_group
            for ddp in self.wrappers()
            if compat.replicated_by(ddp) is not None and compat.averaged_last_gradients(ddp)
        ]
        for model in self._models:
            meshes = (getattr(parameter, "device_mesh", None) for parameter in compat.all_parameters(model))
            groups += [group for mesh in dict.fromkeys(meshes) if mesh is not None for group in mesh.get_all_groups()]
        return list({id(group): group for group in groups}.values())

    def _found_wrappers(self) -> list[DistributedDataParallel]:
        """DDP around the models, in them, or (wrapped after they were given away) anywhere in this process."""
        inside = [
            m for model in self._models for m in compat.all_modules(model) if isinstance(m, DistributedDataParallel)
        ]
        own = {id(module) for model in self._models for module in compat.all_modules(model)}
        around = [
            thing
            for thing in gc.get_objects()
            if issubclass(type(thing), DistributedDataParallel) and id(thing.module) in own
        ]
        places = {id(model): number for number, model in enumerate(self._models)}
        around.sort(key=lambda ddp: places.get(id(ddp.module), len(places)))
        return list({id(ddp): ddp for ddp in (*inside, *around)}.values())
