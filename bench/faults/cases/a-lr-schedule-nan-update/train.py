import torch
import torch.nn as nn

from schedule import StagedWarmupCosine

torch.set_num_threads(1)
torch.manual_seed(0)


class Mixer(nn.Module):
    def __init__(self, tokens=8, dim=24):
        super().__init__()
        self.token_mix = nn.Linear(tokens, tokens)
        self.channel_mix = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.token_mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(x)


class Climate(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 24)
        self.mixers = nn.ModuleList([Mixer() for _ in range(2)])
        self.head = nn.Linear(24, 2)

    def forward(self, fields):
        x = self.embed(fields)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(x)


model = Climate()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
schedule = StagedWarmupCosine(optimizer, stages=[(8, 3, 1e-3), (8, 0, 3e-4)])  # no warm-up in the second stage
gen = torch.Generator().manual_seed(5)

for step in range(14):
    fields = torch.randn(16, 8, 6, generator=gen)
    target = torch.stack([fields.sum(-1), fields[..., 0] * fields[..., 1]], dim=-1)
    schedule.apply(step)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(fields)
    loss = nn.functional.smooth_l1_loss(pred.float(), target)
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}  loss {loss.item():.4f}")
