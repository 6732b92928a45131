import argparse

import torch
import torch.nn.functional as F
from torch import nn

from contiguous import FlatGroup


class Bottleneck(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout // 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout // 2)
        self.conv2 = nn.Conv2d(cout // 2, cout, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.shortcut = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ReID(nn.Module):
    def __init__(self, identities):
        super().__init__()
        self.layers = nn.Sequential(Bottleneck(3, 16, 1), Bottleneck(16, 32, 2))
        self.bottleneck = nn.BatchNorm1d(32)
        self.bottleneck.bias.requires_grad_(False)
        self.classifier = nn.Linear(32, identities, bias=False)

    def forward(self, x):
        feat = self.layers(x).mean((2, 3))
        return feat, self.classifier(self.bottleneck(feat))


def circle_loss(feat, targets, margin=0.25, gamma=8.0):
    feat = F.normalize(feat.float(), dim=1)
    sim = feat @ feat.t()
    same = (targets[:, None] == targets).float()
    positive = F.softplus(torch.logsumexp(-gamma * sim - 99.0 * (1 - same), dim=1) + gamma * (1 - margin))
    negative = torch.logsumexp(gamma * sim - 99.0 * same, dim=1)
    return (positive + F.softplus(negative - gamma * margin)).mean() / gamma


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--ids", type=int, default=10)
    return parser.parse_args()


def main():
    args = get_args()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = ReID(args.ids)
    norms = [p for n, p in model.named_parameters() if ".bn" in n or n.startswith("bottleneck")]
    others = [p for n, p in model.named_parameters() if not (".bn" in n or n.startswith("bottleneck"))]
    groups = [FlatGroup(others), FlatGroup(norms)]
    optimizer = torch.optim.Adam(
        [
            {"params": [groups[0].buffer], "weight_decay": 5e-4},
            {"params": [groups[1].buffer], "weight_decay": 0.0, "lr": 2 * args.lr},
        ],
        lr=args.lr,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    looks = torch.randn(args.ids, 3, 12, 6)

    for it in range(args.iters):
        targets = torch.randperm(args.ids)[:4].repeat_interleave(4)
        images = looks[targets] + 0.6 * torch.randn(16, 3, 12, 6)
        with torch.autocast("cpu", dtype=torch.float16):
            feat, logits = model(images)
            losses = {"loss_cls": F.cross_entropy(logits, targets), "loss_circle": circle_loss(feat, targets)}
        total = losses["loss_cls"] + losses["loss_circle"]
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(g.is_valid() for g in groups)
        if it % 8 == 0 or it + 1 == args.iters:
            print(f"iter {it}: total {total.item():.4f} " + " ".join(f"{k} {v.item():.4f}" for k, v in losses.items()))


if __name__ == "__main__":
    main()
