import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader


class Detector(nn.Module):
    """One box per image: objectness map, and the box at its cell."""

    def __init__(self, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.SiLU(), nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(4, width), nn.SiLU()
        )
        self.cls_head = nn.Conv2d(width, 1, 1)
        self.box_head = nn.Conv2d(width, 2, 1)

    def forward(self, images, targets=None):
        feats = self.backbone(images)
        heat, size = self.cls_head(feats).flatten(1), self.box_head(feats).flatten(2)
        if targets is None:
            return heat.argmax(1), size
        cell, wh = targets["cell"], targets["wh"]
        picked = size.gather(2, cell[:, None, None].expand(-1, 2, 1)).squeeze(2)
        losses = {"cls": F.cross_entropy(heat, cell), "box": F.smooth_l1_loss(picked.float(), wh)}
        return {"total_loss": sum(losses.values()), **losses}


class BaseTrainer:
    def __init__(self, config, dataset):
        self.config = config
        self.model = Detector()
        self.loader = DataLoader(dataset, config.batch_size, shuffle=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", enabled=config.amp)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: min(1.0, (update + 1) / config.warmup_updates)
        )
        self.updates = 0

    def fit(self):
        for epoch in range(self.config.epochs):
            loss = self._train_epoch()
            print(f"epoch {epoch}: loss {loss:.4f} updates {self.updates} scale {self.scaler.get_scale():.0f}")
            self._save(f"epoch {epoch}")

    def _train_epoch(self):
        accum, total = self.config.grad_accum_steps, len(self.loader)
        self.model.train()
        self.optimizer.zero_grad()
        running = 0.0
        for i, (images, targets) in enumerate(self.loader):
            window_start = i - i % accum
            actual_window = min(accum, total - window_start)
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.config.amp):
                outputs = self.model(images, targets)
            loss = outputs["total_loss"] / actual_window
            self.scaler.scale(loss).backward()
            running += outputs["total_loss"].item()
            if (i + 1) % accum == 0 or i + 1 == total:
                self._optimizer_step()
        return running / total

    def _optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() >= scale:  # the step was not skipped
            self.scheduler.step()
            self.updates += 1

    def _save(self, tag):
        self.checkpoint = {
            "tag": tag,
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
