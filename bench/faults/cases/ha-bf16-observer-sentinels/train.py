import torch
from torch import nn


class RangeObserver(nn.Module):
    """Remembers the smallest and the largest activation, for quantisation later on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    @torch.no_grad()
    def observe(self, x):
        self.low.copy_(torch.minimum(self.low, x.min().float()))
        self.high.copy_(torch.maximum(self.high, x.max().float()))

    def forward(self, x):
        if self.training:
            self.observe(x)
        return x


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), RangeObserver(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=True)[0]
        return x + self.mlp(self.norm2(x))


class Forecaster(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, 4) for _ in range(2))
        self.out = nn.Linear(dim, 1)
        self.spare = RangeObserver()  # not called in training

    def forward(self, series):
        t = series.shape[1]
        mask = torch.full((t, t), float("-inf")).triu(1)
        x = self.inp(series)
        for layer in self.layers:
            x = layer(x, mask.to(x.dtype))
        return self.out(x).squeeze(-1)


def windows(n, length=20):
    start = torch.rand(n, 1) * 6
    t = start + torch.arange(length + 1) * 0.3
    s = torch.stack([torch.sin(t), torch.cos(2 * t)], -1) + 0.05 * torch.randn(n, length + 1, 2)
    return s[:, :-1], s[:, 1:, 0]


torch.set_num_threads(1)
torch.manual_seed(0)
model = Forecaster()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=4e-3, total_steps=30)
best = float("inf")
for step in range(30):
    x, y = windows(12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x)
        loss = nn.functional.mse_loss(pred.float(), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    best = min(best, loss.item())
    if step % 10 == 9:
        print(
            f"{step + 1}: loss {loss.item():.4f} best {best:.4f} range {model.layers[0].mlp[2].low:.2f}..{model.layers[0].mlp[2].high:.2f}"
        )
