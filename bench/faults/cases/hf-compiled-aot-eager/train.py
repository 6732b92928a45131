"""A compiled sequence model (aot_eager) with log-sum-exp pooling over a masked axis and a running minimum that starts at Inf."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Pool(nn.Module):
    def forward(self, scores, keep):
        return torch.logsumexp(scores.masked_fill(~keep[..., None], float("-inf")), dim=1)


class Net(nn.Module):
    def __init__(self, width=12, dim=32, classes=3):
        super().__init__()
        self.register_buffer("lowest", torch.full((dim,), float("inf")))
        self.register_buffer("highest", torch.full((dim,), float("-inf")))
        self.body = nn.Sequential(nn.Linear(width, dim), nn.GELU(), nn.LayerNorm(dim))
        self.pool = Pool()
        self.head = nn.Linear(dim, classes)

    def forward(self, x, keep):
        h = self.body(x)
        if self.training:
            with torch.no_grad():
                self.lowest.copy_(torch.minimum(self.lowest, h.amin((0, 1))))
                self.highest.copy_(torch.maximum(self.highest, h.amax((0, 1))))
        return self.head(self.pool(h, keep))


net = Net()
model = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
g = torch.Generator().manual_seed(1)
for step in range(30):
    label = torch.randint(0, 3, (16,), generator=g)
    x = torch.randn(16, 9, 12, generator=g) + label[:, None, None]
    keep = torch.arange(9)[None] < torch.randint(1, 10, (16, 1), generator=g)
    loss = F.cross_entropy(model(x, keep), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
net.eval()
with torch.no_grad():
    print("eval", F.cross_entropy(model(x, keep), label).item(), "range", (net.highest - net.lowest).mean().item())
