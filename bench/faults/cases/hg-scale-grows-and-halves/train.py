import torch
from torch import nn
from torch.nn import functional as F

from amp_util import MixedPrecision

torch.set_num_threads(1)


class SalientNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Conv2d(12, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU())
        self.dec = nn.Conv2d(36, 1, 3, padding=1)

    def forward(self, rgb, thermal):
        a = self.enc1(torch.cat([rgb, thermal], 1))
        b = F.interpolate(self.enc2(a), scale_factor=2)
        return self.dec(torch.cat([a, b], 1))


def sample(g, n=6, size=20):
    mask = (F.avg_pool2d(torch.randn(n, 1, size, size, generator=g), 5, 1, 2) > 0.1).float()
    return mask + 0.5 * torch.randn(mask.shape, generator=g), mask + torch.randn(mask.shape, generator=g), mask


torch.manual_seed(3)
gen = torch.Generator().manual_seed(1)
net, amp = SalientNet(), MixedPrecision()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
for i in range(80):
    rgb, thermal, mask = sample(gen)
    optimizer.zero_grad()
    with amp.context():
        out = net(rgb, thermal)
        loss = F.binary_cross_entropy_with_logits(out, mask, reduction="mean")
    scale = amp.step(loss, optimizer, scheduler)
    if i % 10 == 0:
        print(f"iter {i} bce {loss.item():.4f} loss scale {scale:g}")
down = sum(b < a for a, b in zip(amp.history, amp.history[1:]))
print(f"final loss {loss.item():.4f}, the scale was halved {down} times, at most {max(amp.history):g}")
