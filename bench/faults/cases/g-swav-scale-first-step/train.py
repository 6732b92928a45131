"""Online clustering of two views, SwAV style. Encoder and prototypes run in half, the loss is plain Python below them."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiPrototypes(nn.Module):
    def __init__(self, dim, n_protos):
        super().__init__()
        self.prototypes = nn.Linear(dim, n_protos, bias=False)

    def forward(self, z):
        return self.prototypes(z)


class Net(nn.Module):
    def __init__(self, inp=48, hidden=96, dim=32, n_protos=24):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(inp, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.projection_head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.head = MultiPrototypes(dim, n_protos)

    def forward(self, x):
        return self.head(self.projection_head(self.backbone(x)))


@torch.no_grad()
def sinkhorn(out, eps=0.5, iters=3):
    q = torch.exp(out.float() / eps).t()
    q /= q.sum()
    for _ in range(iters):
        q /= q.sum(dim=1, keepdim=True) * q.shape[0]
        q /= q.sum(dim=0, keepdim=True) * q.shape[1]
    return (q * q.shape[1]).t()


def train(loader, model, optimizer, scaler, epoch, temperature=0.1):
    model.train()
    for it, x in enumerate(loader):
        views = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            w = model.head.prototypes.weight
            w.copy_(F.normalize(w, dim=1))
        with torch.autocast("cpu", dtype=torch.float16):
            outs = [model(v) for v in views]

        loss = 0
        for a, b in ((0, 1), (1, 0)):
            q = sinkhorn(outs[a]).to(outs[b].dtype)
            loss = loss - (q * F.log_softmax(outs[b] / temperature, dim=1)).sum(dim=1).mean()
        loss = loss / 2

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if it % 5 == 0:
            print(f"Epoch: [{epoch}][{it}]\tLoss {loss.item():.4f}\tscale {scaler.get_scale():g}")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(31)
    centres = torch.randn(12, 48)
    data = (centres[torch.randint(0, 12, (1024,))] + 0.3 * torch.randn(1024, 48)).split(64)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-6)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(2):
        train(data, model, optimizer, scaler, epoch)


if __name__ == "__main__":
    main()
