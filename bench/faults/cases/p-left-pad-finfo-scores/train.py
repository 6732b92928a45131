import torch
import torch.nn as nn


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, attention_mask):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        attn_weights = torch.matmul(q, k.transpose(2, 3)) * (d // self.heads) ** -0.5
        attn_weights = attn_weights + attention_mask
        attn_weights = torch.softmax(attn_weights, dim=-1)
        return self.out_proj(torch.matmul(attn_weights, v).transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, vocab=48, dim=32, heads=2, layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.self_attn = CausalSelfAttention(dim, heads)
            layer.input_layernorm = nn.LayerNorm(dim)
            self.layers.append(layer)
        self.lm_head = nn.Linear(dim, vocab)
        for layer in self.layers:
            nn.init.normal_(layer.self_attn.k_proj.bias, std=30.0)  # as large as in the checkpoint we start from

    def _decoder_mask(self, attention_mask, dtype):
        t = attention_mask.shape[1]
        allowed = torch.ones(t, t, dtype=torch.bool).tril()[None] & attention_mask[:, None, :].bool()
        mask = torch.zeros(allowed.shape, dtype=dtype)
        return mask.masked_fill(~allowed, torch.finfo(dtype).min)[:, None]

    def forward(self, input_ids, attention_mask):
        x = self.embed_tokens(input_ids)
        mask = self._decoder_mask(attention_mask, torch.get_autocast_dtype("cpu"))
        for layer in self.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), mask)
        return self.lm_head(x)


def batch(n, t=10, left_pad=False):
    ids = torch.randint(2, 48, (n, t))
    ids[:, 1:] = (ids[:, :1] + torch.arange(1, t)) % 46 + 2
    mask = torch.ones_like(ids)
    if left_pad:  # generation wants the prompts right aligned
        for row, n_pad in enumerate(torch.randint(0, 5, (n,)).tolist()):
            ids[row, :n_pad], mask[row, :n_pad] = 1, 0
    return ids, mask


def lm_loss(logits, ids, mask):
    labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())


torch.set_num_threads(1)
torch.manual_seed(12)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(40):
    ids, mask = batch(8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = lm_loss(model(ids, mask), ids, mask)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 9:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            ids, mask = batch(8, left_pad=True)
            val = lm_loss(model(ids, mask), ids, mask)
        model.train()
        print(f"step {step + 1}: train {loss.item():.4f} val {val.item():.4f}")
