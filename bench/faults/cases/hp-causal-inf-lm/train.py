"""Character model with the usual causal mask, float16 autocast."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPT(nn.Module):
    def __init__(self, vocab=32, n_embd=32, n_layer=2, block_size=16):
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab, n_embd),
                wpe=nn.Embedding(block_size, n_embd),
                h=nn.ModuleList(
                    [
                        nn.ModuleList([nn.LayerNorm(n_embd), CausalSelfAttention(n_embd, 2, block_size)])
                        for _ in range(n_layer)
                    ]
                ),
            )
        )
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for ln, attn in self.transformer.h:
            x = x + attn(ln(x))
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, n, top_k=4):
        for _ in range(n):
            logits, _ = self(idx[:, -self.block_size :])
            logits = logits[:, -1].float()
            v, _ = torch.topk(logits, top_k)
            logits[logits < v[:, [-1]]] = -float("Inf")
            idx = torch.cat([idx, torch.multinomial(F.softmax(logits, dim=-1), 1)], dim=1)
        return idx


torch.set_num_threads(1)
torch.manual_seed(1337)
text = (torch.arange(3000) * 5 + (torch.arange(3000) // 7) % 3) % 32
model = GPT()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
for it in range(30):
    ix = torch.randint(0, 2980, (8,))
    X = torch.stack([text[i : i + 16] for i in ix])
    Y = torch.stack([text[i + 1 : i + 17] for i in ix])
    with torch.autocast("cpu", dtype=torch.float16):
        _, loss = model(X, Y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    if it % 10 == 0:
        print(f"iter {it}: loss {loss.item():.4f}")
model.eval()
with torch.autocast("cpu", dtype=torch.float16):
    print(model.generate(text[None, :4], 12)[0].tolist())
print(f"final loss {loss.item():.4f}")
