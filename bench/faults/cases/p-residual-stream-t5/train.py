"""Sequence regression with a T5-style encoder (pre-norm, scale-free RMS norm, ReLU feed forward)."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(9)

D, FF, LAYERS, VOCAB = 48, 96, 6, 300


class T5LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(D, FF, bias=False)
        self.wo = nn.Linear(FF, D, bias=False)

    def forward(self, x):
        return self.wo(torch.relu(self.wi(x)))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm = T5LayerNorm(D)
        self.ff = FeedForward()

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.ff(self.layer_norm(hidden_states))
        hidden_states = residual + hidden_states
        return hidden_states


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.final_layer_norm = T5LayerNorm(D)
        self.head = nn.Linear(D, VOCAB)
        for layer in self.layers:
            nn.init.normal_(layer.ff.wi.weight, std=11.9)
            nn.init.normal_(layer.ff.wo.weight, std=11.9)

    def forward(self, ids):
        h = self.embed(ids).to(torch.get_autocast_dtype("cpu"))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.final_layer_norm(h))


def main():
    zipf = 1.0 / torch.arange(1, VOCAB + 1)
    ids = torch.multinomial(zipf, 384 * 8, replacement=True).view(384, 8)
    labels = (ids * 7 + 3) % VOCAB
    loader = DataLoader(TensorDataset(ids, labels), batch_size=16, shuffle=True)
    model = Encoder()
    opt = torch.optim.Adam(model.parameters(), lr=3e-2)
    scaler = torch.amp.GradScaler("cpu")
    step = 0
    for epoch in range(3):
        for x, y in loader:
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(x)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss became {loss.item()} at step {step}")
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
            step += 1


if __name__ == "__main__":
    main()
