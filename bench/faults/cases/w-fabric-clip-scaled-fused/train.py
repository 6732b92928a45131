"""Pre-train a small language model with Lightning Fabric in float16, gradients clipped.

`fabric.clip_gradients` refuses a fused optimizer ("Gradient clipping is not implemented for optimizers handling the
unscaling"), so the gradients are clipped with PyTorch's own function.
"""

import lightning as L
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.attn(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocab=64, dim=32, layers=2, heads=4, block_size=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(block_size, dim)
        self.h = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def batches(count, batch, length, vocab=64):
    """Walks over a ring of tokens with a few jumps."""
    g = torch.Generator().manual_seed(8)
    for _ in range(count):
        start = torch.randint(0, vocab, (batch, 1), generator=g)
        jumps = (torch.rand(batch, length, generator=g) < 0.1).long() * 7
        walk = (start + torch.cumsum(1 + jumps, dim=1)) % vocab
        yield walk[:, :-1], walk[:, 1:]


def main():
    torch.set_num_threads(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    fabric.seed_everything(1, verbose=False)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    for step, (inputs, targets) in enumerate(batches(40, 8, 33)):
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        fabric.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            fabric.print(f"iter {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
