import torch
from torch import nn

from .norm import RMSNorm


class GLU(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MiniLM(nn.Module):
    def __init__(self, vocab=80, dim=24, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": RMSNorm(dim), "mlp": GLU(dim)}) for _ in range(layers))
        self.output = nn.ModuleDict({"norm": RMSNorm(dim), "head": nn.Linear(dim, vocab, bias=False)})
        nn.init.normal_(self.tok_embeddings.weight, std=0.3)

    def forward(self, tokens, targets=None):
        h = self.in_proj(self.tok_embeddings(tokens))
        for layer in self.layers:
            h = h + layer["mlp"](layer["norm"](h))
        logits = self.output["head"](self.output["norm"](h))
        loss = None
        if targets is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
