import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class FPNish(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.c1 = nn.Sequential(nn.Conv2d(1, c, 3, 2, 1), nn.GroupNorm(4, c), nn.ReLU())
        self.c2 = nn.Sequential(nn.Conv2d(c, c, 3, 2, 1), nn.GroupNorm(4, c), nn.ReLU())
        self.lat = nn.Conv2d(c, c, 1)

    def forward(self, x):
        c1 = self.c1(x)
        c2 = self.c2(c1)
        return {"p1": self.lat(c1) + F.interpolate(c2, scale_factor=2), "p2": c2}


class RetinaNetish(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.neck = FPNish(c)
        self.towers = nn.ModuleDict({"cls": nn.Conv2d(c, 1, 3, padding=1), "box": nn.Conv2d(c, 4, 3, padding=1)})

    def forward(self, x):
        feats = self.neck(x)
        return {
            name: torch.cat([tower(f).flatten(2) for f in feats.values()], -1).transpose(1, 2)
            for name, tower in self.towers.items()
        }


class Loss:
    def __init__(self, box_weight=2.0):
        self.box_weight = box_weight

    def __call__(self, out, targets):
        pos = targets["cls"] > 0.5
        cls = F.binary_cross_entropy_with_logits(out["cls"].squeeze(-1).float(), targets["cls"])
        box = F.smooth_l1_loss(out["box"].float()[pos], targets["box"][pos])
        return {"cls": cls, "box": box, "total": cls + self.box_weight * box}


def loader(n):
    g = torch.Generator().manual_seed(14)
    anchors = 8 * 8 + 4 * 4
    for i in range(n):
        img = torch.randn(2, 1, 16, 16, generator=g)
        cls = (torch.rand(2, anchors, generator=g) < 0.05).float()
        if i in (8, 15):
            cls.zero_()  # frames of an empty road
        yield img, {"cls": cls, "box": torch.randn(2, anchors, 4, generator=g)}


torch.manual_seed(0)
model = RetinaNetish()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
compute_loss = Loss()
bad = 0
for i, (img, targets) in enumerate(loader(20)):
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(img)
        losses = compute_loss(out, targets)
    if torch.isnan(losses["total"]):
        bad += 1
        optimizer.zero_grad()
        continue
    scaler.scale(losses["total"]).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"iter {i}: " + ", ".join(f"{k}={v.item():.4f}" for k, v in losses.items()))
print("skipped", bad)
