import torch
import torch.nn.functional as F
from torch import nn


def zero_init(module: nn.Linear) -> nn.Linear:
    """Start as the identity of the residual sum: the new branch adds nothing."""
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


class Tower(nn.Module):
    def __init__(self, inp: int, width: int, dim: int, fresh: bool):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inp, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.project = zero_init(nn.Linear(width, dim)) if fresh else nn.Linear(width, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.net(x))


class Retriever(nn.Module):
    def __init__(self, dim: int = 24):
        super().__init__()
        self.towers = nn.ModuleDict({"audio": Tower(40, 64, dim, fresh=True), "text": Tower(30, 64, dim, fresh=False)})
        self.temperature = 0.05

    def forward(self, audio: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        a = F.normalize(self.towers["audio"](audio).float(), dim=-1)
        t = F.normalize(self.towers["text"](text).float(), dim=-1)
        with torch.autocast("cpu", enabled=False):
            return a @ t.t() / self.temperature
