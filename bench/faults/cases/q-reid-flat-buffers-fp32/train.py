import collections
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(7)


def flatten_parameters(module):
    """One buffer for all weights and one for all gradients; the module's tensors become views of them."""
    params = [p for p in module.parameters() if p.requires_grad]
    weights = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
    weights.grad = torch.zeros_like(weights)
    start = 0
    for p in params:
        stop = start + p.numel()
        p.data = weights.data[start:stop].view(p.shape)
        p.grad = weights.grad[start:stop].view(p.shape)
        start = stop
    return weights


class PartPooling(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return F.adaptive_avg_pool2d(x, (self.parts, 1)).flatten(1)


class EMA:
    def __init__(self, beta=0.8):
        self.beta, self.value = beta, None

    def __call__(self, new):
        self.value = new if self.value is None else self.beta * self.value + (1 - self.beta) * new
        return self.value


net = nn.Sequential(
    collections.OrderedDict(
        conv1=nn.Conv2d(3, 12, 5, stride=2, padding=2),
        act1=nn.PReLU(),
        conv2=nn.Conv2d(12, 24, 3, stride=2, padding=1),
        act2=nn.PReLU(),
        pool=PartPooling(4),
        embed=nn.Linear(96, 32),
        classifier=nn.Linear(32, 12),
    )
)
flat = flatten_parameters(net)
optimizer = torch.optim.SGD([flat], lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 50], gamma=0.1)

people = torch.randn(12, 3, 24, 12)
smooth_loss, smooth_acc = EMA(), EMA()
started = time.time()
for iteration in range(60):
    ids = torch.randint(0, 12, (16,))
    images = people[ids] + 0.3 * torch.randn(16, 3, 24, 12)
    logits = net(images)
    loss = F.cross_entropy(logits, ids)

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()

    acc = (logits.argmax(1) == ids).float().mean().item()
    line = f"iter {iteration:3d} loss {smooth_loss(loss.item()):.4f} acc {smooth_acc(acc):.3f}"
    if iteration % 10 == 9:
        print(line, f"lr {scheduler.get_last_lr()[0]:.4f}")
