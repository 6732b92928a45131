"""Quantisation aware training by hand: observers that start at +-inf, early stopping that starts at inf."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MinMaxObserver(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    def forward(self, x):
        if self.training:
            d = x.detach().float()
            self.min_val.copy_(torch.minimum(self.min_val, d.min()))
            self.max_val.copy_(torch.maximum(self.max_val, d.max()))
        return x


class QConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1)
        self.bn = nn.BatchNorm2d(cout)
        self.act_observer = MinMaxObserver()

    def forward(self, x):
        return self.act_observer(F.relu(self.bn(self.conv(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = QConv(1, 6), QConv(6, 8)
        self.aux = QConv(6, 4)  # switched on in the second phase only
        self.use_aux = False
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        x = F.max_pool2d(self.l1(x), 2)
        a = self.aux(x).amax((2, 3)) if self.use_aux else x.new_zeros(x.shape[0], 4)
        return self.fc(torch.cat([self.l2(x).amax((2, 3)), a], dim=1))


class EarlyStopping:
    def __init__(self, patience):
        self.best = torch.tensor(float("inf"))
        self.patience, self.bad = patience, 0

    def __call__(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = torch.minimum(self.best, value)
        return self.bad >= self.patience


torch.set_num_threads(1)
torch.manual_seed(6)
protos = torch.randn(4, 1, 8, 8)


def data(n):
    y = torch.randint(0, 4, (n,))
    return protos[y] + 0.5 * torch.randn(n, 1, 8, 8), y


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
stop = EarlyStopping(patience=4)
for epoch in range(6):
    net.train()
    net.use_aux = epoch >= 3
    for _ in range(5):
        x, y = data(12)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        x, y = data(24)
        val = F.cross_entropy(net(x), y)
    ranges = {
        n: (round(m.min_val.item(), 2), round(m.max_val.item(), 2))
        for n, m in net.named_modules()
        if isinstance(m, MinMaxObserver)
    }
    print(f"epoch {epoch} train {loss.item():.4f} val {val.item():.4f} ranges {ranges}")
    if stop(val):
        break
print(f"final loss {loss.item():.4f}, best val {stop.best.item():.4f}")
