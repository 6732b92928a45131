import torch
from torch import nn


class Bottleneck(nn.Module):
    """Photon counts: features are in raw counts until the layer norm, tens of thousands at most."""

    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x):
        counts = self.up(x)
        self.peak = counts.detach().abs().max()
        return self.down(self.norm(counts))


class Model(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.body = Bottleneck(dim)
        self.out = nn.Linear(dim, 1)
        with torch.no_grad():
            self.body.up.weight.copy_(torch.eye(dim))
        self.body.up.weight.requires_grad_(False)

    def forward(self, x):
        return self.out(self.body(x)).squeeze(-1)


torch.set_num_threads(1)
torch.manual_seed(14)
model = Model()
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
peak = 0.0
for step in range(40):
    x = (torch.rand(16, 24) * 63000).round()
    y = (x[:, :12].sum(1) - x[:, 12:].sum(1)) / 63000
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.smooth_l1_loss(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    peak = max(peak, model.body.peak.item())
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f} largest feature so far {peak:.0f}")
print(f"final loss {loss.item():.4f}")
