import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from checkpoint import Checkpointer
from engine import AMPTrainer, HookBase


class PeriodicCheckpoint(HookBase):
    def __init__(self, checkpointer, period):
        self.checkpointer, self.period = checkpointer, period

    def after_step(self):
        if (self.trainer.iter + 1) % self.period == 0:
            self.checkpointer.save(f"model_{self.trainer.iter:07d}", iteration=self.trainer.iter)


class PeriodicWriter(HookBase):
    def after_step(self):
        if self.trainer.iter % 10 == 0:
            values = "  ".join(f"{k}: {v:.4g}" for k, v in self.trainer.storage.items() if k != "data_time")
            print(f"iter: {self.trainer.iter}  {values}")


class TinyDetector(nn.Module):
    """One object per image: which kind, and where."""

    def __init__(self, kinds=4):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.box_head = nn.Sequential(nn.Linear(16 * 16, 32), nn.ReLU())
        self.cls_score, self.bbox_pred = nn.Linear(32, kinds), nn.Linear(32, 2)

    def forward(self, data):
        x = self.box_head(self.backbone(data["image"]))
        return {
            "loss_cls": F.cross_entropy(self.cls_score(x), data["kind"]),
            "loss_box_reg": F.smooth_l1_loss(self.bbox_pred(x), data["centre"]),
        }


def build_loader(seed=0, batch=8):
    g = torch.Generator().manual_seed(seed)
    while True:
        centre = torch.randint(3, 13, (batch, 2), generator=g)
        kind = torch.randint(0, 4, (batch,), generator=g)
        image = 0.3 * torch.randn(batch, 1, 16, 16, generator=g)
        for i in range(batch):
            y, x = centre[i].tolist()
            image[i, 0, y - 1 : y + 2, x - 1 : x + 2] += 1.0 + kind[i]
        yield {"image": image, "kind": kind, "centre": centre / 16}


def main(folder, max_iter=80):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TinyDetector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    checkpointer = Checkpointer(model, folder, optimizer=optimizer)
    start = checkpointer.resume().get("iteration", -1) + 1
    trainer = AMPTrainer(model, build_loader(), optimizer)
    trainer.register_hooks([PeriodicCheckpoint(checkpointer, 40), PeriodicWriter()])
    trainer.train(start, max_iter)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
