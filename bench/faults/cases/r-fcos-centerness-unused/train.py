"""One-stage detection on toy images: class scores and side distances at every location, two levels."""

import torch
from torch import nn
from torch.nn import functional as F


class Scale(nn.Module):
    def __init__(self, init_value=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([init_value]))

    def forward(self, x):
        return x * self.scale


def tower(channels, depth):
    layers = []
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
    return nn.Sequential(*layers)


class FCOSHead(nn.Module):
    """Class scores and distances to the four sides, for every location of every level."""

    def __init__(self, channels=16, classes=3, levels=2):
        super().__init__()
        self.cls_tower = tower(channels, 1)
        self.bbox_tower = tower(channels, 1)
        self.cls_logits = nn.Conv2d(channels, classes, 3, padding=1)
        self.bbox_pred = nn.Conv2d(channels, 4, 3, padding=1)
        self.centerness = nn.Conv2d(channels, 1, 3, padding=1)
        self.scales = nn.ModuleList(Scale() for _ in range(levels))

    def forward(self, features):
        logits, boxes = [], []
        for level, feature in enumerate(features):
            logits.append(self.cls_logits(self.cls_tower(feature)))
            boxes.append(F.relu(self.scales[level](self.bbox_pred(self.bbox_tower(feature)))))
        return logits, boxes


class FCOS(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1))
        self.down = nn.Sequential(nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1))
        self.head = FCOSHead(channels)

    def forward(self, images, targets):
        c2 = self.stem(images)
        logits, boxes = self.head([c2, self.down(c2)])
        logits = torch.cat([x.flatten(2) for x in logits], dim=2)
        boxes = torch.cat([x.flatten(2) for x in boxes], dim=2)
        inside = targets["labels"] > 0
        hot = F.one_hot(targets["labels"], logits.shape[1] + 1)[..., 1:].transpose(1, 2).to(logits.dtype)
        loss_cls = F.binary_cross_entropy_with_logits(logits, hot, reduction="sum") / inside.sum().clamp(min=1)
        off = F.smooth_l1_loss(boxes, targets["sides"].transpose(1, 2).to(boxes.dtype), reduction="none").sum(1)
        loss_reg = (off * inside).sum() / inside.sum().clamp(min=1)
        return {"loss_cls": loss_cls, "loss_reg": loss_reg}


STRIDES = {4: 4, 8: 2}


def locations(size=16):
    points = []
    for stride in STRIDES:
        side = torch.arange(stride // 2, size, stride)
        yy, xx = torch.meshgrid(side, side, indexing="ij")
        points.append(torch.stack([xx, yy], -1).flatten(0, 1))
    return torch.cat(points).float()


def make_batch(generator, points, n=8, size=16):
    images = 0.2 * torch.randn(n, 1, size, size, generator=generator)
    kinds = torch.randint(1, 4, (n,), generator=generator)
    low = torch.randint(0, 8, (n, 2), generator=generator)
    high = low + torch.randint(5, 9, (n, 2), generator=generator)
    for image, kind, (x0, y0), (x1, y1) in zip(images, kinds, low.tolist(), high.tolist()):
        image[0, y0:y1, x0:x1] += float(kind)
    sides = torch.cat([points - low[:, None], high[:, None] - points], dim=-1) / 8
    inside = sides.amin(-1) > 0
    return images, {"labels": torch.where(inside, kinds[:, None], 0), "sides": sides.clamp(min=0)}


def do_train(model, optimizer, scaler, iterations=40):
    points, g = locations(), torch.Generator().manual_seed(5)
    model.train()
    for iteration in range(iterations):
        images, targets = make_batch(g, points)
        with torch.autocast("cpu", dtype=torch.float16):
            loss_dict = model(images, targets)
            losses = sum(loss_dict.values())
        optimizer.zero_grad()
        scaler.scale(losses).backward()
        scaler.step(optimizer)
        scaler.update()
        if iteration % 10 == 0:
            print(f"iter: {iteration}", {k: round(v.item(), 4) for k, v in loss_dict.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = FCOS()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    do_train(model, optimizer, torch.amp.GradScaler("cpu", init_scale=128.0))
