import argparse
import torch
from torch import nn


def nt_xent(out_1, out_2, temperature):
    """SimCLR's loss, with the negatives' mask applied before the exponential."""
    out = torch.cat([out_1, out_2], dim=0)
    n = len(out)
    cov = torch.mm(out, out.t())
    keep = ~torch.eye(n, dtype=torch.bool)
    sim = torch.exp(cov[keep].view(n, n - 1) / temperature)
    neg = sim.float().sum(dim=-1)
    rows = torch.arange(n)
    partner = (rows + n // 2) % n
    pos = sim[rows, partner - (partner > rows).long()].float()
    return (torch.log(neg) - torch.log(pos)).mean()


class Projector(nn.Module):
    def __init__(self, d_in=20, d=32, d_out=8):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(d_in, d), nn.BatchNorm1d(d), nn.ReLU(), nn.Linear(d, d))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(d, d_out))

    def forward(self, x):
        z = self.head(self.backbone(x))
        return z / z.norm(dim=-1, keepdim=True).clamp(min=1e-3)


def augment(x):
    return x * (1 + 0.3 * torch.randn(x.shape[0], 1)) + 0.8 * torch.randn_like(x)


parser = argparse.ArgumentParser()
parser.add_argument("--temperature", type=float, default=0.089)
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)

data = torch.randn(256, 20)
net = Projector()
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
running = None
for i in range(args.steps):
    x = data[torch.randint(0, 256, (12,))]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nt_xent(net(augment(x)), net(augment(x)), args.temperature)
    running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if i % 8 == 7:
        print(f"{i + 1:4d}/{args.steps}  loss {running:.4f}")
