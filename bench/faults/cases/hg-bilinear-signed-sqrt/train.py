"""Fine-grained recognition with bilinear pooling: signed square root, then L2 norm."""

import torch
import torch.nn.functional as F
from torch import nn


class BilinearCNN(nn.Module):
    def __init__(self, classes=6, width=12):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, 2), nn.BatchNorm2d(width), nn.Tanh(), nn.Conv2d(width, width, 3, 2)
        )
        self.classifier = nn.Linear(width * width, classes)

    @staticmethod
    def signed_sqrt(x):
        return torch.sqrt(F.relu(x)) - torch.sqrt(F.relu(-x))

    def forward(self, x):
        f = self.features(x).flatten(2)
        gram = torch.einsum("bcn,bdn->bcd", f, f) / f.shape[-1]
        pooled = self.signed_sqrt(gram.flatten(1))
        return self.classifier(F.normalize(pooled, dim=1))


def run(steps=50):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(3)
    kernels = torch.randn(6, 1, 5, 5, generator=g)
    net = BilinearCNN()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        y = torch.randint(0, 6, (16,), generator=g)
        noise = torch.randn(1, 16, 20, 20, generator=g)
        x = F.conv2d(noise, kernels[y], groups=16).transpose(0, 1) / 5
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        opt.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} grad norm {norm.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    print(f"final loss {run():.4f}")
