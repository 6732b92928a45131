"""A detector of one object in the manner of detectron2, in float16: pictures without objects, clipping, a warm-up hook."""

import torch
from engine import AMPTrainer, HookBase
from torch import nn
from torch.nn import functional as F


class Detector(nn.Module):
    def __init__(self, kinds=3):
        super().__init__()
        self.kinds = kinds
        self.backbone = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU())
        self.cls_score = nn.Linear(256, kinds + 1)
        self.bbox_pred = nn.Linear(256, 4)

    def forward(self, data):
        x = self.backbone(data["image"]).flatten(1)
        loss_cls = F.cross_entropy(self.cls_score(x), data["kind"])
        foreground = data["kind"] < self.kinds
        deltas = self.bbox_pred(x)[foreground].float()
        loss_box = F.l1_loss(deltas, data["boxes"][foreground] / 16, reduction="sum") / max(1, int(foreground.sum()))
        return {"loss_cls": loss_cls, "loss_box_reg": loss_box}


def annotated(batch=4):
    g = torch.Generator().manual_seed(2)
    while True:
        kind = torch.randint(0, 4, (batch,), generator=g)  # 3 is background: now and then all of a batch
        corner, size = torch.randint(0, 8, (batch, 2), generator=g), torch.randint(3, 8, (batch, 2), generator=g)
        image = 0.3 * torch.randn(batch, 1, 16, 16, generator=g)
        for i, k in enumerate(kind.tolist()):
            (x, y), (w, h) = corner[i].tolist(), size[i].tolist()
            if k < 3:
                image[i, 0, y : y + h, x : x + w] += 1.0 + k
        yield {"image": image, "kind": kind, "boxes": torch.cat([corner, corner + size], 1).float()}


class WarmUp(HookBase):
    """Linear; waits while the scale falls."""

    def __init__(self, lr, iterations):
        self.lr, self.iterations, self.made, self.scale = lr, iterations, 0, None

    def before_step(self):
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.made + 1) / self.iterations)
        self.scale = self.trainer.grad_scaler.get_scale()

    def after_step(self):
        self.made += self.trainer.grad_scaler.get_scale() >= self.scale


class PeriodicWriter(HookBase):
    def after_step(self):
        if self.trainer.iter % 20 == 0:
            print(f"iter: {self.trainer.iter}  " + "  ".join(f"{k}: {v:.4g}" for k, v in self.trainer.storage.items()))


def clipping(optimizer_class, max_norm):
    """The optimizer clips by itself, hence after the scaler has unscaled."""

    class Clipped(optimizer_class):
        def step(self, closure=None):
            for group in self.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], max_norm)
            return super().step(closure)

    return Clipped


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Detector()
    optimizer = clipping(torch.optim.SGD, 1.0)(model.parameters(), lr=0.0, momentum=0.9)
    trainer = AMPTrainer(model, annotated(), optimizer)
    trainer.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=30)
    trainer.register_hooks([WarmUp(0.02, 20), PeriodicWriter()])
    trainer.train(0, 90)
