"""Classify sets of crops with a frozen backbone; sets differ in size and are padded."""

import torch
import torch.nn as nn


class Backbone(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.layers(x).mean((2, 3))


class SetClassifier(nn.Module):
    def __init__(self, backbone, width=24, classes=3):
        super().__init__()
        self.backbone = backbone
        self.gate = nn.Linear(width, 1)
        self.head = nn.Sequential(nn.Linear(2 * width, 32), nn.GELU(), nn.Linear(32, classes))

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, crops, sizes):
        b, n = crops.shape[:2]
        feats = self.backbone(crops.flatten(0, 1)).view(b, n, -1)
        empty = torch.arange(n)[None] >= sizes[:, None]
        peak = feats.masked_fill(empty.unsqueeze(-1), float("-inf")).amax(1)
        weight = self.gate(feats).squeeze(-1).masked_fill(empty, float("-inf")).softmax(-1)
        mean = (weight.unsqueeze(-1) * feats).sum(1)
        return self.head(torch.cat([peak, mean], -1))


def make_set(y, n=5):
    sizes = torch.randint(1, n + 1, (len(y),))
    crops = torch.randn(len(y), n, 3, 12, 12)
    crops[torch.arange(len(y)), 0, y] += 2.0
    return crops, sizes


def main():
    torch.set_num_threads(1)
    torch.manual_seed(5)
    backbone = Backbone()
    for _ in range(3):  # statistics of the pre-training data
        backbone(torch.randn(32, 3, 12, 12))
    for p in backbone.parameters():
        p.requires_grad_(False)
    model = SetClassifier(backbone)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in range(25):
        y = torch.randint(0, 3, (12,))
        crops, sizes = make_set(y)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(crops, sizes).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
        y = torch.randint(0, 3, (40,))
        print("accuracy", (model(*make_set(y)).argmax(-1) == y).float().mean().item())


if __name__ == "__main__":
    main()
