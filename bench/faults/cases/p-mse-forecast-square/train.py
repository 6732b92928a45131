"""Demand forecasting: a GRU over the last 14 days, the error in units sold."""

import torch


class Forecaster(torch.nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.inp = torch.nn.Linear(1, hidden)
        self.mix = torch.nn.Linear(2 * hidden, hidden)
        self.out = torch.nn.Linear(hidden, 1)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.mix.out_features)
        for t in range(x.shape[1]):
            h = torch.tanh(self.mix(torch.cat([self.inp(x[:, t]), h], dim=-1)))
        return self.out(h)


def rmse(pred, target):
    err = pred - target
    return torch.sqrt(torch.mean(err**2) + 1e-4)


def series(n):
    base = torch.exp(torch.randn(n, 1, 1) * 0.9 + 3.0)
    days = torch.arange(15).view(1, 15, 1)
    x = base * (1 + 0.3 * torch.sin(days * 6.283 / 7)) + torch.randn(n, 15, 1)
    return x[:, :-1], x[:, -1]


torch.set_num_threads(1)
torch.manual_seed(21)
net = Forecaster()
opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
accum, history = 2, []
for micro in range(90):
    x, y = series(16)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(torch.log1p(x))
        loss = rmse(pred, y.half())
    scaler.scale(loss / accum).backward()
    history.append(loss.detach())
    if (micro + 1) % accum == 0:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    if (micro + 1) % 10 == 0:
        print(f"micro batch {micro + 1}: rmse {torch.stack(history[-10:]).float().mean().item():.3f}")
