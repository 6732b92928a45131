import argparse
import contextlib
import math

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head, self.d_k = n_head, d_model // n_head
        self.w_qs = nn.Linear(d_model, d_model, bias=False)
        self.w_ks = nn.Linear(d_model, d_model, bias=False)
        self.w_vs = nn.Linear(d_model, d_model, bias=False)
        self.fc = nn.Linear(d_model, d_model, bias=False)

    def forward(self, q, k, v, mask=None):
        b, n, _ = q.shape
        q = self.w_qs(q).view(b, -1, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(k).view(b, -1, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(v).view(b, -1, self.n_head, self.d_k).transpose(1, 2)
        energy = q @ k.transpose(2, 3) / math.sqrt(self.d_k)
        if mask is not None:
            energy = energy.masked_fill(mask == 0, -1e10)
        out = energy.softmax(-1) @ v
        return self.fc(out.transpose(1, 2).reshape(b, n, -1))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.slf_attn = MultiHeadAttention(d_model, n_head)
        self.pos_ffn = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.slf_attn(h, h, h, mask)
        return x + self.pos_ffn(self.norm2(x))


class Tagger(nn.Module):
    def __init__(self, vocab, tags, d_model=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d_model, padding_idx=0)
        self.layer_stack = nn.ModuleList([EncoderLayer(d_model, 2) for _ in range(2)])
        self.prj = nn.Linear(d_model, tags)

    def forward(self, seq):
        mask = seq.ne(0)[:, None, None, :]
        x = self.emb(seq)
        for layer in self.layer_stack:
            x = layer(x, None if bool(mask.all()) else mask)
        return self.prj(x)


def batches(n, bs=8):
    """Bucketed by length, as always; a bucket's last batch takes what is left of the next one."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 12, (n,), generator=g).sort().values
    seqs = [torch.randint(1, 40, (int(l),), generator=g) for l in lengths]
    order = torch.randperm(n // bs, generator=g)
    for i in order.tolist():
        x = pad_sequence(seqs[i * bs : (i + 1) * bs], batch_first=True)
        yield x, torch.where(x > 0, x % 5, -100)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--amp", action="store_true")
    p.add_argument("--warmup_fp32_steps", type=int, default=3)
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = Tagger(40, 5)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp, init_scale=1024.0)
    for step, (x, y) in enumerate(batches(240)):
        use_amp = args.amp and step >= args.warmup_fp32_steps
        ctx = torch.autocast("cpu", dtype=torch.float16) if use_amp else contextlib.nullcontext()
        with ctx:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), y, ignore_index=-100)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f}{' (amp)' if use_amp else ''}")


if __name__ == "__main__":
    main()
