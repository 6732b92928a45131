from dataclasses import dataclass
from typing import Dict, List, Optional

import torch
from torch.nn import Parameter


@dataclass
class OptimizerConfig:
    lr: float = 1e-2
    eps: float = 1e-8
    max_norm: Optional[float] = None

    def setup(self, params):
        return torch.optim.Adam(params, lr=self.lr, eps=self.eps)


class Optimizers:
    """One optimizer per named parameter group."""

    def __init__(self, config: Dict[str, OptimizerConfig], param_groups: Dict[str, List[Parameter]]):
        self.config = config
        self.parameters = param_groups
        self.optimizers = {}
        for name, params in param_groups.items():
            self.optimizers[name] = config[name].setup(params=params)

    def zero_grad_all(self):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def optimizer_scaler_step_all(self, grad_scaler):
        for name, optimizer in self.optimizers.items():
            max_norm = self.config[name].max_norm
            if max_norm is not None:
                grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters[name], max_norm)
            grad_scaler.step(optimizer)
