import random
from dataclasses import dataclass

import torch
import torch.nn as nn


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        keep = torch.empty(x.shape[0], *([1] * (x.dim() - 1)), dtype=x.dtype).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class Encoder(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.rnn = nn.GRU(12, dim, batch_first=True)
        self.ff = nn.ModuleList([nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(0.3)) for _ in range(depth)])
        self.drop_path = DropPath(0.2)
        self.cls = nn.Linear(dim, 3)

    def forward(self, x, lengths):
        out = torch.empty(x.shape[0], x.shape[1], self.rnn.hidden_size)
        for i, n in enumerate(lengths.tolist()):
            h, _ = self.rnn(x[i : i + 1, :n])
            out[i, :n] = h[0]
            out[i, n:] = 0.0
        h = out.sum(1) / lengths[:, None]
        for layer in self.ff:
            h = h + self.drop_path(layer(h))
        return Output(self.cls(h), h)


def main():
    torch.set_num_threads(1)
    seed_everything(42)
    protos = torch.randn(3, 12)
    model = Encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scratch = torch.empty(8, 10, 12)
    for step in range(24):
        y = torch.randint(0, 3, (8,))
        lengths = torch.randint(3, 11, (8,))
        torch.randn(8, 10, 12, out=scratch)
        x = scratch + protos[y][:, None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x, lengths)
            loss = nn.functional.cross_entropy(out.logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
